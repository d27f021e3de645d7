"""Dropout by counting: an element's place, a seed and an offset decide it, and nothing is stored."""

from __future__ import annotations

from collections.abc import Iterator

from fuseplan.language.declarations import parameter
from fuseplan.language.fields import refused
from fuseplan.op import Elementwise, Op, operator
from fuseplan.scalar import Scalar, call, random, where


@operator
class Dropout(Elementwise):
    """x/(1 - p) where random(seed, offset) > p, else 0

    Zeroes each element with probability p, by Philox 4x32-10 of its place among all elements, in logical
    order. The zeros of a seed and an offset are the same on every target, in every layout, dtype and kernel
    that it is fused into; the backward pass draws them again. With p = 0 nothing is zeroed, with p = 1
    everything is.

    p is from 0 to 1; seed and offset are whole numbers from 0 to 2^24. All three are given at run time: a new
    seed or offset at each step gives independent zeros.

    With offset 0 the numbers are those of Triton's `tl.rand(seed, index)`, for as many as 2^32 elements.
    The zeros are not those of torch.nn.functional.dropout: only the distribution is the same. In torch's
    eager mode a GPU's numbers depend on the grid of the launch, and a CPU's on how many were drawn before;
    its compiled kernels draw seeds of 64 bits that nobody else sees.
    """

    torch = "dropout"
    onnx = "Dropout"

    p: float = parameter(default=0.5)
    seed: float = parameter(default=0.0)
    offset: float = parameter(default=0.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.p <= 1:
            raise refused(self.name, "p", "must be a probability", got=self.p, want="a number from 0 to 1")
        for name in ("seed", "offset"):
            value = getattr(self, name)
            if not (0 <= value <= 2**24 and value.is_integer()):
                raise refused(self.name, name, "must be a whole number", got=value, want="0 to 2^24")

    def apply(self, x: Scalar, p: Scalar, seed: Scalar, offset: Scalar) -> Scalar:
        """The formula; p is compared in f32 whatever the compute dtype is, as random numbers are f32's."""
        drawn = where(p > 0, random(seed, offset), 1)
        return where(drawn > call("as_f32", p), x * (1 / (1 - p)), 0)

    @classmethod
    def samples(cls) -> Iterator[tuple[str, Op]]:
        yield from super().samples()
        yield "f32[2x5x3x7, nhwc]", cls(0.25, seed=3, offset=2)
