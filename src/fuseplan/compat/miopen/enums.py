"""The enumerations of MIOpen's API, with its names and numbers."""

from __future__ import annotations

from enum import IntEnum


class miopenStatus_t(IntEnum):
    """The result of a call; `miopenGetLastErrorMessage` explains every result but Success."""

    miopenStatusSuccess = 0
    miopenStatusNotInitialized = 1
    miopenStatusInvalidValue = 2
    miopenStatusBadParm = 3
    miopenStatusAllocFailed = 4
    miopenStatusInternalError = 5
    miopenStatusNotImplemented = 6
    miopenStatusUnknownError = 7
    miopenStatusUnsupportedOp = 8
    miopenStatusGpuOperationsSkipped = 9
    miopenStatusVersionMismatch = 10


class miopenFusionDirection_t(IntEnum):
    """How a plan's operators are fused: one after the other, or side by side."""

    miopenVerticalFusion = 0
    miopenHorizontalFusion = 1


class miopenDataType_t(IntEnum):
    """Types of elements; fuseplan computes with Half, Float, BFloat16 and Double."""

    miopenHalf = 0
    miopenFloat = 1
    miopenInt32 = 2
    miopenInt8 = 3
    miopenBFloat16 = 5
    miopenDouble = 6
    miopenFloat8 = 7
    miopenFloat8_fnuz = 7
    miopenBFloat8 = 8
    miopenBFloat8_fnuz = 8
    miopenInt64 = 9


class miopenTensorLayout_t(IntEnum):
    """Orders of the axes in memory, outermost first; the layouts with c4 and c8 hold vectors of channels."""

    miopenTensorNCHW = 0
    miopenTensorNHWC = 1
    miopenTensorCHWN = 2
    miopenTensorNCHWc4 = 3
    miopenTensorNCHWc8 = 4
    miopenTensorCHWNc4 = 5
    miopenTensorCHWNc8 = 6
    miopenTensorNCDHW = 7
    miopenTensorNDHWC = 8


class miopenConvolutionMode_t(IntEnum):
    """Kinds of convolution; GroupConv and Depthwise are old words for Convolution with a group count."""

    miopenConvolution = 0
    miopenTranspose = 1
    miopenGroupConv = 2
    miopenDepthwise = 3


class miopenConvolutionAttrib_t(IntEnum):
    """Attributes of a convolution."""

    MIOPEN_CONVOLUTION_ATTRIB_FP16_ALT_IMPL = 0
    MIOPEN_CONVOLUTION_ATTRIB_DETERMINISTIC = 1
    MIOPEN_CONVOLUTION_ATTRIB_FP8_ROUNDING_MODE = 2
    MIOPEN_CONVOLUTION_ATTRIB_MATH_TYPE = 3


class miopenMathType_t(IntEnum):
    """Values of MATH_TYPE: whether the factors of f32 products may be rounded to TF32."""

    miopenMathDefault = 0
    miopenMathPedantic = 1


class miopenConvFwdAlgorithm_t(IntEnum):
    """Algorithms of a forward convolution."""

    miopenConvolutionFwdAlgoGEMM = 0
    miopenConvolutionFwdAlgoDirect = 1
    miopenConvolutionFwdAlgoFFT = 2
    miopenConvolutionFwdAlgoWinograd = 3
    miopenConvolutionFwdAlgoImplicitGEMM = 5


class miopenBatchNormMode_t(IntEnum):
    """The extent of a statistic of batch normalization: one element of an image, or one channel."""

    miopenBNPerActivation = 0
    miopenBNSpatial = 1


class miopenActivationMode_t(IntEnum):
    """Activations; the page on activations has their formulas."""

    miopenActivationPASTHRU = 0
    miopenActivationLOGISTIC = 1
    miopenActivationTANH = 2
    miopenActivationRELU = 3
    miopenActivationSOFTRELU = 4
    miopenActivationABS = 5
    miopenActivationPOWER = 6
    miopenActivationCLIPPEDRELU = 7
    miopenActivationLEAKYRELU = 8
    miopenActivationELU = 9
    miopenActivationCLAMP = 10


class miopenProblemDirection_t(IntEnum):
    """The pass that a problem of Find 2.0 describes."""

    miopenProblemDirectionForward = 0
    miopenProblemDirectionBackward = 1
    miopenProblemDirectionBackwardWeights = 2
    miopenProblemDirectionInference = 4


class miopenFindResultsOrder_t(IntEnum):
    """The order of the solutions of Find 2.0, least first."""

    miopenFindResultsOrderByTime = 0
    miopenFindResultsOrderByWorkspaceSize = 1


SCALAR = 1 << 31


class miopenTensorArgumentId_t(IntEnum):
    """Tensors and numbers of a problem, for the problems that can be fused."""

    miopenTensorArgumentIdInvalid = 0
    miopenTensorConvolutionX = 1
    miopenTensorConvolutionW = 2
    miopenTensorConvolutionY = 3
    miopenTensorActivationX = 37
    miopenTensorActivationY = 38
    miopenTensorActivationDX = 39
    miopenTensorActivationDY = 40
    miopenTensorBiasX = 41
    miopenTensorBiasY = 42
    miopenTensorBias = 43
    miopenTensorBatchnormX = 48
    miopenTensorBatchnormY = 49
    miopenTensorBatchnormRunningMean = 50
    miopenTensorBatchnormRunningVariance = 51
    miopenTensorBatchnormSavedMean = 52
    miopenTensorBatchnormSavedVariance = 53
    miopenTensorBatchnormScale = 54
    miopenTensorBatchnormScaleDiff = 55
    miopenTensorBatchnormEstimatedMean = 56
    miopenTensorBatchnormEstimatedVariance = 57
    miopenTensorBatchnormBias = 58
    miopenTensorBatchnormBiasDiff = 59
    miopenTensorBatchnormDX = 60
    miopenTensorBatchnormDY = 61
    miopenTensorArgumentIsScalar = SCALAR
    miopenScalarBatchnormExpAvgFactor = SCALAR | 2
    miopenScalarBatchnormEpsilon = SCALAR | 3


ENUMS = [each for each in IntEnum.__subclasses__() if each.__module__ == __name__]
