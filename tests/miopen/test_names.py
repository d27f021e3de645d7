"""MIOpen's names, told apart from this library: functions, the order of their arguments, enumerators."""

from __future__ import annotations

import inspect
import platform

import pytest

from fuseplan import miopen
from miopen_calls import activation, convolution, created, handle, ok, tensor

# One function a line, with its arguments in C's order. What is ours alone stands behind a bar.
SIGNATURES = """
miopenCreate handle | target
miopenCreateWithStream handle stream | target
miopenSetStream handle streamID
miopenGetStream handle streamID
miopenSetAllocator handle allocator deallocator allocatorContext
miopenEnableProfiling handle enable
miopenGetKernelTime handle time
miopenDestroy handle
miopenGetVersion major minor patch
miopenGetErrorString error
miopenCreateFusionPlan fusePlanDesc fuseDirection inputDesc
miopenDestroyFusionPlan fusePlanDesc
miopenCompileFusionPlan handle fusePlanDesc
miopenFusionPlanGetOp fusePlanDesc op_idx op
miopenFusionPlanGetWorkSpaceSize handle fusePlanDesc workSpaceSize algo
miopenFusionPlanConvolutionGetAlgo fusePlanDesc requestAlgoCount returnedAlgoCount returnedAlgos | handle
miopenFusionPlanConvolutionSetAlgo fusePlanDesc algo
miopenCreateOpConvForward fusePlanDesc convOp convDesc wDesc
miopenCreateOpActivationForward fusePlanDesc activFwdOp mode
miopenCreateOpActivationBackward fusePlanDesc activBwdOp mode
miopenCreateOpBiasForward fusePlanDesc biasOp bDesc
miopenCreateOpBatchNormInference fusePlanDesc bnOp bn_mode bnScaleBiasMeanVarDesc
miopenCreateOpBatchNormForward fusePlanDesc bnFwdOp bn_mode runningMeanVariance
miopenCreateOpBatchNormBackward fusePlanDesc bnBwdOp bn_mode
miopenCreateOperatorArgs args
miopenDestroyOperatorArgs args
miopenSetOpArgsConvForward args convOp alpha beta w
miopenSetOpArgsBiasForward args biasOp alpha beta bias
miopenSetOpArgsActivForward args activFwdOp alpha beta activAlpha activBeta activGamma
miopenSetOpArgsActivBackward args activBwdOp alpha beta y reserved activAlpha activBeta activGamma
miopenSetOpArgsBatchNormInference args bnOp alpha beta bnScale bnBias estimatedMean estimatedVariance epsilon
miopenSetOpArgsBatchNormForward args bnOp alpha beta bnScale bnBias savedMean savedInvVariance runningMean
    runningVariance expAvgFactor epsilon
miopenSetOpArgsBatchNormBackward args bnOp alpha beta x bnScale bnBias resultBnScaleDiff resultBnBiasDiff
    savedMean savedInvVariance
miopenExecuteFusionPlan handle fusePlanDesc inputDesc input outputDesc output args
miopenExecuteFusionPlan_v2 handle fusePlanDesc inputDesc input outputDesc output args workspace workspaceSize
miopenConvolutionBiasActivationForward handle alpha1 xDesc x wDesc w convDesc algo workspace
    workspaceSizeInBytes alpha2 zDesc z biasDesc bias activationDesc yDesc y
miopenActivationForward handle activDesc alpha xDesc x beta yDesc y
miopenActivationBackward handle activDesc alpha yDesc y dyDesc dy xDesc x beta dxDesc dx
miopenBatchNormForwardInferenceActivation handle bn_mode alpha beta xDesc x yDesc y scaleDesc biasDesc
    estMeanDesc estVarianceDesc bnScale bnBias estimatedMean estimatedVariance epsilon activDesc
miopenBatchNormForwardInferenceActivationInvVariance handle bn_mode alpha beta xDesc x yDesc y scaleDesc
    biasDesc estMeanDesc estInvVarianceDesc bnScale bnBias estimatedMean estimatedInvVariance activDesc
miopenBatchNormForwardTrainingActivation handle bn_mode alpha beta xDesc x yDesc y scaleDesc biasVarDesc
    savedMeanDesc savedVarDesc bnScale bnBias expAvgFactor resultRunningMean resultRunningVariance epsilon
    resultSaveMean resultSaveInvVariance activDesc
miopenBatchNormForwardTrainingActivation_V2 handle bn_mode alpha beta xDesc x yDesc y scaleDesc biasVarDesc
    savedMeanDesc savedVarDesc bnScale bnBias expAvgFactor prevResultRunningMean prevResultRunningVariance
    nextResultRunningMean nextResultRunningVariance epsilon resultSaveMean resultSaveInvVariance activDesc
miopenBatchNormBackwardActivation handle bn_mode alphaDataDiff betaDataDiff alphaParamDiff betaParamDiff xDesc
    x dyDesc dy dxDesc dx scaleDesc biasDesc savedMeanDesc savedVarianceDesc bnScale bnBias resultBnScaleDiff
    resultBnBiasDiff epsilon savedMean savedInvVariance activDesc
miopenBatchNormalizationForwardInferenceInvVariance handle bn_mode alpha beta xDesc x yDesc y scaleDesc
    biasDesc estMeanDesc estInvVarianceDesc bnScale bnBias estimatedMean estimatedInvVariance
miopenBatchNormalizationForwardTraining_V3 handle bn_mode alpha beta xDesc x yDesc y scaleDesc biasVarDesc
    savedMeanDesc savedVarDesc bnScale bnBias expAvgFactor prevResultRunningMean prevResultRunningVariance
    nextResultRunningMean nextResultRunningVariance epsilon resultSaveMean resultSaveInvVariance
miopenBatchNormalizationForwardInference handle bn_mode alpha beta xDesc x yDesc y bnScaleBiasMeanVarDesc
    bnScale bnBias estimatedMean estimatedVariance epsilon
miopenBatchNormalizationForwardTraining handle bn_mode alpha beta xDesc x yDesc y bnScaleBiasMeanVarDesc
    bnScale bnBias expAvgFactor resultRunningMean resultRunningVariance epsilon resultSaveMean
    resultSaveInvVariance
miopenBatchNormalizationBackward handle bn_mode alphaDataDiff betaDataDiff alphaParamDiff betaParamDiff xDesc
    x dyDesc dy dxDesc dx bnScaleBiasDiffDesc bnScale resultBnScaleDiff resultBnBiasDiff epsilon savedMean
    savedInvVariance
miopenCreateConvProblem problem operatorDesc direction
miopenCreateActivationProblem problem operatorDesc direction
miopenCreateBatchnormProblem problem mode runningMeanVariance direction
miopenCreateBiasProblem problem direction
miopenFuseProblems problem1 problem2
miopenSetProblemTensorDescriptor problem id descriptor
miopenDestroyProblem problem
miopenFindSolutions handle problem options solutions numSolutions maxSolutions
miopenRunSolution handle solution nInputs tensors workspace workspaceSize
miopenLoadSolution solution data size
miopenSaveSolution solution data
miopenGetSolutionSize solution size
miopenGetSolutionWorkspaceSize solution workspaceSize
miopenGetSolutionTime solution time
miopenGetSolutionSolverId solution solverId
miopenDestroySolution solution
"""
LINES = SIGNATURES.replace("\n    ", " ").split("\n")[1:-1]

# By enumeration, the words behind what all its enumerators begin with; a number where C skips some.
ENUMERATIONS = {
    "miopenStatus_t miopenStatus": "Success NotInitialized InvalidValue BadParm AllocFailed InternalError "
    "NotImplemented UnknownError UnsupportedOp GpuOperationsSkipped VersionMismatch",
    "miopenFusionDirection_t miopen": "VerticalFusion HorizontalFusion",
    "miopenConvFwdAlgorithm_t miopenConvolutionFwdAlgo": "GEMM Direct FFT Winograd 5 ImplicitGEMM",
    "miopenBatchNormMode_t miopenBN": "PerActivation Spatial",
    "miopenActivationMode_t miopenActivation": "PASTHRU LOGISTIC TANH RELU SOFTRELU ABS POWER CLIPPEDRELU "
    "LEAKYRELU ELU CLAMP",
    "miopenDataType_t miopen": "Half Float Int32 Int8 5 BFloat16 Double Float8_fnuz BFloat8_fnuz Int64",
    "miopenTensorLayout_t miopenTensor": "NCHW NHWC CHWN NCHWc4 NCHWc8 CHWNc4 CHWNc8 NCDHW NDHWC",
    "miopenTensorArgumentId_t miopenTensor": "ArgumentIdInvalid ConvolutionX ConvolutionW ConvolutionY 37 "
    "ActivationX ActivationY ActivationDX ActivationDY BiasX BiasY Bias 48 BatchnormX BatchnormY "
    "BatchnormRunningMean BatchnormRunningVariance BatchnormSavedMean BatchnormSavedVariance BatchnormScale "
    "BatchnormScaleDiff BatchnormEstimatedMean BatchnormEstimatedVariance BatchnormBias BatchnormBiasDiff "
    "BatchnormDX BatchnormDY",
    "miopenTensorArgumentId_t miopenScalar": "2147483650 BatchnormExpAvgFactor BatchnormEpsilon",
}


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.split()[0])
def test_a_function_takes_its_arguments_in_cs_order(line: str) -> None:
    name, *wanted = line.replace(" |", "").split()
    parameters = inspect.signature(getattr(miopen, name)).parameters.values()
    assert [each.name for each in parameters] == wanted
    ours = line.partition("|")[2].split()
    assert [each.name for each in parameters if each.default is not each.empty] == ours


@pytest.mark.parametrize("kind", ENUMERATIONS)
def test_an_enumerator_has_its_number(kind: str) -> None:
    name, prefix = kind.split()
    number = 0
    for word in ENUMERATIONS[kind].split():
        if word.isdigit():
            number = int(word)
            continue
        assert getattr(miopen, prefix + word) is getattr(miopen, name)(number)
        number += 1


def test_each_status_but_two_is_that_of_some_call() -> None:
    """No call ends in UnknownError, as MIOpen's do whose reason is lost, or in GpuOperationsSkipped."""
    cell, empty = miopen.Ref(), created(miopen.miopenCreateTensorDescriptor)
    plan = created(miopen.miopenCreateFusionPlan, miopen.miopenVerticalFusion, tensor(2, 3))
    bias = created(miopen.miopenCreateBiasProblem, miopen.miopenProblemDirectionForward)
    undescribed = (handle(), bias, None, cell, None, 1)
    huge = created(miopen.miopenCreateBiasProblem, miopen.miopenProblemDirectionForward)
    ok(miopen.miopenSetProblemTensorDescriptor(huge, miopen.miopenTensorBiasX, tensor(2**60, 1)))
    ok(miopen.miopenSetProblemTensorDescriptor(huge, miopen.miopenTensorBias, tensor(1, 1)))
    other = handle("cpu:avx2" if platform.machine() == "aarch64" else "cpu:neon")
    later = b"fuseplan solution 99 00000000\n{}"
    relu, line = activation(miopen.miopenActivationRELU), tensor(2, 3)
    statuses = (
        miopen.miopenCreateTensorDescriptor(cell),
        miopen.miopenGetTensorDescriptorSize(empty, cell),
        miopen.miopenFindSolutions(*undescribed),
        miopen.miopenSetConvolutionGroupCount(convolution(), 0),
        miopen.miopenFindSolutions(handle(), huge, None, cell, None, 1),
        miopen.miopenActivationForward(other, relu, 1.0, line, [], 0.0, line, []),
        miopen.miopenSetTensorDescriptor(empty, miopen.miopenInt8, 2, (2, 3), None),
        miopen.miopenCompileFusionPlan(handle(), plan),
        miopen.miopenLoadSolution(cell, later, len(later)),
    )
    skipped = {miopen.miopenStatusUnknownError, miopen.miopenStatusGpuOperationsSkipped}
    assert list(statuses) == [each for each in miopen.miopenStatus_t if each not in skipped]
