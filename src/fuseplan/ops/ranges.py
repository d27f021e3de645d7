"""Results that lie as a range of a larger tensor's features."""

from __future__ import annotations

from collections.abc import Iterator

from fuseplan.errors import PlanError
from fuseplan.language.fields import positive, refused
from fuseplan.language.tensor import TensorSpec
from fuseplan.op import Elementwise, Op, operator
from fuseplan.scalar import Scalar


@operator
class Within(Elementwise):
    """x, which lies as a range of the features of a larger tensor

    The output lies where neighbouring features of a tensor with `features` of them do: `f32[1x8x6x6, nhwc] ->
    conv2d(16, kernel=1) -> within(64)` writes the channels 16 to 31 of a f32[1x64x6x6, nhwc] where `out` is
    `whole[:, 16:32]`. Operators whose results are joined so write the whole tensor, and nothing is copied.

    It is a plan's last operator. src lies in a named layout.
    """

    features: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set("features", positive(self.name, "features", self.features))

    def output(self, src: TensorSpec) -> TensorSpec:
        """The same shape, with the strides of the whole tensor.

        Raises:
            PlanError: src has more features, or strides without a name.
        """
        if self.features < src.channels:
            want = f"{src.channels} or more"
            raise refused(self.name, "features", "are fewer than src's", got=self.features, want=want)
        if src.layout is None:
            raise PlanError(f"{self.name} takes a tensor in a named layout", got=str(src))
        shape = list(src.shape)
        shape[src.channel_axis] = self.features
        strides = src.with_shape(shape).element_strides
        return TensorSpec(src.shape, src.dtype, strides=strides, names=src.names)

    def apply(self, x: Scalar) -> Scalar:
        """The same."""
        return x

    @classmethod
    def samples(cls) -> Iterator[tuple[str, Op]]:
        """Features that are innermost."""
        yield "f32[3x5]", cls(7)
        yield "f32[2x5x3x7, nhwc]", cls(9)


RANGES = (Within,)
