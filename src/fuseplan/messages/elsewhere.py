"""Names that other libraries have for operators, fields, dtypes and layouts: PyTorch, ONNX, Keras, MIOpen.

Errors about an unknown name read these tables, and nothing else does: a plan has one name for a thing. A key
is a name without case, spaces and underscores. Its answer is the name in a plan, or a sentence.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

Answers = Mapping[str, str]


def folded(name: str) -> str:
    """The name without case, spaces, underscores, dots and dashes: `LayerNorm` is `layer_norm`."""
    return re.sub(r"[\s_.-]", "", name).casefold()


def _each(names: str, answer: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), answer)


# Operators with another name in a plan. The classes of the operators add PyTorch's and ONNX's names.
OPERATORS: Answers = {
    **_each("swish", "silu"),
    **_each("hardswish hswish", "hardswish"),
    **_each("hsigmoid", "hardsigmoid"),
    **_each("relu6 relun1 clippedrelu", "clipped_relu"),
    **_each("hardtanh clip clipbyvalue", "clamp"),
    **_each("logistic", "sigmoid"),
    **_each("pow", "power"),
    **_each("lrelu", "leaky_relu"),
    **_each("plus residual addv2 addn skip", "add"),
    **_each("multiply hadamard gate", "mul"),
    **_each("biasadd addbias", "bias"),
    **_each("bn batchnorm1d batchnorm2d batchnorm3d batchnormalization", "batch_norm"),
    **_each("fusedbatchnorm", "batch_norm_training"),
    **_each("lambda expression function", "elementwise"),
    **_each("mm bmm dot einsum batchmatmul matrixmultiply", "matmul"),
    **_each("convolution", "conv2d"),
    **_each("maxpool maxpooling2d", "max_pool2d"),
    **_each("avgpool averagepool averagepooling2d", "avg_pool2d"),
    **_each("rope rotarypositionembedding applyrotaryposemb", "rotary"),
    **_each("astype type convert", "cast"),
}

_PRODUCT = """\
Write `linear(N)` for a weight [out, in], as torch.nn.Linear stores it; `-> bias` adds a bias
Write `matmul(N)` for a weight [in, out], as Keras stores it"""
_STATISTICS = (
    "`batch_norm` and `batch_norm_training` compute statistics per channel or per activation over the batch, "
    "`layer_norm` and `rms_norm` of each row, the last axis"
)
_ROWS = (
    "The operators over axes are `softmax`, `log_softmax`, `sum`, `mean`, `prod`, `var`, `amax`, `amin`, "
    "`logsumexp` and `argmax`: run it before or after the plan"
)
_GATES = "`mul` multiplies by another tensor of the same shape, or by an earlier value of the plan"
_GATED = "Write `glu({})`; where the gate's features come first, `glu({}, gate=first)`"
_SHAPES = "Operators here keep the order of the axes: give src another shape, layout or strides"
_WINDOWS = "The only windows are convolutions, `max_pool2d` and `avg_pool2d`: run it before or after the plan"
_GLOBAL = "Write `{0}(hw, keepdim=True)`, or `{0}(hw)` for fewer axes"

# Operators that no plan has, by what there is instead.
LACKING: Answers = {
    **_each("dense gemm addmm fullyconnected innerproduct fc", _PRODUCT),
    **_each("groupnorm groupnormalization instancenorm instancenorm1d instancenorm2d", _STATISTICS),
    **_each("instancenorm3d instancenormalization localresponsenorm lrn normalize l2norm", _STATISTICS),
    **_each("softmin hardmax sparsemax gumbelsoftmax std norm cumsum reducel1", _ROWS),
    **_each("argmin topk sort min any all crossentropy mseloss nllloss", _ROWS),
    **_each("max", "`amax` is the maximum over axes, `clamp` bounds each element"),
    **_each("softmax2d", "`softmax(c)` is that over the channels"),
    **_each("multiheadattention", "`attention` is that of one plan's heads: run the projections as `linear`"),
    **_each("swiglu siluandmul", _GATED.format("silu", "silu")),
    **_each("geglu geluandmul", _GATED.format("gelu", "gelu")),
    **_each("reglu", _GATED.format("relu", "relu")),
    **_each("div divide truediv", "`scale` multiplies each channel by its number: give it the reciprocals"),
    **_each("sub subtract minus", "Write `add(alpha2=-1)`: x - other"),
    **_each("addcmul affine scaleshift film", "Write `scale -> bias`: x * scale + bias per channel"),
    **_each("reshape view flatten permute transpose squeeze unsqueeze swapaxes rearrange", _SHAPES),
    **_each("concat cat concatenate stack split chunk slice gather expand repeat tile pad", _SHAPES),
    **_each("globalaveragepool adaptiveavgpool2d globalaveragepooling2d", _GLOBAL.format("mean")),
    **_each("globalmaxpool adaptivemaxpool2d globalmaxpooling2d", _GLOBAL.format("amax")),
    **_each("upsample interpolate resize unfold fold lppool", _WINDOWS),
    **_each("convtranspose convtranspose1d convtranspose2d convtranspose3d conv2dtranspose", _WINDOWS),
    **_each("depthwiseconv2d depthwiseconv", "Write `conv2d` with groups=, as many as src has channels"),
    **_each(
        "separableconv2d", "Write `conv2d` with groups=, and a plan of its own with `conv2d(N, kernel=1)`"
    ),
    **_each("dropout dropout2d alphadropout", "It does nothing at inference: leave it out"),
    **_each("embedding lstm gru rnn", "Operators here take one tensor of floats: run it before the plan"),
    **_each("activation", "Write the activation itself, such as `relu`"),
    **_each("sequential", "Write the operators one after the other, with -> between them"),
    **_each("quickgelu", 'Write `elementwise("x * sigmoid(1.702 * x)")`'),
    **_each("selu", 'Write `elementwise("1.050701 * where(x > 0, x, 1.673263 * expm1(x))")`'),
    **_each("celu", 'Write `elementwise("where(x > 0, x, a * expm1(x / a))", a=1)`'),
    **_each("thresholdedrelu threshold", 'Write `elementwise("where(x > t, x, 0)", t=1)`'),
    **_each("square", 'Write `elementwise("x * x")`'),
    **_each("reciprocal inverse", 'Write `elementwise("1 / x")`'),
    **_each("rsqrt", 'Write `elementwise("1 / sqrt(x)")`'),
    **_each("neg negative", 'Write `elementwise("-x")`'),
    **{name: f'Write `elementwise("{name}(x)")`' for name in ("exp", "expm1", "log", "log1p", "sqrt", "erf")},
}

_BEHIND = "Write it as the next operator: `-> {}`"

# Fields of operators.
FIELDS: Answers = {
    **_each("kernelsize kernelshape filtersize ksize", "kernel"),
    **_each("filters outchannels outfeatures units outputdim", "features"),
    **_each("strides subsample", "stride"),
    **_each("pads pad", "padding"),
    **_each("dilations dilationrate", "dilation"),
    **_each("group featuregroupcount", "groups"),
    **_each("eps", "epsilon"),
    **_each("transpose transb transposeb", "transposed"),
    **_each("minval minvalue", "min"),
    **_each("maxval maxvalue", "max"),
    **_each("alpha slope leakage negativeslope", "negative_slope"),
    **_each("bias usebias", _BEHIND.format("bias")),
    **_each("activation act", _BEHIND.format("relu")),
    **_each("inplace", "Leave it out: the call's `out` is the place of the result"),
    **_each("inchannels infeatures numfeatures inputdim", "Leave it out: src has the channels"),
    **_each("numgroups", "groups"),
    **_each("enablegqa numkeyvalueheads kvnumheads", "key_heads"),
    **_each("slidingwindow windowsize", "window"),
    **_each("logitsoftcap", "softcap"),
    **_each("attnmask mask", "`mask_axes` or `bias_axes`, and the tensor at the call"),
    **_each("device", "Leave it out: `compile(plan, target)` says where the plan runs"),
    **_each("dtype", "Leave it out: src has the dtype, and `cast` changes it"),
    **_each("paddingmode autopad", "Leave it out: padding is always zeros, and `padding` gives their number"),
    **_each("momentum", "`batch_norm_training` has `running`, and `momentum` is given at the call"),
    **_each("affine trackrunningstats", "Leave it out: scale and shift are operands of the plan"),
}

# Dtypes.
DTYPES: Answers = {
    **_each("float32 float single fp32 torchfloat32 torchfloat npfloat32", "f32"),
    **_each("float64 double fp64 torchfloat64 torchdouble npfloat64", "f64"),
    **_each("float16 half fp16 torchfloat16 torchhalf npfloat16", "f16"),
    **_each("bfloat16 brainfloat torchbfloat16", "bf16"),
    **_each("float8e4m3fn float8e4m3 fp8e4m3 e4m3 fp8 torchfloat8e4m3fn", "f8e4m3"),
    **_each("float8e5m2 fp8e5m2 e5m2 torchfloat8e5m2", "f8e5m2"),
    **_each("int8 torchint8 npint8", "i8"),
    **_each("int32 int torchint torchint32 npint32", "i32"),
    **_each("boolean torchbool npbool", "bool"),
}

# Layouts: the first of a rank's, or the last.
LAYOUTS = {"channelsfirst": 0, "ncl": 0, "channelslast": -1, "nlc": -1}
