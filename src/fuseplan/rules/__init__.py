"""The fusion rules, in order of preference: the first whose conditions hold makes the kernel.

    contraction    one convolution or matrix product and the elementwise operators on both sides
    pointwise      elementwise operators alone
    normalization  one operator with statistics and the elementwise operators on both sides

To add one: a module with a class that has `name` and `conditions`, and its line in RULES.
"""

from __future__ import annotations

from fuseplan.rules.contraction import ContractionRule
from fuseplan.rules.normalization import NormalizationRule
from fuseplan.rules.pointwise import PointwiseRule
from fuseplan.rules.rule import Rule

RULES: tuple[Rule, ...] = (ContractionRule(), PointwiseRule(), NormalizationRule())
