"""Normalization of each image by the statistics of its channels, or of groups of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fuseplan.errors import PlanError
from fuseplan.language.extents import is_integer
from fuseplan.language.fields import refused
from fuseplan.language.tensor import TensorSpec
from fuseplan.messages.excerpt import shown
from fuseplan.op import Op, operand, operator, parameter
from fuseplan.ops.normalization import Keys
from fuseplan.ops.rows import Standardized
from fuseplan.scalar import Scalar, leaf


class PerImage(Standardized):
    """An operator whose statistics are of each image: of all places of a channel, or of several channels."""

    least: int

    def over(self, src: TensorSpec) -> tuple[int, ...]:
        """The axes behind n, or behind n and c; a PlanError where src has too few axes."""
        if src.rank < self.least:
            want = "n, c" + " and places" * (self.least > 2)
            raise PlanError(f"{self.name} has no statistics of this tensor", got=str(src), want=want)
        return tuple(sorted(src.canonical_order[self.least - 1 :]))

    def output(self, src: TensorSpec) -> TensorSpec:
        """The shape of src; a PlanError where src has too few axes, or groups would differ."""
        self.over(src)
        self.split(src)
        return super().output(src)

    def formula(self, keys: Keys, src: TensorSpec) -> Scalar:
        """The formula; a channel's two factors are one, which spares each element a rounding."""
        apart, factor = self.normalized(keys)
        return apart * (factor * leaf(keys["scale"])) + leaf(keys["shift"]) if self.affine else apart * factor


class OfGroups(PerImage):
    """An operator with the statistics of groups of channels."""

    least = 2
    groups: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_integer(self.groups) or self.groups < 1:
            raise refused(self.name, "groups", "must be a number of groups", got=shown(self.groups))
        self._set("groups", int(self.groups))

    def split(self, src: TensorSpec) -> tuple[int, int]:
        """The channels' axis, and the groups; a PlanError where the groups would differ in size."""
        if src.channels % self.groups:
            got = f"{self.groups}, of {src.channels} channels"
            raise refused(self.name, "groups", "must divide the channels", got=got)
        return src.channel_axis, self.groups

    @classmethod
    def samples(cls) -> Iterator[tuple[str, Op]]:
        make: Any = cls  # one with the fields
        yield "f32[3x6]", make(2)
        yield "f32[2x6x7]", make(3, affine=False)
        yield "f32[2x6x3x7, nhwc]", make(2)
        yield "f32[2x9x5x7]", make(3)
        yield "f32[1x4x3x2x5]", make(1)


class OfChannels(PerImage):
    """An operator with the statistics of each channel."""

    least = 3

    @classmethod
    def samples(cls) -> Iterator[tuple[str, Op]]:
        make: Any = cls  # one with the fields
        yield "f32[2x6x7]", make()
        yield "f32[2x5x3x7, nhwc]", make(affine=False)
        yield "f32[3x5x9x7]", make()
        yield "f32[1x3x3x2x5]", make()


@operator
class GroupNorm(OfGroups):
    """(x - mean) / sqrt(variance + epsilon) * scale + shift

    Normalizes each group of an image's channels by its own statistics, as torch.nn.functional.group_norm:
    c / groups neighbouring channels, at all places, have one mean and one variance. The variance is the mean
    of the squared deviations. Without `affine` there are no scale and shift.

    scale, shift: (c,), torch's weight and bias.
    """

    onnx = "GroupNormalization"
    torch = "group_norm"

    scale = operand("channel", when="affine")
    shift = operand("channel", when="affine")
    groups: int
    affine: bool = True
    epsilon: float = parameter(default=1e-5)


@operator
class InstanceNorm(OfChannels):
    """(x - mean) / sqrt(variance + epsilon) * scale + shift

    Normalizes each channel of each image by its own statistics: mean and variance of all its places, as
    torch.nn.functional.instance_norm without running statistics. The variance is the mean of the squared
    deviations. Without `affine` there are no scale and shift.

    scale, shift: (c,), torch's weight and bias.
    """

    onnx = "InstanceNormalization"
    torch = "instance_norm"

    scale = operand("channel", when="affine")
    shift = operand("channel", when="affine")
    affine: bool = True
    epsilon: float = parameter(default=1e-5)


GROUP_NORMALIZATIONS = (GroupNorm, InstanceNorm)
