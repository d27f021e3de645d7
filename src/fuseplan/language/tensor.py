"""A tensor's description: its shape in logical order, its dtype, and the places of its elements."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, ClassVar, TypeVar

from fuseplan.errors import PlanError, counted
from fuseplan.language import layouts
from fuseplan.language.dtypes import dtype_name, dtype_of, strides_of
from fuseplan.language.extents import OPEN, check_open, filled, opened, positive
from fuseplan.language.syntax import check_length, no_arrow
from fuseplan.messages.excerpt import Span, bounded, shown, stripped
from fuseplan.messages.models import instead_of
from fuseplan.system import limits
from fuseplan.system.locks import cached_property

MAX_BYTES = 2**63 - 1
T = TypeVar("T")


@dataclass(frozen=True, init=False)
class TensorSpec:
    """A tensor: the extents of its axes in logical order, rank 0 to 5.

    Attributes:
        shape: extents in logical order; `*`, given as None or "*", for an open axis, which is outermost.
        dtype: a name, such as `f32`; also given as a dtype of NumPy, torch, JAX or ml_dtypes.
        layout: names of the axes, outermost first (`nchw`, `nhwc`, ...); None where `strides` are given.
            `bsc`, or any other word of one letter per axis, names the axes in logical order, and they lie in
            that order; `bcs of bsc` has the logical order b, s, c and the order b, c, s in memory.
        is_layout_said: a layout or strides were given, so the default one was not merely assumed. Equal
            tensors may differ in it.
        strides: distance between neighbours along each axis, in elements and logical order; None where
            `layout` gives it. Strides of a named layout become that layout.
        names: the axes in logical order, one letter each: n, c and the spatial ones, unless the layout names
            others.

    Raises:
        PlanError: a rank, extent, dtype, layout or stride that cannot be; elements that share storage; or
            more than 2^63 - 1 bytes.
    """

    shape: tuple[int, ...]
    dtype: str
    layout: str | None
    strides: tuple[int, ...] | None
    is_layout_said: bool = field(compare=False, repr=False)
    names: str
    most_axes: ClassVar[int] = 5

    def __init__(
        self,
        shape: Sequence[int | str | None],
        dtype: object = "f32",
        layout: str | None = None,
        strides: Sequence[int] | None = None,
        names: str | None = None,
    ) -> None:
        dtype = dtype_name(dtype)
        extents = positive("an extent", shape)
        layouts.check_rank(len(extents), self.most_axes)
        is_layout_said = layout is not None or strides is not None
        if strides is not None and layout is not None:
            raise PlanError("a tensor has a layout or strides, not both", got=f"{layout} and {strides}")
        named, order = layouts.known(names if layout is None else layout, len(extents))
        steps = None
        if strides is not None:
            steps = _checked_strides(strides, extents)
            found = layouts.layout_with(steps, extents, named)
            steps, order = (steps, "") if found is None else (None, found)
        layout = order if steps is None else None
        fields = {"shape": extents, "dtype": dtype, "layout": layout, "strides": steps, "names": named}
        for name, value in {**fields, "is_layout_said": is_layout_said}.items():
            object.__setattr__(self, name, value)
        check_open(extents, self.element_strides)
        if self.with_extents(*[1] * len(self.open_axes)).span * dtype_of(dtype).itemsize > MAX_BYTES:
            raise PlanError(
                "the tensor is larger than memory can be",
                got=f"{'x'.join(map(str, extents))} elements of {dtype}",
                want="at most 2^63 - 1 bytes",
            )

    @property
    def rank(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def channel_axis(self) -> int:
        """The axis c; the last one where no axis has that name."""
        return self.names.index("c") if "c" in self.names else self.rank - 1

    @property
    def has_channel_names(self) -> bool:
        """The axes are n, c and the spatial ones, in that order."""
        return self.names == layouts.channel_names(self.rank)

    @property
    def batch(self) -> int:
        """Extent of axis n: of the first axis besides the channels'; 1 without one."""
        return self.shape[self.canonical_order[0]] if self.rank > 1 else 1

    @property
    def channels(self) -> int:
        """Extent of axis c; 1 without one."""
        return self.shape[self.channel_axis] if self.shape else 1

    @property
    def spatial(self) -> tuple[int, ...]:
        """Extents of the other axes."""
        return tuple(self.shape[axis] for axis in self.canonical_order[2:])

    @cached_property
    def canonical_order(self) -> tuple[int, ...]:
        """The axes in the order n, c, spatial."""
        outer = [axis for axis in range(self.rank) if axis != self.channel_axis]
        return (*outer[:1], *([self.channel_axis] if self.shape else []), *outer[1:])

    @cached_property
    def places(self) -> tuple[int, ...]:
        """The place of each axis among those of `canonical`: the one of a vector is that of channels."""
        order = (-1,) * (2 - self.rank) + self.canonical_order
        return tuple(map(order.index, range(self.rank)))

    @cached_property
    def canonical(self) -> TensorSpec:
        """The same elements with the axes n, c, spatial, those that the tensor lacks of extent 1."""
        if self.has_channel_names and self.rank >= 2:
            return self
        order, ones = self.canonical_order, [1] * (2 - self.rank)
        shape, steps = (ones + [each[axis] for axis in order] for each in (self.shape, self.element_strides))
        return TensorSpec(shape, self.dtype, strides=steps)

    def without(self, axes: Sequence[int]) -> TensorSpec:
        """A tensor without some of the axes, the others in the same order in memory, without gaps."""
        kept = [axis for axis in range(self.rank) if axis not in axes]
        shape = [self.shape[axis] for axis in kept]
        order = sorted(range(len(kept)), key=lambda place: (-self.element_strides[kept[place]], place))
        names = layouts.without(self.names, axes)
        return TensorSpec(shape, self.dtype, strides=layouts.dense(shape, order), names=names)

    @cached_property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return dtype_of(self.dtype).itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all elements, gaps between them not counted."""
        return self.size * self.itemsize

    @property
    def compute_dtype(self) -> str:
        """The dtype of computation and accumulators: f64 for f64, else f32."""
        return dtype_of(self.dtype).compute

    @cached_property
    def element_strides(self) -> tuple[int, ...]:
        """Strides in elements and logical order, whether they were given or follow from the layout."""
        if self.strides is not None:
            return self.strides
        return layouts.dense(self.shape, layouts.order_of(str(self.layout), self.names))

    @property
    def span(self) -> int:
        """Elements from the first to the last, gaps counted."""
        steps = zip(self.shape, self.element_strides, strict=True)
        return 1 + sum((extent - 1) * stride for extent, stride in steps)

    @property
    def is_dense(self) -> bool:
        """No gaps between the elements."""
        return self.span == self.size

    @property
    def is_channels_last(self) -> bool:
        """A named layout whose innermost axis is c: `nc`, `nwc`, `nhwc`, `ndhwc`, `bsc`."""
        return bool(self.layout) and str(self.layout)[-1] == self.names[self.channel_axis]

    def with_shape(self, shape: Sequence[int]) -> TensorSpec:
        """Another shape of the same rank, in a named layout.

        That is this tensor's own; for strides without a name, channels last where c has the smallest stride,
        else the default.
        """
        if self.layout is not None:
            return TensorSpec(shape, self.dtype, self.layout_text)
        if not self.has_channel_names:
            return TensorSpec(shape, self.dtype, self.names)
        is_innermost = self.rank > 1 and self.element_strides[1] == min(self.element_strides)
        return TensorSpec(shape, self.dtype, layouts.short(self.rank)[-1 if is_innermost else 0])

    def with_dtype(self, dtype: str) -> TensorSpec:
        """A tensor with this one's axes in the same layout, of another dtype."""
        return TensorSpec(self.shape, dtype, self.layout and self.layout_text, self.strides, self.names)

    @property
    def open_axes(self) -> tuple[int, ...]:
        """The axes whose extent a call says."""
        return opened(self.shape)

    def with_extents(self, *extents: int) -> TensorSpec:
        """The same tensor with numbers for its open axes, in logical order; a PlanError if they are not."""
        if not (extents or self.open_axes):
            return self
        shape = filled(self.shape, positive("an extent", extents, may_open=False))
        layout = self.layout_text if self.layout and self.is_layout_said else None
        return TensorSpec(shape, self.dtype, layout, self.strides, self.names)

    def with_names(self, names: str) -> TensorSpec:
        """The same tensor with other names of its axes."""
        return TensorSpec(self.shape, self.dtype, strides=self.element_strides, names=names)

    @property
    def layout_text(self) -> str:
        """The word of the layout, and of the logical order where that differs and is not n, c, spatial."""
        word = str(self.layout)
        return word if self.has_channel_names or word == self.names else f"{word} of {self.names}"

    def same_layout(self, strides: Sequence[int]) -> bool:
        """Whether strides, logical order, put every element at its place; extents of 1 may have any."""
        return len(strides) == self.rank and layouts.same_strides(self.shape, self.element_strides, strides)

    def __str__(self) -> str:
        return self.text()

    def text(self, *, names_layout: bool = True) -> str:
        """The text that `parse` reads, where axes have other names than n, c, spatial with these names.

        Args:
            names_layout: write the layout of a tensor whose axes lie in their logical order.
        """
        parts = ["x".join(map(str, self.shape))]
        if self.strides is not None:
            names = "" if self.has_channel_names else f" of {self.names}"
            parts.append("strides=" + ":".join(map(str, self.strides)) + names)
        elif self.layout != self.names or (names_layout and not self.has_channel_names):
            parts.append(self.layout_text)
        return f"{self.dtype}[{', '.join(parts)}]"

    @classmethod
    def like(cls, tensor: Any) -> TensorSpec:
        """The description of a tensor: its shape, its dtype, and where its elements lie.

        Args:
            tensor: a NumPy array, a torch tensor on any device, or another array with `shape` and `dtype`.
                An array that tells no strides is dense. As in a call, uint16 is bf16.

        Raises:
            PlanError: it is no tensor, or none that a plan takes.
        """
        if not (hasattr(tensor, "shape") and hasattr(tensor, "dtype")):
            raise PlanError("this is not a tensor", got=shown(tensor), want="an array with shape and dtype")
        dtype = dtype_name(tensor.dtype, stored=True)
        made = cls(tuple(tensor.shape), dtype, strides=strides_of(tensor, dtype_of(dtype).itemsize))
        return cls(made.shape, dtype) if made.layout == cls(made.shape, dtype).layout else made

    @classmethod
    def parse(cls, text: str) -> TensorSpec:
        """The tensor that `text` describes: `f16[64x256x55x55, nhwc]`, `f32[2x3x4x5, strides=60:1:15:3]`.

        Raises:
            PlanError: it describes none; carets stand under the piece to blame.
        """
        return _parse(text)


def _checked_strides(strides: Sequence[int], shape: tuple[int, ...]) -> tuple[int, ...]:
    steps = positive("a stride", strides)
    if len(steps) != len(shape):
        raise PlanError("each axis needs a stride", got=counted(len(steps), "stride"), want=f"{len(shape)}")
    shared = layouts.shared_stride(steps, shape)
    if shared is not None:
        stride, reach = shared
        raise PlanError(
            "elements of a tensor must not share storage",
            got=f"strides {steps} for shape {shape}",
            want=f"a stride above {reach} instead of {stride}",
        )
    return steps


@dataclass(frozen=True)
class Dense:
    """A tensor of any rank without gaps, its last axis innermost: how results lie that are not the output."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return dtype_of(self.dtype).itemsize

    @property
    def span(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def element_strides(self) -> tuple[int, ...]:
        """Strides in elements."""
        return layouts.dense(self.shape, range(len(self.shape)))

    def same_layout(self, strides: Sequence[int]) -> bool:
        """Whether these strides put every element at the same place; an axis of extent 1 may have any."""
        return len(strides) == len(self.shape) and layouts.same_strides(
            self.shape, self.element_strides, strides
        )

    def __str__(self) -> str:
        return f"{self.dtype}[{'x'.join(map(str, self.shape))}]"


_TENSOR = re.compile(r"\s*(\w+)\s*\[([^\[\]]*)\]\s*")


def _parse(text: str) -> TensorSpec:
    if not isinstance(text, str):
        raise PlanError("a tensor is read from its text", got=shown(text))
    check_length(text, "the text of a tensor", limits.OPERATOR_CHARACTERS)
    match = _TENSOR.fullmatch(text)
    if match is None:
        raise _no_tensor(text)
    dtype, (begin, end) = match[1], match.span(2)
    _blamed(text, match.span(1), dtype_of, dtype)
    comma = text.find(",", begin, end)
    sizes = stripped(text, begin, end if comma < 0 else comma)
    shape = _numbers(text, sizes, "x") if text[begin:end].strip() else []
    if comma < 0:
        return _blamed(text, sizes, TensorSpec, shape, dtype)
    place = stripped(text, comma + 1, end)
    order = text[slice(*place)]
    if re.match("[0-9]", order):
        joined = re.sub(r"\s*,\s*(?=[0-9])", "x", text[begin:end])
        raise PlanError(
            "an x separates extents, not a comma",
            want=f"{dtype}[{joined}]",
            text=text,
            span=stripped(text, begin, end),
        )
    _blamed(text, sizes, TensorSpec, [1 if extent is OPEN else extent for extent in shape], dtype)
    strides = re.match(r"strides\s*=", order)
    if strides is None:
        return _blamed(text, place, TensorSpec, shape, dtype, order)
    numbers, _, names = order[strides.end() :].partition(" of ")
    begin = place[0] + strides.end()
    steps = _numbers(text, (begin, begin + len(numbers)), ":")
    return _blamed(text, place, TensorSpec, shape, dtype, None, steps, names.strip() or None)


def _no_tensor(text: str) -> PlanError:
    """The error about a text that is no tensor; it names the likely mistake."""
    begin, end = whole = stripped(text, 0, len(text))
    words = bounded(text[begin:end])
    tensor = _TENSOR.match(text)
    if tensor is not None:
        return no_arrow(text, tensor.end())
    if re.fullmatch(r"[\w./\\~-]*[/.][\w.-]*[A-Za-z]\w*", words):
        read = f"Give the file's text: pathlib.Path({words!r}).read_text(), or @{words} on the command line"
        remedy = instead_of(words) or read
        return PlanError("this is the name of a file, not a plan", text=text, span=whole, remedy=remedy)
    if re.match(r"[A-Za-z_]\w*\s*(\(|$)", words):
        want = f"such as f32[1x16] -> {words}"
        return PlanError("a plan begins with its input, a tensor", want=want, text=text, span=whole)
    return PlanError("this is not a tensor", want="such as f16[64x256x55x55, nhwc]", text=text, span=whole)


def _blamed(text: str, span: Span, make: Callable[..., T], *fields: Any) -> T:
    """`make(*fields)`; carets stand under `span` if that fails."""
    try:
        return make(*fields)
    except PlanError as error:
        raise error.located(text, span=span) from None


def _numbers(text: str, span: Span, separator: str) -> list[int]:
    begin, end = span
    found = []
    for piece in text[begin:end].split(separator):
        is_open = separator == "x" and piece.strip() == "*"
        if not is_open and not re.fullmatch(rf"\s*[0-9]{{1,{limits.SIZE_DIGITS}}}\s*", piece):
            raise PlanError(
                f"{shown(piece.strip())} is not a size",
                want=f"positive integers with {separator!r} between them",
                text=text,
                span=(begin, begin + len(piece)),
            )
        found.append(OPEN if is_open else int(piece))
        begin += len(piece) + len(separator)
    return found
