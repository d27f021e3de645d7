"""A product whose rows have statistics: cross-entropy, or a maximum, of logits that no memory holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil, log2
from typing import ClassVar

from fuseplan.backends.triton import dialect, model
from fuseplan.backends.triton.templates import product_cost
from fuseplan.backends.triton.templates.product import Product, arithmetics, choices
from fuseplan.backends.triton.templates.product_tiles import Knobs, Tiles
from fuseplan.backends.triton.templates.summary_rows import STATES
from fuseplan.backends.triton.templates.summary_writer import SummaryWriter, states_of
from fuseplan.kernels.emit import COUNTER_BYTES, Source
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.target import Target
from fuseplan.kernels.template import Accuracy, Template, accuracy_claim, summary_claims, unit_roundoff
from fuseplan.messages.reasons import Claim, Reason, claim

COUNTERS = COUNTER_BYTES // 4
ROWS = 128  # of the tiles for many rows


@dataclass(frozen=True)
class ProductSummary(Product):
    """Tiles of rows x features; each leaves its rows' statistics, and the last one of a row merges them.

    reads:  src once for each block of features, unless a cache still holds it; weight likewise for each block
        of rows
    writes: dst once; the states of each tile's rows to the workspace and back, a few numbers for each row
        and block of features
    chosen: for every matrix product behind which there are statistics of its features

    The states of a row are merged in the order of the features, whichever tile comes last: the same bits in
    every run. Attributes are those of `product`; the sum of products is never in parts.
    """

    name: ClassVar[str] = "product_summary"
    opens: ClassVar[bool] = False
    error_scale: ClassVar[str] = (
        "the sum of |src||weight| of the largest element, and that of the terms joined"
    )

    @classmethod
    def limits(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Claim]:
        yield from summary_claims(kernel)
        rows = kernel.contraction.rows
        tiles = -(-rows // ROWS)
        yield claim(
            tiles <= COUNTERS, Reason.ROW_TILES, got=f"{rows} rows", want=f"at most {COUNTERS * ROWS}"
        )
        exact = arithmetics(kernel, target, "strict")[0]
        yield accuracy_claim(bound(kernel, exact), accuracy)

    @classmethod
    def candidates(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Template]:
        made = dict.fromkeys(_plain(each) for each in choices(kernel, target, accuracy))
        counted = [each for each in made if Tiles(kernel, each).row_blocks.high <= COUNTERS]
        for knobs in counted or [replace(next(iter(made)), rows=ROWS)]:
            yield cls(**vars(knobs))

    def kept_bytes(self, kernel: Kernel, target: Target) -> int:
        return states_of(kernel, self)

    def seconds(self, kernel: Kernel, target: Target) -> float:
        """The product's, and the way of the states through the second cache or memory."""
        moved = 2 * states_of(kernel, self) / model.rates(target).memory
        return super().seconds(kernel, target) + moved

    def error_bound(self, kernel: Kernel) -> float:
        """The product's bound, of which a maximum or a logarithm keeps once and a merge adds roundings."""
        return bound(kernel, self.arithmetic)

    def emit(self, kernel: Kernel, target: Target) -> Source:
        return SummaryWriter(self, kernel, self.text).source(target)


def _plain(knobs: Knobs) -> Knobs:
    """The same tile in one piece, its sum by one program."""
    return replace(knobs, split=1, parts=1)


def bound(kernel: Kernel, arithmetic: str, pieces: int = 1) -> float:
    """Errors of the products twice, in the elements and in their maximum, and of each join a rounding.

    The features of a tile are joined in so many `pieces` one after the other, and each in pairs.
    """
    features = kernel.contraction.features
    added = ceil(log2(max(2, features))) + -(-features // (16 * STATES)) + pieces - 1
    formulas = [stage.expression for stage in (*kernel.between, *kernel.epilogue)]
    formulas += [part.term for part in kernel.reduction.parts]
    functions = dialect.relative_errors(formulas, kernel.dst.dtype)
    return 2 * product_cost.bound(kernel, arithmetic) + 2 * (added + 2) * unit_roundoff(kernel) + functions
