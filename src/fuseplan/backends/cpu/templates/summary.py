"""A product whose rows have statistics: cross-entropy, or a maximum, of logits that no memory holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import log2
from typing import ClassVar

from fuseplan.backends.cpu import model, staging
from fuseplan.backends.cpu.rows import as_rows
from fuseplan.backends.cpu.templates.direct import Direct
from fuseplan.backends.cpu.templates.summary_writer import SummaryKnobs, SummaryWriter, state_elements
from fuseplan.kernels.emit import Source
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.target import Target
from fuseplan.kernels.template import (
    Accuracy,
    Template,
    Traffic,
    accuracy_claim,
    lanes,
    moved_once,
    summary_claims,
    summation_bound,
    unit_roundoff,
)
from fuseplan.language.dtypes import dtype_of
from fuseplan.messages.reasons import Claim
from fuseplan.scalar import functions

_VECTORS = 16  # of a row that join its state at a time: with 16 rows of 64 bytes, half of the first cache
_EFFICIENCY = 0.25  # of the multiply-adds, in the functions of the statistics


@dataclass(frozen=True)
class ProductSummary(Direct, SummaryKnobs):
    """Tiles of rows x features, whose logits stay in the first cache and join the state of their row.

    reads:  src and weight as `direct` does
    writes: dst once; the states of each row, a vector for each of their parts, to the workspace and back
    chosen: for every matrix product behind which there are statistics of its features

    Lanes of a state are features. A row has a state for each block of features that is a task; these and all
    lanes are merged in their order at the end: the same bits in every run. Attributes are those of `direct`;
    src is never copied by lines.

    Attributes:
        group: panels whose logits a tile makes before they join the states.
    """

    name: ClassVar[str] = "product_summary"
    opens: ClassVar[bool] = False
    ranges: ClassVar[bool] = False
    error_scale: ClassVar[str] = (
        "the sum of |src||weight| of the largest element, and that of the terms joined"
    )

    @classmethod
    def limits(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Claim]:
        yield from summary_claims(kernel)
        yield model.padding_claim(kernel)
        yield accuracy_claim(cls.bound(kernel), accuracy)

    @classmethod
    def candidates(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Template]:
        product, width = as_rows(kernel), lanes(kernel, target)
        for made in Direct.candidates(product, target, accuracy):
            assert isinstance(made, Direct)
            if made.lines:
                continue
            itemsize = product.src.itemsize if made.pairs else model.itemsize(product)
            panel = made.vectors * width * product.contraction.depth * itemsize
            fitting = min(_VECTORS // made.vectors, int(target.l2_bytes * 0.4) // panel)
            group = max(1, min(fitting, made.block_panels))
            block = -(-made.block_panels // group) * group
            yield cls(**{**made.knobs, "block_panels": block, "group": group})

    def traffic(self, kernel: Kernel, target: Target) -> Traffic:
        product = as_rows(kernel)
        room = staging.staged(product, stored=self.pairs).elements + state_elements(self, kernel, target)
        return moved_once(kernel, room * model.itemsize(kernel))

    def waste(self, kernel: Kernel, target: Target) -> float:
        return super().waste(as_rows(kernel), target)

    def seconds(self, kernel: Kernel, target: Target) -> float:
        """The product's, and that of the statistics' functions."""
        flops = kernel.contraction.flops * self.waste(kernel, target)
        flops += (kernel.flops - kernel.contraction.flops) * self.efficiency / _EFFICIENCY
        moved, by = self.traffic(kernel, target), self.efficiency
        return model.seconds(kernel, target, flops=flops, traffic=moved, efficiency=by, phases=2)

    @staticmethod
    def bound(kernel: Kernel) -> float:
        """Errors of the products twice, in the elements and in their maximum; a rounding of each join.

        A lane joins its features one after another. Lanes are those of the narrowest vectors.
        """
        formulas = [stage.expression for stage in (*kernel.between, *kernel.epilogue)]
        formulas += [part.term for part in kernel.reduction.parts]
        narrowest = 16 // dtype_of(kernel.compute_dtype).itemsize
        joined = kernel.reduced_count / narrowest + log2(narrowest) + sum(map(functions, formulas))
        return 2 * summation_bound(kernel) + 2 * joined * unit_roundoff(kernel)

    def emit(self, kernel: Kernel, target: Target) -> Source:
        return SummaryWriter(self, kernel, target).source()
