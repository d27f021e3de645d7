"""Quantizing by scales that are made of the elements themselves."""

from __future__ import annotations

from collections.abc import Iterator

from fuseplan.language.declarations import count, word
from fuseplan.language.dtypes import dtype_of
from fuseplan.language.fields import refused
from fuseplan.language.reduction import Max, Statistic
from fuseplan.language.tensor import TensorSpec
from fuseplan.op import Op, operator, result
from fuseplan.ops.conversion import BLOCK, PER_SCALE, QUANTIZED, Quantize
from fuseplan.ops.normalization import Keys, Normalization
from fuseplan.scalar import Scalar, leaf, maximum

EACH = ("tensor", "row", "block")
LEAST = 2.0**-126  # the least normal number of f32: rows of zeros have a scale to divide by


@operator
class DynamicQuantize(Normalization):
    """x / scale as `quantize` rounds it, with scale = maximum(max(abs(x)) / largest, 2**-126)

    Quantizes by scales of its own, which are a result: `largest` is the largest number of `dtype`, 127 of i8,
    448 of f8e4m3 and 57344 of f8e5m2, so that no element is beyond it. `dequantize` by the same scales is the
    way back. An infinity makes the scale infinite and its finite neighbours 0; NaN makes the scale NaN.

    `each`: the whole `tensor` has a scale, or each `row` (a token of a model), or each `block` of `block`
    neighbours along the last axis, whose extent the block divides.

    Result scales: the extents of `quantize`'s scale, in the compute dtype.
    """

    scales = result(lambda op, _: PER_SCALE[op.each])
    dtype: str = word(QUANTIZED)
    each: str = word(EACH, default="row")
    block: int = count(default=BLOCK)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.each != "block" and self.block != BLOCK:
            raise refused(self.name, "block", "has no meaning here", got=self.block, want="each=block")

    @property
    def reads(self) -> str | None:
        """The last axis, but for one scale of the tensor."""
        return None if self.each == "tensor" else "rows"

    def over(self, src: TensorSpec) -> tuple[int, ...]:
        return tuple(range(src.rank)) if self.each == "tensor" else (src.channel_axis,)

    def split(self, src: TensorSpec) -> tuple[int, int] | None:
        """The last axis and its blocks, where each has a scale.

        Raises:
            PlanError: the blocks would differ in size.
        """
        if self.each != "block":
            return None
        if src.channels % self.block:
            got = f"{self.block}, of {src.channels} elements"
            raise refused(self.name, "block", "must divide the last axis", got=got)
        return src.channel_axis, src.channels // self.block

    def output(self, src: TensorSpec) -> TensorSpec:
        """The shape of src, in the operator's dtype; a PlanError where the blocks would differ in size."""
        self.split(src)
        return super().output(src).with_dtype(self.dtype)

    def reductions(self, keys: Keys, src: TensorSpec) -> tuple[Statistic, ...]:
        return (Max((keys["largest"],), (abs(leaf("x")),)),)

    def result_formulas(self, keys: Keys, src: TensorSpec) -> dict[str, Scalar]:
        return {"scales": maximum(leaf(keys["largest"]) / dtype_of(self.dtype).largest, LEAST)}

    def formula(self, keys: Keys, src: TensorSpec) -> Scalar:
        """The quotient, rounded; all elements of a scale share a reciprocal, which `LEAST` keeps finite."""
        scale = self.result_formulas(keys, src)["scales"]
        return Quantize(self.dtype).rounded(leaf("x") * (1 / scale))

    @classmethod
    def samples(cls) -> Iterator[tuple[str, Op]]:
        yield "f32[3x5]", cls("i8")
        yield "f32[2x3x7]", cls("f8e4m3")
        yield "f32[2x5x3x7, nhwc]", cls("f8e5m2", "tensor")
        yield "f32[3x12]", cls("f8e4m3", "block", block=4)
