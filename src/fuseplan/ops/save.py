"""Values of a plan that it gives besides its output."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fuseplan.language.declarations import SAMPLE_TENSORS, Array, ResultField, result
from fuseplan.language.fields import NAME, RESERVED, is_name, refused
from fuseplan.messages.excerpt import shown
from fuseplan.op import Elementwise, Given, Op, operator
from fuseplan.scalar import Scalar

TAKEN = (*RESERVED, "args", "thread", "threads", "parameters", "workspace", "extent")  # arguments of kernels


@operator
class Save(Elementwise):
    """x, which the plan gives as a result too

    `f32[2x8] -> add -> save(sum) -> layer_norm` has the result `sum`: the value at this place, rounded to
    its dtype once, in the layout of the operator's output. The operators behind it read the value before it
    is rounded. Those with an operand as large as src may read it again: `add(other=sum)`.
    """

    key: str

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_name(self.key, TAKEN):
            raise refused(self.name, "key", f"cannot be {shown(self.key)}", want=NAME)

    @property
    def results_made(self) -> Mapping[str, ResultField]:
        return {self.key: result("element")}

    def apply(self, x: Scalar) -> Scalar:
        return x

    def meaning(self, given: Given) -> tuple[Array, dict[str, Array]]:
        out, _ = super().meaning(given)
        return out, {self.key: given.by.own(out)}

    @classmethod
    def samples(cls) -> Iterator[tuple[str, Op]]:
        for text in SAMPLE_TENSORS:
            yield text, cls("kept")
