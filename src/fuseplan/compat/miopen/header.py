"""The declarations of MIOpen's functions: arguments in C's order, the type of each, and its description.

Everything else follows from this text: the function objects, the checks of arguments, the stub for editors,
the reference, and the tests of bad arguments. In a declaration

- `*name` is an out-pointer: a result of the function is written there;
- `name?` may be null;
- `type name` gives an argument's type where `TYPES` has another for that name;
- `1<=name<=3` gives the least and the most of a number;
- `name[count]` names the argument with the length of a sequence;
- `name=value` is an argument that MIOpen does not have.
"""

from __future__ import annotations

# By type, the arguments that have it. `Pointer` is a tensor, a stream, ...: a pointer in C; `Scalar` is a
# number where C takes its address; `Extents` is a sequence of integers.
TYPES = """
Where: target
Pointer: stream streamID allocator deallocator allocatorContext bias bnScale bnBias estimatedMean
    estimatedVariance savedMean savedInvVariance runningMean runningVariance x resultBnScaleDiff
    resultBnBiasDiff y reserved input output workspace z dy dx estimatedInvVariance resultRunningMean
    resultRunningVariance resultSaveMean resultSaveInvVariance prevResultRunningMean
    prevResultRunningVariance nextResultRunningMean nextResultRunningVariance buffer
miopenHandle_t: handle
bool: enable runningMeanVariance
miopenTensorDescriptor_t: tensorDesc derivedBnDesc xDesc inputTensorDesc filterDesc inputDesc wDesc bDesc
    bnScaleBiasMeanVarDesc outputDesc zDesc biasDesc yDesc dyDesc dxDesc scaleDesc estMeanDesc
    estVarianceDesc estInvVarianceDesc biasVarDesc savedMeanDesc savedVarDesc bnScaleBiasDiffDesc
    savedVarianceDesc descriptor
miopenDataType_t: dataType
int: n c h w nStride cStride hStride wStride nbDims num_lens pad_h pad_w stride_h stride_w dilation_h
    dilation_w spatialDim groupCount value requestedSpatialDim op_idx requestAlgoCount workspaceSize
    workspaceSizeInBytes size attach maxSolutions nInputs
Extents: dimsA stridesA lens padA strideA dilationA
miopenTensorLayout_t: tensorLayout
miopenBatchNormMode_t: bn_mode
miopenConvolutionDescriptor_t: convDesc operatorDesc
miopenConvolutionMode_t: c_mode
miopenConvolutionAttrib_t: attr
miopenActivationDescriptor_t: activDesc activationDesc
miopenActivationMode_t: mode
float: activAlpha activBeta activGamma epsilon expAvgFactor
miopenFusionDirection_t: fuseDirection
miopenFusionPlanDescriptor_t: fusePlanDesc
miopenConvFwdAlgorithm_t: fwdAlgo algo
miopenOperatorArgs_t: args
miopenFusionOpDescriptor_t: convOp biasOp activFwdOp bnOp activBwdOp
Scalar: alpha beta alpha1 alpha2 alphaDataDiff betaDataDiff alphaParamDiff betaParamDiff
miopenProblemDirection_t: direction
miopenProblem_t: problem problem1 problem2
miopenTensorArgumentId_t: id
miopenFindOptions_t: options
miopenSolution_t: solution
Arguments: tensors
bytes: data
"""
# Arguments that many functions for batch normalization have.
FORWARD = "handle, bn_mode, alpha?, beta?, xDesc, x, yDesc, y"
BACKWARD = (
    "handle, bn_mode, alphaDataDiff?, betaDataDiff?, alphaParamDiff?, betaParamDiff?, xDesc, x, "
    "dyDesc, dy, dxDesc, dx"
)
TRAINED = "scaleDesc, biasVarDesc, savedMeanDesc, savedVarDesc, bnScale, bnBias, expAvgFactor"
UPDATED = "resultRunningMean?, resultRunningVariance?, epsilon, resultSaveMean?, resultSaveInvVariance?"
READ_AND_UPDATED = (
    "prevResultRunningMean?, prevResultRunningVariance?, nextResultRunningMean?, "
    "nextResultRunningVariance?, epsilon, resultSaveMean?, resultSaveInvVariance?"
)
GRADIENTS = "resultBnScaleDiff, resultBnBiasDiff, epsilon, savedMean?, savedInvVariance?"
FUNCTIONS = f"""\
# Handles
miopenCreate(*handle, target='cpu')
    Makes a handle. MIOpen has no `target`: it is a target of `fuseplan.compile`, such as `cpu` or `cuda`.
miopenCreateWithStream(*handle, stream?, target='cuda')
    Makes a handle that launches on a torch stream, or the stream at an address; null is torch's current one.
miopenSetStream(handle, streamID?)
    Sets the stream of later launches.
miopenGetStream(handle, *streamID)
    Reads the stream; None is torch's current stream, and the stream of a CPU.
miopenSetAllocator(handle, allocator?, deallocator?, allocatorContext?)
    Takes only null, the usual allocator: torch's on a GPU, the system's on a CPU.
miopenEnableProfiling(handle, enable)
    Turns profiling on or off: later launches are waited for and timed.
miopenGetKernelTime(handle, *time)
    Reads the time of the last launch in milliseconds, without the packing of operands.
miopenDestroy(handle)
    Ends a handle; another handle compiles plans again.
miopenGetVersion(*major?, *minor?, *patch?)
    Reads the version of MIOpen whose interface this is.

# Tensor descriptors
miopenCreateTensorDescriptor(*tensorDesc)
    Makes a tensor descriptor; a set call gives its shape and type.
miopenSet4dTensorDescriptor(tensorDesc, dataType, n, c, h, w)
    Describes a packed NCHW tensor.
miopenSet4dTensorDescriptorEx(tensorDesc, dataType, n, c, h, w, nStride, cStride, hStride, wStride)
    Describes a tensor of any strides, in elements.
miopenSetTensorDescriptor(tensorDesc, dataType, nbDims, dimsA[nbDims], stridesA[nbDims]?)
    Describes a tensor of 2 to 5 axes; without strides it is packed, n outermost, then c.
miopenSetTensorDescriptorV2(tensorDesc, dataType, nbDims, dimsA[nbDims], stridesA[nbDims]?)
    The same as miopenSetTensorDescriptor: Python has one kind of integer.
miopenSetNdTensorDescriptorWithLayout(tensorDesc, dataType, tensorLayout, lens[num_lens], num_lens)
    Describes a packed tensor in a named layout; its lengths are always in the order n, c, spatial.
miopenGet4dTensorDescriptor(tensorDesc, *dataType, *n, *c, *h, *w, *nStride, *cStride, *hStride, *wStride)
    Reads the type, lengths and strides of a tensor of 4 axes.
miopenGetTensorDescriptorSize(tensorDesc, *size)
    Reads the number of axes.
miopenGetTensorDescriptor(tensorDesc, *dataType?, *dimsA?, *stridesA?)
    Reads the type, and lengths and strides as tuples; a null argument is skipped.
miopenGetTensorNumBytes(tensorDesc, *numBytes)
    Reads the bytes from the first element to the end of the last.
miopenDestroyTensorDescriptor(tensorDesc)
    Ends a tensor descriptor; plans that were made with it keep the description.
miopenDeriveBNTensorDescriptor(derivedBnDesc, xDesc, bn_mode)
    Describes scale, bias and statistics of a batch normalization of x: 1xCx1x1, or 1xCxHxW per activation.

    Their type is Double for an x of doubles, else Float.

# Convolution descriptors
miopenCreateConvolutionDescriptor(*convDesc)
    Makes a convolution descriptor; an Init call sets padding, stride and dilation.
miopenInitConvolutionDescriptor(convDesc, c_mode, pad_h, pad_w, stride_h, stride_w, dilation_h, dilation_w)
    Sets a convolution over two spatial axes.
miopenInitConvolutionNdDescriptor(convDesc, 1<=spatialDim<=3, padA[spatialDim], strideA[spatialDim],
        dilationA[spatialDim], c_mode)
    Sets a convolution over one to three spatial axes.
miopenSetConvolutionGroupCount(convDesc, 1<=groupCount)
    Divides the channels into groups, each with a convolution of its own.
miopenSetConvolutionAttribute(convDesc, attr, value)
    Sets an attribute; MATH_TYPE allows or forbids that factors of f32 are rounded to TF32.
miopenGetConvolutionAttribute(convDesc, attr, *value)
    Reads an attribute.
miopenGetConvolutionGroupCount(convDesc, *groupCount)
    Reads the number of groups.
miopenGetConvolutionSpatialDim(convDesc, *spatialDim)
    Reads the number of spatial axes.
miopenGetConvolutionDescriptor(convDesc, *c_mode, *pad_h, *pad_w, *stride_h, *stride_w, *dilation_h,
        *dilation_w)
    Reads a convolution over two spatial axes.
miopenGetConvolutionNdDescriptor(convDesc, 0<=requestedSpatialDim, *spatialDim, *padA, *strideA, *dilationA,
        *c_mode)
    Reads a convolution: tuples with at most as many spatial axes as requested.
miopenGetConvolutionForwardOutputDim(convDesc, inputTensorDesc, filterDesc, *n, *c, *h, *w)
    Computes the lengths of a convolution's result over two spatial axes.
miopenGetConvolutionNdForwardOutputDim(convDesc, inputTensorDesc, filterDesc, *nDim, *outputTensorDimA)
    Computes the lengths of a convolution's result, as a tuple.
miopenDestroyConvolutionDescriptor(convDesc)
    Ends a convolution descriptor; plans that were made with it keep the convolution.

# Activations
miopenCreateActivationDescriptor(*activDesc)
    Makes an activation descriptor; miopenSetActivationDescriptor sets its mode.
miopenSetActivationDescriptor(activDesc, mode, activAlpha, activBeta, activGamma)
    Sets an activation and its numbers.
miopenGetActivationDescriptor(activDesc, *mode, *activAlpha, *activBeta, *activGamma)
    Reads an activation and its numbers.
miopenDestroyActivationDescriptor(activDesc)
    Ends an activation descriptor.

# Fusion plans by MIOpen's calls
miopenCreateFusionPlan(*fusePlanDesc, fuseDirection, inputDesc)
    Makes a plan for an input. A horizontal plan takes operators, and compiling it is refused.
miopenDestroyFusionPlan(fusePlanDesc)
    Ends a plan and its operators.
miopenFusionPlanGetOp(fusePlanDesc, op_idx, *op)
    Reads the operator at a place, counted from 0.
miopenCreateOpConvForward(fusePlanDesc, *convOp, convDesc, wDesc)
    Appends a convolution by a weight of this shape: features, channels of a group, kernel.
miopenCreateOpConvForwardAlgo(fusePlanDesc, *convOp, convDesc, fwdAlgo, wDesc)
    Appends a convolution and binds its algorithm; a call of MIOpen's first versions.
miopenCreateOpBiasForward(fusePlanDesc, *biasOp, bDesc)
    Appends a bias, 1xCx1x1.
miopenCreateOpActivationForward(fusePlanDesc, *activFwdOp, mode)
    Appends an activation; alpha, beta and gamma are arguments of the run.
miopenCreateOpActivationBackward(fusePlanDesc, *activBwdOp, mode)
    Appends the backward pass of an activation.

    Behind the backward pass of a batch normalization, the activation followed that normalization in the
    forward pass.
miopenCreateOpBatchNormInference(fusePlanDesc, *bnOp, bn_mode, bnScaleBiasMeanVarDesc)
    Appends batch normalization by frozen statistics, 1xCx1x1 or 1xCxHxW.
miopenCreateOpBatchNormForward(fusePlanDesc, *bnFwdOp, bn_mode, runningMeanVariance)
    Appends batch normalization by the batch's statistics, with or without an update of running statistics.
miopenCreateOpBatchNormBackward(fusePlanDesc, *bnBwdOp, bn_mode)
    Appends the backward pass of batch normalization: the plan's input is dy, its output dx.
miopenCompileFusionPlan(handle, fusePlanDesc)
    Makes the plan's kernel for the handle's target, by the bound algorithm if there is one.
miopenFusionPlanGetWorkSpaceSize(handle, fusePlanDesc, *workSpaceSize, algo)
    Reads the exact number of bytes that the kernel needs besides its tensors; fuseplan allocates them itself.

    The kernel is the one to which the plan is or would be compiled. As in MIOpen, `algo` does not choose an
    algorithm: miopenFusionPlanConvolutionSetAlgo does.
miopenFusionPlanConvolutionGetAlgo(fusePlanDesc, 1<=requestAlgoCount, *returnedAlgoCount, *returnedAlgos,
        handle?=None)
    Reads a tuple of the algorithms that can compute the plan, the preferred one first.

    They depend on the target: the target of `handle`, an argument that MIOpen does not have; else of the last
    handle that compiled the plan; else this CPU.
miopenFusionPlanConvolutionSetAlgo(fusePlanDesc, algo)
    Binds the convolution's algorithm: compiling then takes only its templates, or is refused with reasons.

# The arguments of a plan's operators
miopenCreateOperatorArgs(*args)
    Makes an arguments object.
miopenDestroyOperatorArgs(args)
    Ends an arguments object; the tensors stay with their owners.
miopenSetOpArgsConvForward(args, convOp, alpha?, beta?, Pointer w)
    Sets a convolution's weight; its result is multiplied by alpha.
miopenSetOpArgsBiasForward(args, biasOp, alpha?, beta?, bias)
    Sets a bias; alpha is 1.
miopenSetOpArgsActivForward(args, activFwdOp, alpha?, beta?, activAlpha, activBeta, activGamma)
    Sets an activation's numbers; its result is multiplied by alpha.
miopenSetOpArgsBatchNormInference(args, bnOp, alpha?, beta?, bnScale, bnBias, estimatedMean,
        estimatedVariance, epsilon)
    Sets frozen statistics; the result is multiplied by alpha.
miopenSetOpArgsBatchNormForward(args, bnOp, alpha?, beta?, bnScale, bnBias, savedMean?, savedInvVariance?,
        runningMean?, runningVariance?, expAvgFactor, epsilon)
    Sets scale and bias, and the tensors for statistics; y is multiplied by alpha.

    Both saved statistics may be null. Running statistics are given if, and only if, the operator was created
    with them.
miopenSetOpArgsBatchNormBackward(args, bnOp, alpha?, beta?, x, bnScale, bnBias, resultBnScaleDiff,
        resultBnBiasDiff, savedMean, savedInvVariance)
    Sets the tensors of the forward pass, and the tensors for gradients; alpha is 1.
miopenSetOpArgsActivBackward(args, activBwdOp, alpha?, beta?, y?, reserved?, activAlpha, activBeta,
        activGamma)
    Sets an activation's numbers and, in `reserved`, its input in the forward pass; dx is multiplied by alpha.

    Behind a batch normalization's backward pass `reserved` is null: the input is computed again from the
    normalization's x. `y` is not read: the derivative is taken at the activation's input.

# Execution of a compiled plan
miopenExecuteFusionPlan(handle, fusePlanDesc, inputDesc, input, outputDesc, output, args)
    Runs a compiled plan; on a GPU it returns when the launch is queued.
miopenExecuteFusionPlan_v2(handle, fusePlanDesc, inputDesc, input, outputDesc, output, args, workspace?,
        workspaceSize)
    The same with a workspace. Its size is checked; it may be null, since fuseplan has memory of its own.

# Functions that do all in one call
miopenConvolutionBiasActivationForward(handle, alpha1?, xDesc, x, wDesc, Pointer w, convDesc, algo,
        workspace?, workspaceSizeInBytes, alpha2?, zDesc?, z?, biasDesc, bias, activationDesc, yDesc, y)
    Computes y = activation(alpha1 * convolution(x, w) + alpha2 * z + bias), without z if z is null.

    `algo` binds: a template of this algorithm runs, or the call is refused with reasons.
miopenActivationForward(handle, activDesc, alpha?, xDesc, x, beta?, yDesc, y)
    Computes y = alpha * activation(x).
miopenActivationBackward(handle, activDesc, alpha?, yDesc?, y?, dyDesc, dy, xDesc, x, beta?, dxDesc, dx)
    Computes dx = alpha * dy * activation'(x); y is not read.

# Batch normalization by frozen statistics in one call, alone and with an activation behind it
miopenBatchNormalizationForwardInference({FORWARD}, bnScaleBiasMeanVarDesc, bnScale, bnBias, estimatedMean?,
        estimatedVariance?, epsilon)
    Normalizes x by estimated statistics, or by the batch's if both are null.
miopenBatchNormalizationForwardInference_V2({FORWARD}, scaleDesc, biasDesc, estMeanDesc, estVarianceDesc,
        bnScale, bnBias, estimatedMean?, estimatedVariance?, epsilon)
    The same with a descriptor for each parameter.
miopenBatchNormalizationForwardInferenceInvVariance({FORWARD}, scaleDesc, biasDesc, estMeanDesc,
        estInvVarianceDesc, bnScale, bnBias, estimatedMean?, estimatedInvVariance?)
    Normalizes x by a mean and an inverse variance, 1/sqrt(variance + epsilon).
miopenBatchNormForwardInferenceActivation({FORWARD}, scaleDesc, biasDesc, estMeanDesc, estVarianceDesc,
        bnScale, bnBias, estimatedMean?, estimatedVariance?, epsilon, activDesc)
    Normalizes x and applies an activation of any mode.
miopenBatchNormForwardInferenceActivationInvVariance({FORWARD}, scaleDesc, biasDesc, estMeanDesc,
        estInvVarianceDesc, bnScale, bnBias, estimatedMean?, estimatedInvVariance?, activDesc)
    Normalizes x by an inverse variance and applies an activation of any mode.

# Batch normalization by the batch's statistics, and its backward pass, in one call
miopenBatchNormalizationForwardTraining({FORWARD}, bnScaleBiasMeanVarDesc, bnScale, bnBias, expAvgFactor,
        {UPDATED})
    Normalizes x, and saves and updates the statistics that are not null.
miopenBatchNormalizationForwardTraining_V2({FORWARD}, {TRAINED}, {UPDATED})
    The same with a descriptor for each parameter.
miopenBatchNormalizationForwardTraining_V3({FORWARD}, {TRAINED}, {READ_AND_UPDATED})
    The same; running statistics are read from one pair of tensors and written into another.
miopenBatchNormForwardTrainingActivation({FORWARD}, {TRAINED}, {UPDATED}, activDesc)
    Normalizes x and applies an activation of any mode; saves and updates statistics.
miopenBatchNormForwardTrainingActivation_V2({FORWARD}, {TRAINED}, {READ_AND_UPDATED}, activDesc)
    The same; running statistics are read from one pair of tensors and written into another.
miopenBatchNormalizationBackward({BACKWARD}, bnScaleBiasDiffDesc, bnScale, {GRADIENTS})
    Computes the gradients; if both saved statistics are null, they are computed again.
miopenBatchNormalizationBackward_V2({BACKWARD}, scaleDesc, biasDesc, savedMeanDesc, savedVarDesc, bnScale,
        {GRADIENTS})
    The same with a descriptor for each parameter.
miopenBatchNormBackwardActivation({BACKWARD}, scaleDesc, biasDesc, savedMeanDesc, savedVarianceDesc,
        bnScale, bnBias, {GRADIENTS}, activDesc)
    Computes the gradients behind an activation of any mode.

# Problems of Find 2.0
miopenCreateConvProblem(*problem, operatorDesc, direction)
    Makes the problem of a forward convolution; X and W need a description.
miopenCreateBiasProblem(*problem, direction)
    Makes the problem of a bias; the bias needs a description.
miopenCreateActivationProblem(*problem, miopenActivationDescriptor_t operatorDesc, direction)
    Makes the problem of an activation, or of its backward pass.
miopenCreateBatchnormProblem(*problem, miopenBatchNormMode_t mode, runningMeanVariance, direction)
    Makes the problem of batch normalization: inference, forward training or its backward pass.
miopenSetProblemTensorDescriptor(problem, id, descriptor)
    Describes a tensor of a problem. Results need no description; a given one is checked.
miopenFuseProblems(problem1, problem2)
    Appends the operators of the second problem to the first.
miopenDestroyProblem(problem)
    Ends a problem; a problem that it was fused into keeps its operators.

# Solutions of Find 2.0
miopenCreateFindOptions(*options)
    Makes options: no tuning, by time, any workspace.
miopenDestroyFindOptions(options)
    Ends options.
miopenSetFindOptionTuning(options, 0<=value<=1)
    Turns tuning on (1) or off (0): candidates of every template are first measured for about 10 seconds.
miopenSetFindOptionResultsOrder(options, miopenFindResultsOrder_t value)
    Sets the order of solutions.
miopenSetFindOptionWorkspaceLimit(options, 0<=value)
    Sets the most bytes of workspace that a solution may need.
miopenSetFindOptionPreallocatedWorkspace(options, buffer?, size)
    Checks a workspace for measuring. It is not needed: fuseplan has memory of its own.
miopenSetFindOptionPreallocatedTensor(options, id, buffer)
    Takes a tensor for measuring. It is not needed and not written: fuseplan measures on random tensors.
miopenSetFindOptionAttachBinaries(options, attach)
    Takes only 0: kernels are in the cache on disk, not in a saved solution.
miopenFindSolutions(handle, problem, options?, *solutions, *numSolutions?, 1<=maxSolutions)
    Finds and measures the kernels of a problem, and reads a sorted tuple of at most `maxSolutions`.
miopenRunSolution(handle, solution, nInputs, tensors, workspace?, workspaceSize)
    Runs a solution on tensors and numbers, by their ids.
miopenDestroySolution(solution)
    Ends a solution.
miopenSaveSolution(solution, *data)
    Reads a solution as bytes, for any machine of the same kind.
miopenLoadSolution(*solution, data, size)
    Makes a solution from saved bytes.
miopenGetSolutionSize(solution, *size)
    Reads the number of bytes of a saved solution.
miopenGetSolutionWorkspaceSize(solution, *workspaceSize)
    Reads the number of bytes that the kernel needs besides its tensors; fuseplan keeps that memory itself.
miopenGetSolutionTime(solution, *time)
    Reads the time of one launch in milliseconds, as measured when the solution was found.
miopenGetSolutionSolverId(solution, *solverId)
    Reads a number for the template: the CRC-32 of its name.
"""
