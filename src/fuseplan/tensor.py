"""A tensor's description: its shape in logical order, its dtype, and the places of its elements."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeVar

import numpy as np

from fuseplan import limits
from fuseplan.dtypes import dtype_name, dtype_of, strides_of
from fuseplan.elsewhere import LAYOUTS as LAYOUT_PLACES
from fuseplan.errors import PlanError, counted, near_miss
from fuseplan.excerpt import Span, bounded, shown, stripped
from fuseplan.locks import cached_property
from fuseplan.models import instead_of
from fuseplan.syntax import check_length, no_arrow

MAX_BYTES = 2**63 - 1
T = TypeVar("T")


# The named layouts of each rank; the first is the default, which is not printed.
LAYOUTS = {2: ("nc",), 3: ("ncw", "nwc"), 4: ("nchw", "nhwc"), 5: ("ncdhw", "ndhwc")}
CHANNELS_LAST = ("nc", "nwc", "nhwc", "ndhwc")


@dataclass(frozen=True, init=False)
class TensorSpec:
    """A tensor: `shape` is logical (n, c, then the spatial axes), rank 2 to 5.

    Attributes:
        shape: extents in logical order.
        dtype: `f64`, `f32`, `f16` or `bf16`; also given as a dtype of NumPy, torch or JAX.
        layout: names of the axes, outermost first (`nchw`, `nhwc`, ...); None where `strides` are given.
        is_layout_said: a layout or strides were given, so the default one was not merely assumed. Equal
            tensors may differ in it.
        strides: distance between neighbours along each axis, in elements and logical order; None where
            `layout` gives it. Strides of a named layout become that layout.

    Raises:
        PlanError: a rank, extent, dtype, layout or stride that cannot be; elements that share storage; or
            more than 2^63 - 1 bytes.
    """

    shape: tuple[int, ...]
    dtype: str
    layout: str | None
    strides: tuple[int, ...] | None
    is_layout_said: bool = field(compare=False, repr=False)

    def __init__(
        self,
        shape: Sequence[int],
        dtype: object = "f32",
        layout: str | None = None,
        strides: Sequence[int] | None = None,
    ) -> None:
        dtype = dtype_name(dtype)
        extents = _positive("an extent", shape)
        if len(extents) not in LAYOUTS:
            raise PlanError(
                "a tensor has 2 to 5 axes: n, c, and up to three spatial ones",
                got=f"{len(extents)} ax{'i' if len(extents) == 1 else 'e'}s",
                want="nxc, nxcxw, nxcxhxw or nxcxdxhxw",
            )
        is_layout_said = layout is not None or strides is not None
        if strides is not None and layout is not None:
            raise PlanError("a tensor has a layout or strides, not both", got=f"{layout} and {strides}")
        if strides is None:
            layout = _known_layout(layout, extents)
            steps = None
        else:
            steps = _checked_strides(strides, extents)
            layout = _layout_with(steps, extents)
            steps = steps if layout is None else None
        fields = {"shape": extents, "dtype": dtype, "layout": layout, "strides": steps}
        for name, value in {**fields, "is_layout_said": is_layout_said}.items():
            object.__setattr__(self, name, value)
        if self.span * dtype_of(dtype).itemsize > MAX_BYTES:
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
    def batch(self) -> int:
        """Extent of axis n."""
        return self.shape[0]

    @property
    def channels(self) -> int:
        """Extent of axis c."""
        return self.shape[1]

    @property
    def spatial(self) -> tuple[int, ...]:
        """Extents of the spatial axes."""
        return self.shape[2:]

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
        return "f64" if self.dtype == "f64" else "f32"

    @cached_property
    def element_strides(self) -> tuple[int, ...]:
        """Strides in elements and logical order, whether they were given or follow from the layout."""
        return self.strides or _dense(self.shape, _order(self.layout or LAYOUTS[self.rank][0]))

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
        """A named layout whose innermost axis is c: `nc`, `nwc`, `nhwc`, `ndhwc`."""
        return self.layout in CHANNELS_LAST

    def with_shape(self, shape: Sequence[int]) -> TensorSpec:
        """Another shape of the same rank, in a named layout.

        That is this tensor's own; for strides without a name, channels last where c has the smallest stride,
        else the default.
        """
        if self.layout is not None:
            return TensorSpec(shape, self.dtype, self.layout)
        is_innermost = self.element_strides[1] == min(self.element_strides)
        return TensorSpec(shape, self.dtype, LAYOUTS[self.rank][-1 if is_innermost else 0])

    def same_layout(self, strides: Sequence[int]) -> bool:
        """Whether `strides` (elements, logical order) put every element where this tensor has it.

        Axes of size 1 are not compared: there is nothing to step to.
        """
        return len(strides) == self.rank and _same_strides(self.shape, self.element_strides, strides)

    def __str__(self) -> str:
        return self.text()

    def text(self, *, names_layout: bool = False) -> str:
        """The text that `parse` reads; the default layout is written if `names_layout`."""
        parts = ["x".join(map(str, self.shape))]
        if self.strides is not None:
            parts.append("strides=" + ":".join(map(str, self.strides)))
        elif names_layout or self.layout != LAYOUTS[self.rank][0]:
            parts.append(str(self.layout))
        return f"{self.dtype}[{', '.join(parts)}]"

    @classmethod
    def like(cls, tensor: Any) -> TensorSpec:
        """The description of a tensor: its shape, its dtype, and where its elements lie.

        Args:
            tensor: a NumPy array, a torch tensor on any device, or another array with `shape` and `dtype`.
                An array that tells no strides is dense; an array of uint16 is bf16, as it is in a call.

        Raises:
            PlanError: it is no tensor, or none that a plan takes.
        """
        if not (hasattr(tensor, "shape") and hasattr(tensor, "dtype")):
            raise PlanError("this is not a tensor", got=shown(tensor), want="an array with shape and dtype")
        dtype = dtype_name(tensor.dtype, stored=True)
        return cls(tuple(tensor.shape), dtype, strides=strides_of(tensor, dtype_of(dtype).itemsize))

    @classmethod
    def parse(cls, text: str) -> TensorSpec:
        """The tensor that `text` describes: `f16[64x256x55x55, nhwc]`, `f32[2x3x4x5, strides=60:1:15:3]`.

        Raises:
            PlanError: it describes none; carets stand under the piece to blame.
        """
        return _parse(text)


def is_integer(value: object) -> bool:
    """A whole number, NumPy's included; True and False are none."""
    return hasattr(value, "__index__") and not isinstance(value, bool | np.bool_)


def _positive(what: str, values: Sequence[int]) -> tuple[int, ...]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise PlanError(f"{what} is given for each axis", got=shown(values), want="a sequence of integers")
    listed = tuple(values)
    if not all(is_integer(value) and value >= 1 for value in listed):
        raise PlanError(f"{what} must be a positive integer", got=listed, want="1 or more everywhere")
    return tuple(int(value) for value in listed)


def _known_layout(layout: str | None, shape: tuple[int, ...]) -> str:
    names = LAYOUTS[len(shape)]
    if layout is None:
        return names[0]
    if layout in names:
        return layout
    places = {name: names[place] for name, place in LAYOUT_PLACES.items()}
    near = near_miss(str(layout), names, places)
    raise PlanError(
        f"no layout of {len(shape)} axes is named {shown(layout)}",
        want=" or ".join(names),
        remedy=near or "Other orders of the axes are given as strides",
    )


def _checked_strides(strides: Sequence[int], shape: tuple[int, ...]) -> tuple[int, ...]:
    steps = _positive("a stride", strides)
    if len(steps) != len(shape):
        raise PlanError("each axis needs a stride", got=counted(len(steps), "stride"), want=f"{len(shape)}")
    reach = 0  # the furthest element along the axes seen so far, which have the smaller strides
    for stride, extent in sorted(zip(steps, shape, strict=True)):
        if extent > 1 and stride <= reach:
            raise PlanError(
                "elements of a tensor must not share storage",
                got=f"strides {steps} for shape {shape}",
                want=f"a stride above {reach} instead of {stride}",
            )
        reach += (extent - 1) * stride
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
        return _dense(self.shape, range(len(self.shape)))

    def same_layout(self, strides: Sequence[int]) -> bool:
        """Whether these strides put every element at the same place; an axis of extent 1 may have any."""
        return len(strides) == len(self.shape) and _same_strides(self.shape, self.element_strides, strides)

    def __str__(self) -> str:
        return f"{self.dtype}[{'x'.join(map(str, self.shape))}]"


def _order(layout: str) -> list[int]:
    """The logical axes, outermost first."""
    logical = "nc" + "dhw"[5 - len(layout) :]
    return [logical.index(axis) for axis in layout]


def _dense(shape: Sequence[int], outermost_first: Sequence[int]) -> tuple[int, ...]:
    strides, step = [0] * len(shape), 1
    for axis in reversed(outermost_first):
        strides[axis] = step
        step *= shape[axis]
    return tuple(strides)


def _same_strides(shape: Sequence[int], ours: Sequence[int], theirs: Sequence[int]) -> bool:
    return all(a == b or extent == 1 for extent, a, b in zip(shape, ours, theirs, strict=True))


def _layout_with(strides: tuple[int, ...], shape: tuple[int, ...]) -> str | None:
    """The named layout that has these strides; None if none has."""
    for name in LAYOUTS[len(shape)]:
        if _same_strides(shape, strides, _dense(shape, _order(name))):
            return name
    return None


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
    shape = _numbers(text, sizes, "x")
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
    _blamed(text, sizes, TensorSpec, shape, dtype)
    strides = re.match(r"strides\s*=", order)
    if strides is None:
        return _blamed(text, place, TensorSpec, shape, dtype, order)
    steps = _numbers(text, (place[0] + strides.end(), place[1]), ":")
    return _blamed(text, place, TensorSpec, shape, dtype, None, steps)


def _no_tensor(text: str) -> PlanError:
    """The error about a text that is no tensor; it names the likely mistake."""
    begin, end = whole = stripped(text, 0, len(text))
    words = bounded(text[begin:end])
    tensor = _TENSOR.match(text)
    if tensor is not None:
        return no_arrow(text, tensor.end())
    if re.fullmatch(r"[\w./\\~-]*[/.][\w.-]*[A-Za-z]\w*", words):
        read = f"Give the text that the file holds: pathlib.Path({words!r}).read_text()"
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
        if not re.fullmatch(rf"\s*[0-9]{{1,{limits.SIZE_DIGITS}}}\s*", piece):
            raise PlanError(
                f"{shown(piece.strip())} is not a size",
                want=f"positive integers with {separator!r} between them",
                text=text,
                span=(begin, begin + len(piece)),
            )
        found.append(int(piece))
        begin += len(piece) + len(separator)
    return found
