"""What is kept of a set of timing samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fuseplan.system.reading import Record


@dataclass(frozen=True)
class Timing(Record):
    """Seconds a call took: `n` samples in `blocks` blocks.

    Attributes:
        n: how many samples, each the mean of a few calls where a call is very short.
        blocks: how many blocks they were taken in; other variants ran between them.
        minimum: the least sample.
        median: the median over blocks of each block's median, so a disturbed block counts once.
        p90, p99: the samples that 90 and 99 of a hundred are not above.
        spread: the distance between the quartiles of the blocks' medians, over `median`.
    """

    n: int
    blocks: int
    minimum: float
    median: float
    p90: float
    p99: float
    spread: float


def percentile(samples: Sequence[float], share: float) -> float:
    """The sample that `share` (0 to 1) of the sorted samples are not above."""
    return float(np.quantile(samples, share, method="inverted_cdf"))


def summarize(blocks: Sequence[Sequence[float]]) -> Timing:
    """The timing of a variant from its blocks of samples, in seconds.

    Raises:
        ValueError: there is no sample.
    """
    taken = [block for block in blocks if block]
    if not taken:
        raise ValueError("a timing needs at least one sample")
    medians = [float(np.median(block)) for block in taken]
    samples = [sample for block in taken for sample in block]
    median = float(np.median(medians))
    between = percentile(medians, 0.75) - percentile(medians, 0.25)
    return Timing(
        n=len(samples),
        blocks=len(taken),
        minimum=min(samples),
        median=median,
        p90=percentile(samples, 0.9),
        p99=percentile(samples, 0.99),
        spread=between / median if median else 0.0,
    )
