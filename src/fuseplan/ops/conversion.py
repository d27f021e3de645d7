"""Operators that change the dtype of the elements."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fuseplan.errors import PlanError
from fuseplan.language.declarations import count, operand, parameter, word
from fuseplan.language.dtypes import CONVERTED, FACTORS, dtype_name, dtype_of
from fuseplan.language.fields import one_of, refused
from fuseplan.language.tensor import TensorSpec
from fuseplan.op import Elementwise, Op, operator
from fuseplan.scalar import Scalar, call, maximum, minimum

PER_SCALE = {"tensor": "shared", "channel": "channel", "row": "row", "block": "block"}
WITH_ZERO_POINTS = ("i8", "u8")
QUANTIZED = (*WITH_ZERO_POINTS, "f8e4m3", "f8e5m2")
BLOCK = 128


class Conversion(Elementwise):
    """What operators that change the dtype share: an output of src's shape and the operator's dtype."""

    dtype: str

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            self._set("dtype", dtype_of(dtype_name(self.dtype)).name)
        except PlanError as error:
            error.field = "dtype"
            raise

    def output(self, src: TensorSpec) -> TensorSpec:
        """The shape of src, in the operator's dtype."""
        return super().output(src).with_dtype(self.dtype)


@operator
class Cast(Conversion):
    """x as an element of `dtype` holds it

    Floating-point dtypes round to nearest even. A number too large for f16, bf16 and f8e5m2 becomes infinite,
    f8e4m3 saturates at 448. Integers drop the fraction and saturate, and NaN becomes 0. bool is 1
    where x is not 0. That is torch.Tensor.to where PyTorch defines the result: numbers outside of an integer
    dtype, and NaN, it does not. Operators behind it see the rounded number.

    Elements of i32 are exact up to 2^24 where the dtype is not f64.
    """

    onnx = "Cast"
    torch = "to"

    dtype: str

    def check_dtype(self, src: TensorSpec) -> None:
        """Every dtype but i64; between integers, to a wider one.

        Raises:
            PlanError: PyTorch would wrap the integers around, or they are indices.
        """
        if not {src.dtype, self.dtype} <= {*CONVERTED}:
            told = f"{src.dtype} to {self.dtype}"
            raise PlanError(f"{self.name}: i64 has indices, which nothing computes with", got=told)
        before, after = dtype_of(src.dtype), dtype_of(self.dtype)
        is_wider = after.least <= before.least and before.largest < after.largest
        if before.is_float or after.is_float or is_wider or self.dtype == "bool":
            return
        raise PlanError(
            f"{self.name}: integers are converted to wider ones or to floating-point numbers",
            got=f"{src.dtype} to {self.dtype}",
            remedy="`dequantize` and `quantize` with a scale saturate; to keep the dtype, leave cast out",
        )

    def apply(self, x: Scalar) -> Scalar:
        return call(f"as_{self.dtype}", x)

    @classmethod
    def samples(cls) -> Iterator[tuple[str, Op]]:
        for dtype in ("f16", "bf16", "f8e4m3", "f8e5m2", "i8", "u8", "i16", "i32", "bool", "f64"):
            yield "f32[2x5x3x7, nhwc]", cls(dtype)
            yield f"{dtype}[2x3x7]", cls("f32")
        yield "f64[3x5]", cls("f16")
        yield "bool[1x3x3x2x5]", cls("i8")


def _scale_axes(op: Quantize | Dequantize, src: TensorSpec) -> str:
    return PER_SCALE[op.per]


@dataclass(frozen=True)
class Scaled(Conversion):
    """What quantizing and dequantizing share: scales of the extents that `per` says, and zero points."""

    dtype: str
    per: str = word(PER_SCALE, default="tensor")
    block: int = count(default=BLOCK)
    zero_points: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.per != "block" and self.block != BLOCK:
            raise refused(self.name, "block", "has no meaning here", got=self.block, want="per=block")

    @property
    def reads(self) -> str | None:
        """Rows, and blocks of them, lie along the last axis."""
        return "rows" if self.per in ("row", "block") else None


@operator
class Quantize(Scaled):
    """round(x / scale) + zero_point, saturated, as an element of i8 or u8; x / scale, saturated, of fp8

    Divides by the scale and rounds to nearest even. Numbers beyond the dtype's range become its least or
    largest number, of f8e5m2 too. As ONNX's QuantizeLinear with saturate=1, and torch.quantize_per_channel.

    scale: `per` says its extents: `tensor`, one element; `channel`, (c,); `row`, all axes but the last;
    `block`, one for `block` neighbours along the last axis, and for the rest of a row. zero_point, with
    `zero_points` and to integers: an element of `dtype` for each scale.
    """

    onnx = "QuantizeLinear"
    torch = "quantize_per_channel"

    scale = operand(_scale_axes)
    zero_point = operand(_scale_axes, when="zero_points", dtype=lambda op, _: op.dtype)

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(self.name, "dtype", self.dtype, QUANTIZED)
        if self.zero_points and self.dtype not in WITH_ZERO_POINTS:
            raise refused(self.name, "zero_points", "are for i8 and u8", got=self.dtype)

    def apply(self, x: Scalar, scale: Scalar, zero_point: Scalar | None = None) -> Scalar:
        return self.rounded(x / scale, zero_point)

    def rounded(self, scaled: Scalar, zero_point: Scalar | None = None) -> Scalar:
        """A number by its scale as an element of the dtype; casts to other dtypes than f8e5m2 saturate."""
        row = dtype_of(self.dtype)
        if self.dtype == "f8e5m2":
            scaled = maximum(minimum(scaled, row.largest), -row.largest)
        whole = scaled if row.is_float else round(scaled)
        return call(f"as_{self.dtype}", whole if zero_point is None else whole + zero_point)

    @classmethod
    def samples(cls) -> Iterator[tuple[str, Op]]:
        yield "f32[3x5]", cls("i8")
        yield "f32[2x5x3x7, nhwc]", cls("i8", "channel", zero_points=True)
        yield "f32[5x7]", cls("u8", zero_points=True)
        yield "f32[2x3x7]", cls("f8e4m3", "row")
        yield "f32[2x3x3x11]", cls("f8e5m2", "block", block=4)
        yield "f32[1x3x3x2x5]", cls("i8", "block", block=2, zero_points=True)


@operator
class Dequantize(Scaled):
    """(x - zero_point) * scale; x - zero_point to i16

    x is i8, u8, i32 or fp8, and the output is of `dtype`. As ONNX's DequantizeLinear, and torch.dequantize.
    To i16, of i8 and u8, there is no scale: products of these whole numbers are exact, and padding is 0.

    scale: as `quantize` has it, in f32, in f64 where `dtype` is f64. zero_point, with `zero_points` and of
    i8 or u8: an element of x's dtype for each scale.
    """

    onnx = "DequantizeLinear"
    torch = "dequantize"

    scale = operand(
        _scale_axes,
        when=lambda op: op.dtype != "i16",
        dtype=lambda op, _: "f64" if op.dtype == "f64" else "f32",
    )
    zero_point = operand(_scale_axes, when="zero_points", dtype=lambda _, src: src.dtype)
    dtype: str = "f32"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(self.name, "dtype", self.dtype, (*FACTORS, "i16"))

    def check_dtype(self, src: TensorSpec) -> None:
        """Integers and fp8; a PlanError where src is not quantized, or has no zero points."""
        known: tuple[str, ...] = (*QUANTIZED, "i32")
        if self.zero_points or self.dtype == "i16":
            known = WITH_ZERO_POINTS
        if src.dtype not in known:
            what = "with zero points takes" if self.zero_points else "takes"
            raise PlanError(f"{self.name} {what} {' or '.join(known)}", got=src.dtype)

    def apply(self, x: Scalar, scale: Scalar | None = None, zero_point: Scalar | None = None) -> Scalar:
        moved = x if zero_point is None else x - zero_point
        made = moved if scale is None else moved * scale
        return call("as_f64", made) if self.dtype == "f64" else made

    @classmethod
    def samples(cls) -> Iterator[tuple[str, Op]]:
        yield "i8[3x5]", cls()
        yield "i8[2x5x3x7, nhwc]", cls("f16", "channel", zero_points=True)
        yield "u8[5x7]", cls(zero_points=True)
        yield "u8[2x5x3x7, nhwc]", cls("i16", zero_points=True)
        yield "f8e4m3[2x3x7]", cls("bf16", "row")
        yield "f8e5m2[2x3x3x11]", cls("f64", "block", block=4)
        yield "i32[1x3x3x2x5]", cls("f32", "channel")


@operator
class AddDequantized(Elementwise):
    """x + (other - zero_point) * scale

    other: the shape of src: a residual of `dtype`, i8 or u8.
    """

    other = operand("element", dtype=lambda op, _: op.dtype)
    dtype: str = word(WITH_ZERO_POINTS)
    scale: float = parameter()
    zero_point: float = parameter(default=0.0)

    def apply(self, x: Scalar, other: Scalar, scale: Scalar, zero_point: Scalar) -> Scalar:
        return x + (other - zero_point) * scale

    @classmethod
    def samples(cls) -> Iterator[tuple[str, Op]]:
        yield "f32[3x5]", cls("i8", 0.125)
        yield "f16[2x5x3x7, nhwc]", cls("u8", 0.25, 128)


CONVERSIONS = (Cast, Quantize, Dequantize, AddDequantized)
