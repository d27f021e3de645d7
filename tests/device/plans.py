"""The plans that are run on a GPU: every operator, layout and kind of operand, on sizes that fit no tile."""

from collections.abc import Iterator

from fuseplan.ops.activation import ACTIVATIONS
from fuseplan.plans.plan import FusionPlan

FLOATS = ("f16", "bf16", "f32")

# `{d}` is a dtype; `{l}` is channels first or last.
POINTWISE = (
    "{d}[5x37] -> bias -> relu",
    "{d}[1x1x1x1] -> relu",
    "{d}[2x13x29] -> batch_norm -> silu",
    "{d}[3x17x9x11{l}] -> batch_norm -> add -> relu",
    "{d}[3x17x9x11{l}] -> batch_norm(mode=per_activation) -> gelu -> scale",
    "{d}[2x3x4x5, strides=80:1:20:4] -> prelu -> tanh",
    "{d}[3x5x7x2, strides=1:84:12:3] -> add(alpha1=0.5, alpha2=2) -> prelu(shared=True)",
    "{d}[1x3x2x5x7, ndhwc] -> add(alpha1=0.5, alpha2=2) -> hardswish",
    "{d}[8x64x57x55{l}] -> batch_norm -> add -> leaky_relu",
    "{d}[37x518] -> bias -> add -> glu(silu, gate=first) -> scale -> add",
    "{d}[3x5x1030, bsc] -> glu(gelu, interleaved=True)",
    "{d}[3x18x9x11{l}] -> batch_norm -> glu(axis=c) -> batch_norm(mode=per_activation)",
    "{d}[37x518] -> bias -> glu_backward(silu, gate=first) -> add",
    "{d}[2x5x129x64, bhsd] -> add -> rotary",
    "{d}[2x512x4x64, bshd] -> rotary",  # tiles without a rest
    "{d}[3x17x9x11{l}] -> bias -> dropout(0.3, seed=5) -> add",
    "{d}[37x518] -> elementwise('where(index(n) >= index(c), x, x * random(7, 1))')",
    "{d}[2x129x5x66, bshd] -> rotary(dims=24, interleaved=True) -> scale",
)
PRODUCTS = (
    "{d}[33x40] -> matmul(24) -> bias -> gelu(approximate=tanh)",
    "{d}[37x41] -> matmul(29) -> bias -> relu",
    "{d}[300x256] -> linear(520) -> bias -> gelu -> dropout(0.1, seed=9, offset=4) -> add",
    "{d}[300x256] -> matmul(520, transposed=True) -> bias -> silu",
    "{d}[1x4096] -> matmul(1000) -> bias",
    "{d}[2x50x64] -> matmul(72, batched=True) -> relu",
    "{d}[3x17x40, bcs of bsc] -> matmul(24, transposed=True, batched=True) -> bias",
    "{d}[256x4096] -> matmul(128) -> bias -> relu",
    "{d}[3x129x70] -> linear_weight_gradient(41)",
    "{d}[2048x512] -> linear_weight_gradient(1024)",
    "{d}[1000x768] -> relu -> matmul(1536) -> bias -> add -> relu",
    "{d}[2048x1024] -> matmul(2048) -> bias -> gelu(approximate=tanh)",
    "{d}[300x256] -> linear(522) -> bias -> glu(silu, gate=first) -> mul",
    "{d}[2048x1024] -> linear(5632) -> glu(gelu, interleaved=True)",
    "{d}[8x4096] -> linear(2048) -> bias -> glu",
)
CONVOLUTIONS = (
    "{d}[3x64x7x7{l}] -> conv2d(128, kernel=1) -> bias -> relu",
    "{d}[2x37x9x11{l}] -> conv2d(41, kernel=1) -> batch_norm -> add -> relu",
    "{d}[2x64x28x28{l}] -> conv2d(256, kernel=1, stride=2) -> bias",
    "{d}[4x64x14x14{l}] -> conv2d(64, kernel=3, padding=1) -> bias -> relu",
    "{d}[64x128x28x28{l}] -> conv2d(128, kernel=3, padding=1) -> batch_norm -> add -> relu",
    "{d}[2x24x13x15{l}] -> conv2d(40, kernel=3, stride=2, padding=1) -> batch_norm -> add -> relu",
    "{d}[2x19x13x15{l}] -> conv2d(23, kernel=3, padding=2, dilation=2) -> bias -> gelu",
    "{d}[1x16x12x9{l}] -> conv2d(32, kernel=(3, 5), stride=(1, 2), padding=((0, 1), (2, 1))) -> bias -> relu",
    "{d}[2x3x33x31{l}] -> conv2d(64, kernel=7, stride=2, padding=3) -> batch_norm -> relu",
    "{d}[2x24x13x15{l}] -> conv_transpose2d(40, kernel=3, stride=2, padding=1) -> batch_norm -> add -> relu",
    "{d}[3x64x14x14{l}] -> conv_transpose2d(72, kernel=4, stride=2, padding=1) -> bias -> gelu",
    "{d}[2x48x9x11{l}] -> conv_transpose2d(36, kernel=2, stride=2) -> bias",
    "{d}[2x32x14x14{l}] -> batch_norm -> relu -> conv2d(48, kernel=3, padding=1) -> add",
    "{d}[2x24x13x15{l}] -> conv2d(44, kernel=3, padding=1) -> batch_norm -> glu(axis=c) -> add",
    "{d}[2x32x9x9{l}] -> conv2d(64, kernel=3, padding=1, groups=4) -> bias -> relu",
    "{d}[2x24x9x9{l}] -> conv2d(24, kernel=3, groups=8)",
    "{d}[3x19x17x15{l}] -> relu -> conv2d_weight_gradient(37, kernel=3, padding=1)",
    "{d}[18x24x13x15{l}] -> conv2d_weight_gradient(44, kernel=(3, 5), stride=(2, 1), padding=2, groups=4)",
    "{d}[32x64x28x28{l}] -> conv2d_weight_gradient(128, kernel=3, stride=2, padding=1)",
    "{d}[3x32x17x17{l}] -> conv2d(32, kernel=3, padding=1, groups=32) -> bias -> relu",
    "{d}[2x37x15x13{l}] -> conv2d(37, kernel=3, stride=2, padding=1, groups=37) -> batch_norm -> silu",
    "{d}[2x40x12x12{l}] -> conv2d(40, kernel=5, padding=2, groups=40) -> bias -> hardswish",
    "{d}[2x8x9x9{l}] -> conv2d(16, kernel=3, groups=8) -> bias",
    "{d}[3x32x65] -> conv1d(48, kernel=3, padding=1) -> bias -> relu",
    "{d}[3x33x65, nwc] -> conv1d(48, kernel=4, stride=2, padding=((1, 2),)) -> bias -> relu",
    "{d}[1x16x5x9x7, ndhwc] -> conv3d(24, kernel=3, padding=1) -> bias -> relu",
    "{d}[1x5x4x6x7] -> conv3d(6, kernel=(1, 3, 2), stride=(1, 2, 1)) -> bias",
)
POOLS = (
    "{d}[4x64x57x56{l}] -> max_pool2d(3, stride=2, padding=1)",
    "{d}[4x33x19x21{l}] -> bias -> relu -> max_pool2d(2, ceil_mode=True) -> add",
    "{d}[4x64x35x35{l}] -> avg_pool2d(3, stride=1, padding=1, count_include_pad=False) -> relu",
    "{d}[2x33x7x9x11] -> avg_pool3d(3, stride=2, padding=1)",
    "{d}[7x16x200x2{l}] -> max_pool2d(3, ceil_mode=True)",
    "{d}[2x33x2x2{l}] -> max_pool2d(1, stride=2, padding=2) -> maximum",
    "{d}[2x33x2x2{l}] -> avg_pool2d(1, stride=2, padding=2) -> add",
)
# Elements of 8 bits: padding that has no bits of its own, pairs that are stored more than once, joined ones.
SHORT = (
    "f8e4m3[2x33x31x1x7, ndhwc] -> max_pool3d((2, 3, 1), padding=same, ceil_mode=True)",
    "f8e5m2[2x33x19x21] -> max_pool2d(3, padding=1)",
    "f8e4m3[33x16] -> elementwise('where(index(n) >= index(c), x, 0.5)') -> hardsigmoid",
    "f32[1000x16] -> elementwise('where(index(n) >= index(c), x, 0.25)') -> cast(f8e4m3)",
    "f8e4m3[4x16x9x8] -> conv2d(8, kernel=3)",
    "f8e5m2[2x96x512] -> conv1d(288, kernel=2, stride=2, groups=96)",
)
# Of whose sums only the size or the negative is used: ptxas drops some, `repairs.as_numbers`.
SIZES = (
    "{d}[256x192] -> matmul(128) -> abs -> bias",
    "{d}[2x32x5x6{l}] -> conv2d(64, kernel=(1, 3), padding=same) -> abs -> bias",
    "{d}[2x32x9x11{l}] -> conv2d(64, kernel=3, padding=1) -> abs -> scale -> relu",
    "{d}[2x32x5x6{l}] -> conv2d(64, kernel=(1, 3), padding=same) -> elementwise('-x') -> relu",
    "{d}[2x32x5x6{l}] -> conv2d(64, kernel=(1, 3), padding=same) -> elementwise('expm1(-abs(x))') -> bias",
)
# Whose sums do not matter: ptxas may drop the products.
UNUSED = ("bf16[512x1024] -> matmul(1024) -> elementwise('x ** 0') -> bias",)
# Elements of one dtype, products of another; sums of i8 are exact.
CONVERTED = (
    "i8[300x512] -> linear(520) -> dequantize(f16) -> bias -> relu",
    "i8[2048x1024] -> linear(2048)",
    "i8[8x4096] -> linear(1000) -> dequantize(per=row) -> scale",
    "i8[3x200x37, bcs of bsc] -> linear(72) -> dequantize(f16, per=channel)",
    "f16[256x1024] -> quantize(i8, per=row) -> linear(512) -> dequantize(f16, per=row) -> scale",
    "i8[256x1024] -> dequantize(f16, per=row) -> linear(512) -> bias",
    "i8[256x1024] -> dequantize(per=channel) -> linear(512)",
    "f8e4m3[256x1024] -> linear(512) -> bias",
    "f8e5m2[2x64x14x14, nhwc] -> conv2d(64, kernel=3, padding=1) -> relu",
    "f16[2x64x14x14] -> cast(f32) -> conv2d(64, kernel=3, padding=1) -> bias",
    "f32[256x1024] -> bias -> cast(bf16) -> linear(512) -> relu",
    "f16[64x256] -> linear(128) -> cast(f64)",
)
TF32 = (
    "f32[300x256] -> matmul(512, precision=tf32) -> bias",
    "f32[4x64x14x14, nhwc] -> conv2d(64, kernel=3, padding=1, precision=tf32) -> bias -> relu",
)


def _written(texts: tuple[str, ...], dtypes: tuple[str, ...]) -> Iterator[str]:
    for text in texts:
        for layout in ("", ", nhwc") if "{l}" in text else ("",):
            yield from (text.format(d=dtype, l=layout) for dtype in dtypes)


def _activations() -> Iterator[str]:
    """Each activation by itself, with its defaults where it has them."""
    for kind in ACTIVATIONS:
        for text, op in kind.samples():
            if text.startswith("f32[2x3x7]"):
                yield str(FusionPlan("f32[3x33x7, nwc]", op))


def texts() -> list[str]:
    """The text of every plan, without doubles."""
    listed = [
        *_written(POINTWISE, (*FLOATS, "f64")),
        *_activations(),
        *_written(PRODUCTS, FLOATS),
        *_written(SIZES, FLOATS),
        *_written(CONVOLUTIONS, FLOATS),
        *_written(POOLS, (*FLOATS, "f64")),
        *UNUSED,
        *CONVERTED,
        *SHORT,
        *TF32,
    ]
    return list(dict.fromkeys(str(FusionPlan.parse(text)) for text in listed))
