"""Scans: each element is made of those up to it along an axis."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fuseplan.language.arithmetic import Arithmetic
from fuseplan.language.declarations import Array
from fuseplan.messages.reasons import Reason
from fuseplan.op import Op, operator
from fuseplan.ops.unary import UnaryOp


@operator
class Cumsum(UnaryOp):
    """sum(x[j] for j <= i) at each place i along an axis

    Sums are along `axis`, a number, the last one unless told, as in torch.cumsum. With `exclusive` an element
    is not in its own sum, and the first sum is 0; with `reverse` sums are over j >= i, as
    ONNX's CumSum has both.
    """

    onnx = "CumSum"
    torch = "cumsum"
    kind = "scan"
    missing, beside = Reason.NO_SCAN, Reason.BESIDE_SCAN
    error_scale = "the sum of |terms|, and the result of each function of the formulas"

    axis: int = -1
    exclusive: bool = False
    reverse: bool = False

    @property
    def backward(self) -> Op:
        return replace(self, reverse=not self.reverse)

    def along(self, x: Array, axis: int, by: Arithmetic) -> Array:
        around, last = (slice(None),) * axis, x.shape[axis] - 1
        turned = (*around, [last - place for place in range(last + 1)] if self.reverse else slice(None))
        made = x[turned].cumsum(axis)
        if self.exclusive:
            inclusive, made = made, by.zeros(tuple(x.shape))
            made[(*around, slice(1, None))] = inclusive[(*around, slice(0, last))]
        return made[turned]

    @classmethod
    def samples(cls) -> Iterator[tuple[str, Op]]:
        yield "f32[3x5]", cls()
        yield "f32[2x3x7]", cls(0, exclusive=True)
        yield "f32[2x3x19]", cls(exclusive=True, reverse=True)
        yield "f32[2x5x3x7, nhwc]", cls(1)
        yield "f32[1x3x3x2x5]", cls(2, reverse=True)
