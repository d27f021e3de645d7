"""Values that a plan gives besides its output; ranges of features, of a larger tensor or of a result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fuseplan.errors import PlanError, counted
from fuseplan.language.declarations import SAMPLE_TENSORS, Array, ResultField, count, result
from fuseplan.language.fields import NAME, RESERVED, is_name, positive, refused
from fuseplan.language.tensor import TensorSpec
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


@operator
class Within(Elementwise):
    """x, which lies as a range of the features of a larger tensor

    The output lies where neighbouring features of a tensor with `features` of them do: `f32[1x8x6x6, nhwc] ->
    conv2d(16, kernel=1) -> within(64)` writes the channels 16 to 31 of a f32[1x64x6x6, nhwc] where `out` is
    `whole[:, 16:32]`. Operators whose results are joined so write the whole tensor, and nothing is copied.

    With a layout, the larger tensor has it, and not src's: `f32[1x3x8x8] -> conv2d(16, kernel=3) ->
    within(16, layout="nhwc")` reads channels first and writes them last, in one kernel.

    It is a plan's last operator. src lies in a named layout.
    """

    integers = ("i8", "u8", "i16")

    features: int = count()
    layout: str | None = None

    def output(self, src: TensorSpec) -> TensorSpec:
        """The same shape, with the strides of the whole tensor.

        Raises:
            PlanError: src has more features, or strides without a name; the layout is not one of src's axes.
        """
        if src.layout is None or not src.shape:
            raise PlanError(f"{self.name} takes a tensor in a named layout", got=str(src))
        if self.features < src.channels:
            want = f"{src.channels} or more"
            raise refused(self.name, "features", "are fewer than src's", got=self.features, want=want)
        shape = list(src.shape)
        shape[src.channel_axis] = self.features
        whole = src.with_shape(shape) if self.layout is None else TensorSpec(shape, src.dtype, self.layout)
        if whole.names != src.names or not (self.layout is None or src.has_channel_names):
            got, want = f"{shown(self.layout)} for {src}", "an order of n, c and spatial axes that src has"
            raise refused(self.name, "layout", "has other axes than src", got=got, want=want)
        return TensorSpec(src.shape, src.dtype, strides=whole.element_strides, names=src.names)

    def apply(self, x: Scalar) -> Scalar:
        return x

    @classmethod
    def samples(cls) -> Iterator[tuple[str, Op]]:
        yield "f32[3x5]", cls(7)
        yield "f32[2x5x3x7, nhwc]", cls(9)
        yield "f32[2x5x3x7]", cls(5, "nhwc")


@operator
class Split(Elementwise):
    """x, of whose features the plan gives ranges too

    `bf16[*x4096] -> linear(6144) -> split((q, k, v), features=(4096, 1024, 1024))` is three projections of
    one input in one launch: their weights, and their biases, are joined along the features. The call gives
    `out`, and `q`, `k` and `v`, the ranges of its features in order; without `features` they are equal.

    The ranges are views of `out`: no element is written twice, and the kernel is that of the plan without the
    split, on every backend. Attention, and a plan whose src has strides, read a view where it lies; a caller
    who wants a dense one copies it. It is a plan's last operator.
    """

    names: tuple[str, ...]
    features: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        names = self.names if isinstance(self.names, tuple | list) else ()
        wrong = [name for name in names if not is_name(name, TAKEN) or list(names).count(name) > 1]
        if not names or wrong:
            got = shown(wrong[0] if wrong else self.names)
            raise refused(
                self.name, "names", "must be the names of the ranges, each once", got=got, want=NAME
            )
        self._set("names", tuple(names))
        if self.features is not None:
            listed = self.features if isinstance(self.features, tuple | list) else (self.features,)
            self._set("features", tuple(positive(self.name, "features", each) for each in listed))

    def views(self, src: TensorSpec) -> dict[str, tuple[slice, ...]]:
        """The index of each range in the output.

        Raises:
            PlanError: the ranges are not all of src's features.
        """
        count = len(self.names)
        listed = (src.channels // count,) * count if self.features is None else self.features
        if len(listed) != count or sum(listed) != src.channels:
            want = f"{counted(count, 'number')} whose sum is {src.channels}"
            raise refused(self.name, "features", "are not src's", got=shown(listed), want=want)
        ends = [sum(listed[: place + 1]) for place in range(count)]
        before = (slice(None),) * src.channel_axis
        starts = zip(self.names, listed, ends, strict=True)
        return {name: (*before, slice(end - extent, end)) for name, extent, end in starts}

    def output(self, src: TensorSpec) -> TensorSpec:
        """src's shape; a PlanError as `views` raises it."""
        self.views(src)
        return super().output(src)

    def apply(self, x: Scalar) -> Scalar:
        return x

    @classmethod
    def samples(cls) -> Iterator[tuple[str, Op]]:
        yield "f32[3x6]", cls(("q", "k", "v"))
        yield "f32[2x5x3x7, nhwc]", cls(("a", "b"), (2, 3))


RANGES = (Within, Split)
