"""Writes what a group of warps of the kernel for Hopper does with a sum: the stages after it, and dst."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from fuseplan.backends.triton.elementwise import Elementwise, Known, Place, argument
from fuseplan.backends.triton.index import (
    ACROSS,
    ALL,
    DOWN,
    WIDE,
    Index,
    Mask,
    as_index,
    digits,
    number,
    sliced,
)
from fuseplan.backends.triton.templates.hopper_schedule import PART_TILES, Schedule, widened
from fuseplan.backends.triton.templates.hopper_spread import Spread
from fuseplan.backends.triton.templates.hopper_tiles import HALF
from fuseplan.backends.triton.text import Text
from fuseplan.kernels.emit import Slot
from fuseplan.kernels.kernel import KernelOperand

# Of a thread of one, two or three groups: those that sums and what is held beside them may take, for the
# compiler to have enough for the rest.
HELD_REGISTERS = {1: 88, 2: 184, 3: 116}


class Finishing:
    """The lines after the sum, in the function `consume`.

    Operands per element come by copies that run beside the sum. What several operands say of a feature is
    computed before the sum, where registers hold it meanwhile.

    Attributes:
        slots: of the epilogue's operands and parameters.
    """

    def __init__(self, text: Text, schedule: Schedule, spread: Spread) -> None:
        self.text, self.schedule, self.spread = text, schedule, spread
        self.knobs, self.kernel, self.geometry = schedule.knobs, schedule.kernel, schedule.geometry
        self.between = Elementwise(self.kernel, "between", text, namespace="gl")
        self.epilogue = Elementwise(self.kernel, "epilogue", text, namespace="gl")
        self.slots = (*self.between.slots, *self.epilogue.slots)
        along, across = ACROSS, DOWN
        self._along, self._across = (across, along) if self.knobs.swapped else (along, across)
        # By the first feature of a part: the name of its features, and what depends on them alone.
        self._early: dict[str, tuple[Index, Known]] = {}

    def layouts(self) -> dict[str, str]:
        """By name, how a part lies over the threads: as products leave it, and to be scattered."""
        schedule = self.schedule
        widths = {name: width for _, name, width in schedule.sums} | {"layout": schedule.part_width}
        found = {name: accumulator(width, schedule.itemsize) for name, width in widths.items()}
        is_stored = self.geometry.scatters and not self.geometry.is_summed
        return found | ({"lying": self._lying} if is_stored else {})

    @property
    def _lying(self) -> str:
        """Neighbouring threads store neighbours in memory: features, or positions."""
        down = min(4, max(1, prod(self.schedule.part) // 32))
        shapes = [1, 1], [32, 1], [down, 4 // down], [0, 1]
        if self.geometry.is_beside:
            lanes = min(32, self.schedule.part_columns // 2)
            shapes = [1, 2], [32 // lanes, lanes], [4, 1], [1, 0]
        told = (str(each[::-1] if self.knobs.swapped else each) for each in shapes)
        return f"gl.BlockedLayout({', '.join(told)})"

    # ---- before the sum

    def begin(self) -> None:
        """What comes before the first tile; the program's features stay where tiles have but one block."""
        if self.schedule.copied:
            self.text.line("turn = 0")
        if self._is_early and self._stays:
            program = number("gl.program_id(0)", self.schedule.launched * self.schedule.across)
            self.text.line(f"feature = {program % self.schedule.across * self.schedule.made}")
            self._prepare()

    def prepare(self) -> None:
        """What comes before the sum of a tile."""
        if self.schedule.copied and not self.schedule.is_staged:
            self.text.line("tma.store_wait(pendings=0)", "gl.barrier()")
        for operand in self.schedule.copied:
            self._bring(operand)
        if self._is_early and not self._stays:
            self._prepare()

    @property
    def _stays(self) -> bool:
        return self.knobs.resident or self.schedule.across == 1

    def _prepare(self) -> None:
        for part in self.schedule.parts:
            first = str(self._first_feature(part))
            if first not in self._early:
                column = self._column(part)
                channel = self._channel(column).at(self._along)
                exists = self.text.mask(self.text.name("exists"), self._has_channel(column))
                known = self.epilogue.prepare(str(channel), str(exists))
                self._early[first] = column, known

    def _first_feature(self, part: tuple[int, ...]) -> Index:
        return self.schedule.at(part)[-1]

    def _column(self, part: tuple[int, ...]) -> Index:
        """Writes the vector of a part's features."""
        features = sliced(self.schedule.part_columns, self._axis, "layout")
        return self.text.index(self.text.name("column"), self._first_feature(part) + features)

    @property
    def _axis(self) -> int:
        """The axis of a part that a vector of features lacks."""
        return int(self.knobs.swapped)

    @property
    def _is_early(self) -> bool:
        """Whether what depends on the features is worth registers beside the sums, and fits.

        A bias alone is not: nothing is computed of it. The values of a batch_norm are, and waiting for four
        loads and a root after the sum took 2 % of residual blocks (benchmarks/results, gpu_residual).
        """
        rows, columns = self.schedule.sum_shape
        values = sum(operand.is_channel for operand in self.epilogue.operands)
        each = rows // 32 if self.knobs.swapped else self.schedule.own_columns // 4
        return values > 1 and rows * columns // 128 + values * each <= HELD_REGISTERS[self.knobs.groups]

    def _bring(self, operand: KernelOperand) -> None:
        """Starts the copies of an operand's tile; they run while the group multiplies."""
        tile, full = brought(operand)
        schedule = self.schedule
        name = argument(Slot("operand", operand.key))
        size = prod(schedule.own) * schedule.own_columns * schedule.itemsize
        self.text.line(f"mbarrier.expect({full}, {size})")
        for place, part in enumerate(schedule.parts):
            into = f"{tile}.index({place})"
            self.text.line(f"tma.async_load({name}, [{_listed(schedule.at(part))}], {full}, {into})")

    # ---- after it

    def finish(self) -> None:
        """The stages after the sum, a part at a time, each copied out when it is ready."""
        text, schedule = self.text, self.schedule
        waits = [f"mbarrier.wait({brought(operand)[1]}, turn)" for operand in schedule.copied]
        text.line(*waits, *["turn ^= 1"] * bool(waits))
        row = sliced(schedule.sum_shape[0], 1, "layout")
        column = sliced(schedule.part_width, 0, "layout")
        with self.spread.ended(text, self._split(), str(row), str(column)) as halves:
            self._finish(halves)

    def end(self) -> None:
        """What comes after the last tile."""

    def _finish(self, halves: Sequence[str]) -> None:
        text, schedule = self.text, self.schedule
        parts, summed = schedule.parts, self._summed(halves)
        first, known = self._columns(parts[0])
        names = [*schedule.letters, "feature"]
        last = max(self._first_feature(part).high for part in parts)
        any_column = replace(first, high=last + schedule.part_columns - 1)  # the function serves all parts

        def write() -> tuple[str, ...]:
            own = [begin.named(name) for name, begin in zip(names, schedule.at(parts[0]), strict=True)]
            self._finish_part(whole, "place", [self._reaching(each) for each in own], any_column, known)
            return ()

        whole = ["part", "value_part"][: self.geometry.ways]
        for place, (part, totals) in enumerate(zip(parts, summed, strict=True)):
            if len(parts) == 1:
                self._finish_part(totals, "0", schedule.at(part), first, known)
            else:
                column, own = self._columns(part) if place else (first, known)
                given = dict(zip(whole, totals, strict=True)) | {"place": str(place), str(first): str(column)}
                given |= {name: str(begin) for name, begin in zip(names, schedule.at(part), strict=True)}
                if known and own:
                    both = ((known.values[node], own.values[node]) for node in known.values)
                    given |= {mine: other for mine, other in both if mine.isidentifier()}
                text.call("finish", given, write)
            # with an odd number of saved values, a part ends with the tile of dst that it began with
            if self.schedule.is_staged and len(self.kernel.saved) % 2 == 0:
                text.line("slot ^= 1")

    def _columns(self, part: tuple[int, ...]) -> tuple[Index, Known | None]:
        """The vector of a part's features, and what is known of them."""
        return self._early.get(str(self._first_feature(part))) or (self._column(part), None)

    def _reaching(self, begin: Index) -> Index:
        """Where any part may begin; stored along features, an only part begins where its number says."""
        if self.schedule.scatters_features and begin.text == str(begin.constant):
            return begin
        return replace(begin, high=begin.high + prod(self.knobs.box) + self.knobs.columns)

    def _finish_part(
        self, totals: Sequence[str], place: str, at: list[Index], column: Index, known: Known | None
    ) -> None:
        """The stages of a part, and its copy to dst.

        Args:
            totals: names of the sums that it is made of.
            place: text of the part's number.
            at: where it begins in dst.
            column: its features.
            known: what is known of them.
        """
        is_early = self.schedule.scatters_features
        offsets, mask = self._lies(at) if is_early else ("", ALL)
        held = self._loaded(offsets, mask) if is_early else self._read(place)
        lying = replace(self._place(at, column, is_known=known is not None), held=held, known=known)
        made = self.epilogue.apply(self._met(totals, column), lying)
        if self.geometry.scatters:
            if lying.mask or not is_early:  # the part's place has names that the offsets have as well
                offsets, mask = self._lies(at)
            for tensor, value in self.epilogue.outputs(made).items():
                stored = f"gl.convert_layout({value}, lying){mask.guard('')}"
                self.text.line(f"gl.store({tensor} + {offsets}, {stored})")
            return
        tile, waits = "dst_tiles.index(slot)", [f"tma.store_wait(pendings={PART_TILES - 1})", "gl.barrier()"]
        if not self.schedule.is_staged:
            tile, waits = f"{brought(self.schedule.copied[0])[0]}.index({place})", []
        for place_of, (tensor, value) in enumerate(self.epilogue.outputs(made).items()):
            self.text.line(
                *["slot ^= 1"] * (place_of > 0),
                *waits,
                f"{self._as_sum(tile)}.store({value})",
                "fence_async_shared()",
                f"tma.async_store({tensor}, [{_listed(at)}], {tile})",
            )

    def _loaded(self, offsets: str, mask: Mask) -> dict[str, str]:
        """Names of the parts of operands that are loaded as dst is stored, where products have the sums."""
        found = {}
        for operand in self.epilogue.operands:
            if not operand.packed:
                pointers = f"{argument(Slot('operand', operand.key))} + {offsets}"
                read = f"gl.convert_layout(gl.load({pointers}{mask.guard()}), layout)"
                found[operand.key] = self.text.let(f"{operand.key}_read", read)
        return found

    def _lies(self, at: list[Index]) -> tuple[str, Mask]:
        """Offsets of a part in dst, neighbours in memory side by side, and which elements there are."""
        text, schedule = self.text, self.schedule
        features = sliced(schedule.part_columns, self._axis, "lying")
        column = text.index("feature_to", self._reaching(at[-1]) + features)
        row = text.index("row_to", sliced(prod(schedule.part), 1 - self._axis, "lying"))
        element, _, mask = self._positions(row, at, column)
        mask = text.mask("mask_to", mask & self._has_channel(column))
        if self.geometry.residues == 1:  # offsets that the threads' registers differ by are numbers
            first, more = self._reaching(at[-1]), features
        else:
            first, more = as_index(0), self._channel(column)
        return f"{(element + first * self._step).atom} + {(more * self._step).at(self._along).atom}", mask

    def _as_sum(self, tile: str) -> str:
        """A part of dst in shared memory, as the products' rows and columns."""
        schedule = self.schedule
        matrix = f"{tile}.reshape([{prod(schedule.part)}, {schedule.part_columns}])"
        return f"{matrix}.permute((1, 0))" if self.knobs.swapped else matrix

    def _met(self, totals: Sequence[str], column: Index) -> str:
        """The sum that the stages of a part begin with; of a gated product also the sum of its values."""
        ways = self.geometry.ways
        if ways == 1:
            return totals[0]
        made = self._between(totals, column) if self.kernel.between else totals
        self.epilogue.given |= {f"x[{number}]": each for number, each in enumerate(made)}
        return made[0]

    def _between(self, totals: Sequence[str], column: Index) -> list[str]:
        """The stages before gate and value meet, whose operands have them in turn."""
        made, exists = [], self.text.mask(self.text.name("exists"), self._has_channel(column))
        for way, total in enumerate(totals):
            feature = self.text.index(self.text.name("feature"), column * self.geometry.ways + way)
            lying = Place("", str(feature.at(self._along)), "", "", str(exists))
            made.append(self.between.apply(total, lying))
        return made

    def _summed(self, halves: Sequence[str]) -> list[Sequence[str]]:
        """The sums that each part of dst is made of: of a gated product all gates come before all values."""
        count = len(halves) // self.geometry.ways
        return [halves[place::count] for place in range(count)]

    def _split(self) -> list[str]:
        """The parts of the sums, columns in order; every thread keeps what it has."""
        text, schedule = self.text, self.schedule
        if schedule.sum_shape[1] == schedule.part_width:
            return ["total"]
        cut = [part for total, _, width in schedule.sums for part in self._cut(total, width)]
        return [text.let("part", f"gl.convert_layout({each}, layout, assert_trivial=True)") for each in cut]

    def _cut(self, whole: str, width: int) -> list[str]:
        if width == self.schedule.part_width:
            return [whole]
        left, right = self.text.name("half"), self.text.name("half")
        shape, width = [self.schedule.sum_shape[0], 2, width // 2], width // 2
        self.text.line(f"{left}, {right} = {whole}.reshape({shape}).permute((0, 2, 1)).split()")
        return [*self._cut(left, width), *self._cut(right, width)]

    def _read(self, place: str) -> dict[str, str]:
        """Names of the copied operands' parts, in registers."""
        found = {}
        for operand in self.schedule.copied:
            tile, _ = brought(operand)
            read = f"{self._as_sum(f'{tile}.index({place})')}.load(layout)"
            found[operand.key] = self.text.let(f"{operand.key}_read", read)
        return found

    def _channel(self, column: Index) -> Index:
        """The features of dst that columns are: of several residues each."""
        return column // self.geometry.residues

    def _has_channel(self, column: Index) -> Mask:
        return (column < self.geometry.features).at(self._along)

    def _place(self, at: list[Index], column: Index, *, is_known: bool) -> Place:
        """How the elements of the part that begins at `at` are indexed."""
        text, schedule = self.text, self.schedule
        channel, has_channel = self._channel(column).at(self._along), self._has_channel(column)
        if sum(operand.is_channel for operand in self.epilogue.operands) > 1 and not is_known:
            has_channel = text.mask(text.name("exists"), has_channel)
        has_inside = any(operand.is_inside for operand in self.epilogue.operands)
        scattered = any(operand.is_scattered for operand in self.epilogue.operands)
        own = any(not operand.packed for operand in self.epilogue.operands)
        in_place = self.geometry.scatters and own and not self.schedule.scatters_features
        counts = self.epilogue.counts or scattered or in_place
        if not (has_inside or counts):
            return Place("", str(channel), "", "", str(has_channel))
        row = text.index("row", sliced(prod(schedule.part), 1 - self._axis, "layout"))
        element, inside, mask = self._positions(row, at, column)
        mask = text.mask("mask", mask & has_channel)
        if has_inside:
            inside = text.index("inside", inside + channel * self._step)
        if counts:
            element = text.index("element", element + channel * self._step)
        return Place(str(element), str(channel), str(inside), str(mask), str(has_channel))

    @property
    def _step(self) -> int:
        """Elements of dst from a feature to the next."""
        return self.kernel.dst.element_strides[1] if self.geometry.scatters else 1

    def _positions(self, row: Index, first: list[Index], column: Index) -> tuple[Index, Index, Mask]:
        """Offset of each row of a part in dst and within its image, and which rows there are.

        Where columns are of several residues, of each row and column.
        """
        text, geometry = self.text, self.geometry
        is_wide = self.kernel.open_axis is not None or self.kernel.dst.span >= WIDE
        if geometry.is_flat:
            position = text.index("position", first[0] + row)
            step = geometry.axes[0].dst_stride
            inside = (position % prod(self.kernel.dst.spatial) * step).at(self._across)
            mask = (position < self.schedule.extents[0]).at(self._across)
            return (position.wide(is_wide) * step).at(self._across), inside, mask
        element, inside, mask = as_index(0), as_index(0), ALL
        places = digits(row, self.schedule.part)
        rows = zip(geometry.axes, self.schedule.extents, first, places, strict=False)
        begins = self._begins(column)
        for axis, extent, start, place in rows:
            at = text.index(f"{axis.letter}_row", start + place)
            mask = mask & (at < extent).at(self._across)
            spot = (at * axis.stride).at(self._across)
            if axis.extent:
                spot = spot + begins[axis.letter].at(self._along)
                mask = mask & (spot >= 0) & (spot < axis.extent)
            element = element + widened(spot, is_wide) * axis.dst_stride
            if axis.letter != "n":
                inside = inside + spot * axis.dst_stride
        return element, inside, mask

    def _begins(self, column: Index) -> dict[str, Index]:
        """The output of the first row that columns make along each axis with residues."""
        axes = sorted(
            (axis for axis in self.geometry.axes if axis.extent), key=lambda axis: -ord(axis.letter)
        )
        if not axes:
            return {}
        number = self.text.index("residue", column % self.geometry.residues)
        places = digits(number, [axis.stride for axis in axes])
        return {axis.letter: place + axis.begin for axis, place in zip(axes, places, strict=True)}


def _listed(at: list[Index]) -> str:
    return ", ".join(map(str, at))


def brought(operand: KernelOperand) -> tuple[str, str]:
    """A copied operand's tile in shared memory, and its barrier."""
    return f"{operand.key}_tile", f"{operand.key}_full"


def accumulator(columns: int, itemsize: int = HALF) -> str:
    """The layout of a product's rows and columns over the threads of a group."""
    shape = f"instr_shape=[16, {columns}, {32 // itemsize}]"
    return f"gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], {shape})"
