"""Writes the text of the depthwise kernel, or a pool: a tile of outputs along w and features, some rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import isfinite, prod

from fuseplan.backends.triton.dialect import table
from fuseplan.backends.triton.elementwise import Elementwise, Known, Place, argument
from fuseplan.backends.triton.index import ACROSS, DOWN, WIDE, Index, Mask, arange, as_index, number, total
from fuseplan.backends.triton.shell import Writer, of_launch, programs_of
from fuseplan.backends.triton.storage import named
from fuseplan.kernels.emit import Slot
from fuseplan.kernels.kernel import Kernel
from fuseplan.language.dtypes import FP8
from fuseplan.system.locks import cached_property

HELD_WEIGHTS = 72  # of a thread are kept in registers; more are loaded where they are used


@dataclass(frozen=True)
class DepthwiseKnobs:
    """The fields of `GpuDepthwise`, which says what they mean."""

    columns: int
    features: int
    rows: int
    warps: int
    span: int = 1
    ahead: int = 1

    @property
    def vector(self) -> int:
        """Features that a thread has side by side."""
        return max(1, self.columns * self.features // (32 * self.warps))


def _three(values: tuple[int, ...], fill: int) -> tuple[int, int, int]:
    """Sizes along d, h and w, where the plan has fewer spatial axes."""
    d, h, w = (fill,) * (3 - len(values)) + values
    return d, h, w


class DepthwiseWriter(Writer):
    """Writes one kernel.

    Attributes:
        blocks: how many blocks of features, columns and rows a plane (one depth of an image) has.
        planes: of all images.
        count: of programs: one for each block of each plane.
        reads: columns of src, from the first one's, that a thread's outputs read.
    """

    def __init__(self, knobs: DepthwiseKnobs, kernel: Kernel, title: str) -> None:
        super().__init__(kernel, title)
        self.knobs, self.options = knobs, (("num_warps", knobs.warps), ("num_stages", 1))
        contraction = kernel.contraction
        self.last = kernel.dst.is_channels_last
        self.kernel_size = _three(contraction.kernel, 1)
        self.stride, self.dilation = _three(contraction.stride, 1), _three(contraction.dilation, 1)
        self.low = _three(tuple(low for low, _ in contraction.padding), 0)
        self.src_size, self.dst_size = _three(kernel.src.spatial, 1), _three(kernel.dst.spatial, 1)
        self.src_steps = _three(kernel.src.element_strides[2:], 0)
        self.dst_steps = _three(kernel.dst.element_strides[2:], 0)
        features, (depth, height, width) = contraction.features, self.dst_size
        threads = -(-width // knobs.span) * (features if self.last else 1)
        across = 1 if self.last else -(-features // knobs.features)
        self.blocks = across, -(-threads // knobs.columns), -(-height // knobs.rows)
        self.planes = contraction.batch * depth
        self.count = prod(self.blocks) * self.planes
        taps = product(range(knobs.span), range(self.kernel_size[2]))
        self.reads = sorted({place * self.stride[2] + tap * self.dilation[2] for place, tap in taps})
        self.compute = named(kernel.compute_dtype)
        self.pool = contraction.pool
        self.fill = repr(contraction.fill) if isfinite(contraction.fill) else f'float("{contraction.fill}")'
        # Elements of fp8 are loaded as their bits, which have no infinity in e4m3.
        self.absent = "0.0" if kernel.src.dtype in FP8 else self.fill
        self.masks: dict[Mask, Mask] = {}  # by what they say: their names
        self.counts: dict[tuple[int, int], Index] = {}  # of taps, by axis and place: their names
        self.table = table(self.text, "tl", kernel.dst.dtype, kernel.compute_dtype)
        self.prologue = Elementwise(kernel, "prologue", self.text)
        self.epilogue = Elementwise(kernel, "epilogue", self.text)
        weight = () if self.pool else (Slot("operand", kernel.weight.key),)
        self.tensors = (Slot("src"), *weight, *self.prologue.slots, *self.epilogue.slots, Slot("dst"))
        self.programs = programs_of(kernel, self.planes, 1, prod(self.blocks))

    def write_body(self) -> None:
        self._indices()
        self._offsets()
        self._rows()

    # ---- where the tile lies

    def _indices(self) -> None:
        """Which elements of dst the program makes."""
        text, knobs, contraction = self.text, self.knobs, self.kernel.contraction
        features, columns, rows = self.blocks
        is_wide = self.is_open or max(self.kernel.src.span, self.kernel.dst.span) >= WIDE
        if is_wide:
            large = "as large as these may be" if self.is_open else "this large"
            text.line(f"# offsets of a tensor {large} need 64 bits")
        programs = of_launch(self.kernel, self.planes) * prod(self.blocks)
        program = text.index("program", number("tl.program_id(0)", programs).wide(is_wide))
        plane = text.index("plane", program // (features * columns * rows))
        self.image = text.index("image", plane // self.dst_size[0])
        depth = text.index("depth", plane % self.dst_size[0])
        row = text.index("row", program // (features * columns) % rows * knobs.rows)
        place = text.index("place", program // features % columns * knobs.columns + arange(knobs.columns))
        if self.last:
            feature, column = place % contraction.features, place // contraction.features
        else:
            feature, column = program % features * knobs.features + arange(knobs.features), place
        feature = text.index("feature", feature)
        column = text.index("column", column * knobs.span)
        channel = text.index("channel", feature // contraction.features_per_group)
        along_features, along_columns = ("", "") if self.last else (DOWN, ACROSS)
        self.at = depth, row, column.at(along_columns)
        self.feature, self.channel = (each.at(along_features) for each in (feature, channel))
        self.has_feature = text.mask("has_feature", self.feature < contraction.features)

    def _offsets(self) -> None:
        """Where they lie, and the elements of src that they are made of."""
        text, image = self.text, self.image
        src, dst = self.kernel.src.element_strides, self.kernel.dst.element_strides
        steps = [step * stride for step, stride in zip(self.stride, self.src_steps, strict=True)]
        self.src_image = text.index("src_image", image * src[0])
        text.line("# in 64 bits what lies beside an element is a constant away")
        inside = self._offset(self.channel * src[1], steps)
        self.src_first = text.index("src_first", self.src_image + inside)
        self.dst_inside = text.index("dst_inside", self._offset(self.feature * dst[1], self.dst_steps))
        self.dst_first = text.index("dst_first", image * dst[0] + self.dst_inside)

    def _offset(self, channel: Index, steps: Sequence[int]) -> Index:
        """Where the first element of each thread lies in its image."""
        axes = (at * step for at, step in zip(self.at, steps, strict=True))
        return total([*axes, channel]).wide()

    # ---- the sum

    def _rows(self) -> None:
        """Every src row that the output rows need is loaded once, and added to all of them."""
        knobs, (depths, height, width) = self.knobs, self.kernel_size
        known = self.epilogue.prepare(str(self.feature), str(self.has_feature))
        needs = self._needs()
        steps = list(product(range(depths), needs))
        coming = [self._load_row(*step) for step in steps[: knobs.ahead]]
        is_held = self.pool is None and height * width * knobs.vector <= HELD_WEIGHTS
        held: dict[tuple[int, int], str] = {}
        sums: dict[tuple[int, int], str] = {}
        for at, (slice_, offset) in enumerate(steps):
            coming += [self._load_row(*step) for step in steps[at + knobs.ahead : at + knobs.ahead + 1]]
            if is_held and offset == min(needs):
                held = self._weights(slice_)
            self._add_row(slice_, coming.pop(0), needs[offset], held, sums)
            done = [place for place, tap in needs[offset] if tap == height - 1 and slice_ == depths - 1]
            for place, column in product(done, range(knobs.span)):
                self._store(place, column, sums.pop((place, column), None), known)

    def _needs(self) -> dict[int, list[tuple[int, int]]]:
        """Which output rows read a src row, each with its tap, by its distance from the first."""
        needs: dict[int, list[tuple[int, int]]] = {}
        for place, tap in product(range(self.knobs.rows), range(self.kernel_size[1])):
            needs.setdefault(place * self.stride[1] + tap * self.dilation[1], []).append((place, tap))
        return dict(sorted(needs.items()))

    def _weights(self, slice_: int) -> dict[tuple[int, int], str]:
        """The weights of one depth's taps, each a vector over features."""
        _, height, width = self.kernel_size
        taps = [(row, column) for row in range(height) for column in range(width)]
        return {tap: self._weight(slice_, *tap) for tap in taps}

    def _weight(self, slice_: int, row: int, column: int) -> str:
        _, height, width = self.kernel_size
        tap = (slice_ * height + row) * width + column
        pointer = argument(Slot("operand", self.kernel.weight.key))
        at = total([Index(pointer), as_index(tap * self.kernel.contraction.features), self.feature])
        loaded = self.text.let("weight", f"tl.load({at}{self.has_feature.guard()})")
        return self.prologue.widened(loaded, self.kernel.weight.dtype, "weight")

    def _load_row(self, slice_: int, offset: int) -> list[_Loaded]:
        """Begins to load what the tile's outputs need of a row of src, each element once."""
        depth, height, width = self.src_steps
        plane, line = slice_ * self.dilation[0] - self.low[0], offset - self.low[1]
        if self._never(0, plane) or self._never(1, line):
            return []
        outside = self._inside(0, plane) & self._inside(1, line) & self.has_feature
        found = []
        for at in self.reads:
            column = at - self.low[2]
            if self._never(2, column):
                continue
            mask = self._named("exists", outside & self._inside(2, column))
            element = self.src_first + (plane * depth + line * height + column * width)
            x = self.text.let("x", f"tl.load({Index('src') + element}{mask.guard(self.absent)})")
            found.append(_Loaded(at, x, element, mask))
        return found

    def _inside(self, axis: int, offset: int) -> Mask:
        """Whether a coordinate of src exists, which is `offset` where the output's is zero."""
        return self._named(f"has_src_{'dhw'[axis]}", self._within(axis, offset))

    def _within(self, axis: int, offset: int) -> Mask:
        at = self.at[axis] * self.stride[axis] + offset
        return (at >= 0) & (at < self.src_size[axis])

    def _never(self, axis: int, offset: int) -> bool:
        """Whether no output of a pool has such an element: padding of -inf would be a constant.

        Of constants of 16 bits ptxas 12.8 and 12.9 lose the sign where three numbers are compared at once.
        """
        at = self.at[axis] * self.stride[axis] + offset
        return self.pool is not None and (at.high < 0 or at.low >= self.src_size[axis])

    @cached_property
    def _is_padded(self) -> bool:
        """Whether some element that is read does not exist."""
        depths = [slice_ * self.dilation[0] for slice_ in range(self.kernel_size[0])]
        offsets = (depths, list(self._needs()), self.reads)
        ends = (self._within(axis, at - self.low[axis]) for axis, found in enumerate(offsets) for at in found)
        return bool(self.has_feature) or any(map(bool, ends))

    def _named(self, stem: str, mask: Mask) -> Mask:
        """The mask by a name; the same mask has the same name everywhere."""
        if str(mask).isidentifier():
            return mask
        if mask and mask not in self.masks:
            self.masks[mask] = mask.named(self.text.let(stem, str(mask)))
        return self.masks.get(mask, mask)

    def _add_row(
        self,
        slice_: int,
        row: list[_Loaded],
        users: list[tuple[int, int]],
        held: dict[tuple[int, int], str],
        sums: dict[tuple[int, int], str],
    ) -> None:
        """Adds a row of src, times its weights, to the sums of the outputs that read it."""
        step, dilation = self.stride[2], self.dilation[2]
        for loaded in row:
            x = self._prepared(loaded)
            for (place, tap), column in product(users, range(self.knobs.span)):
                shift, rest = divmod(loaded.column - column * step, dilation)
                if rest or not 0 <= shift < self.kernel_size[2]:
                    continue
                before = sums.get((place, column))
                if self.pool:
                    sums[place, column] = self.table[self.pool.join](before, x) if before else x
                    continue
                weight = held.get((tap, shift)) or self._weight(slice_, tap, shift)
                added = f"{before} + {x} * {weight}" if before else f"{x} * {weight}"
                sums[place, column] = self.text.let("sum", added)

    def _prepared(self, loaded: _Loaded) -> str:
        """The prologue's result; padding is what it is after it, whatever it makes of zero."""
        x = self.prologue.widened(loaded.name, self.kernel.src.dtype)
        if not self.kernel.prologue:
            is_whole = self.absent == self.fill or not loaded.mask
            return x if is_whole else self.text.let("x", f"tl.where({loaded.mask}, {x}, {self.fill})")
        inside = (
            f"{loaded.element} - {self.src_image}" if self.src_image.constant != 0 else f"{loaded.element}"
        )
        mask = str(loaded.mask) or "True" * self._is_padded
        place = Place(str(loaded.element), str(self.channel), f"({inside})", mask, str(self.has_feature))

        def write(x: str, place: Place) -> tuple[str, ...]:
            made = self.prologue.apply(x, place)
            chosen = f"tl.where({place.mask}, {made}, {self.fill})"
            return (self.text.let("x", chosen) if place.mask else made,)

        return self.prologue.shared("prepared", x, place, write=write)[0]

    def _store(self, place: int, column: int, total: str | None, known: Known) -> None:
        if self.at[1].low + place >= self.dst_size[1] or self.at[2].low + column >= self.dst_size[2]:
            return  # no tile has so many rows or columns
        if total is None:  # a window that lies in the padding
            shape = [self.knobs.columns] if self.last else [self.knobs.features, self.knobs.columns]
            total = self.text.let("padding", f"tl.full({shape}, {self.fill}, {self.compute})")
        beside = place * self.dst_steps[1] + column * self.dst_steps[2]
        element, inside = self.dst_first + beside, self.dst_inside + beside
        mask = str(self._stored(place, column)) or "True" * self.is_masked
        feature, has_feature = str(self.feature), str(self.has_feature)
        found = Place(str(element), feature, str(inside), mask, has_feature, known=known)

        def write(x: str, place: Place) -> tuple[str, ...]:
            self.epilogue.store(x, place)
            return ()

        self.epilogue.shared("finish", self._finished(total, place, column), found, write=write)

    def _finished(self, total: str, place: int, column: int) -> str:
        """A window's value: of a mean, over the number of its taps that count."""
        if self.pool is None or not self.pool.counted:
            return total
        ends = ((0, 1),) * (3 - len(self.pool.counted)) + self.pool.counted
        found = [self._counted(axis, shift, ends[axis]) for axis, shift in enumerate((0, place, column))]
        known = [each.constant for each in found if each.constant is not None]
        rest = [each.atom for each in found if each.constant is None]
        made = self.text.let("mean", f"{total} * {1 / prod(known)!r}") if prod(known) > 1 else total
        if not rest:
            return made
        count = self.text.let("count", f"({' * '.join(rest)}).to({self.compute})")
        return self.text.let("mean", f"{made} / {count}")

    def _counted(self, axis: int, shift: int, ends: tuple[int, int]) -> Index:
        """How many taps along an axis lie between two positions, of the output `shift` behind the first."""
        first = (self.at[axis] + shift) * self.stride[axis] - self.low[axis]
        size, step = self.kernel_size[axis], self.dilation[axis]
        if ends[0] <= first.low and first.high + (size - 1) * step < ends[1]:
            return as_index(size)
        if (axis, shift) not in self.counts:
            begin, end = (self._taps_before(end - first, size, step) for end in ends)
            text = self.text.let("taps", f"{end} - {begin}")
            self.counts[axis, shift] = Index(text, 0, size, is_vector=first.is_vector)
        return self.counts[axis, shift]

    def _taps_before(self, distance: Index, size: int, step: int) -> str:
        """How many taps of an output stand in front of a position so far behind its first tap."""
        inside = f"tl.minimum(tl.maximum({distance}, 0), {size * step})"
        return inside if step == 1 else f"({inside} + {step - 1}) // {step}"

    def _stored(self, place: int, column: int) -> Mask:
        """Which of a thread's outputs exist at a row and a column of its own."""
        _, row, columns = self.at
        has_row = self._named("has_row", row + place < self.dst_size[1])
        has_column = self._named("has_column", columns + column < self.dst_size[2])
        return self._named("exists", has_row & self.has_feature & has_column)

    @property
    def is_masked(self) -> bool:
        """Whether some of the tiles' outputs do not exist."""
        ends = (self.dst_size[1] % self.knobs.rows, self.at[2].high + self.knobs.span > self.dst_size[2])
        return bool(self.has_feature) or any(ends)


@dataclass(frozen=True)
class _Loaded:
    """A column of src: where it lies from the first, the name of its elements, their offsets and mask."""

    column: int
    name: str
    element: Index
    mask: Mask
