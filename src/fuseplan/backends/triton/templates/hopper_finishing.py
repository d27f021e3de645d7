"""Writes what a group of warps of the kernel for Hopper does with a sum: the stages after it, and dst."""

from __future__ import annotations

from math import prod

from fuseplan.backends.triton.elementwise import Elementwise, Known, Place, argument
from fuseplan.backends.triton.templates.hopper_schedule import PART_TILES, Schedule
from fuseplan.backends.triton.templates.hopper_tiles import HALF
from fuseplan.backends.triton.text import Text
from fuseplan.emit import Slot
from fuseplan.kernel import KernelOperand

STORED = {"f16": "gl.float16", "bf16": "gl.bfloat16"}
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

    def __init__(self, text: Text, schedule: Schedule) -> None:
        self.text, self.schedule = text, schedule
        self.knobs, self.kernel, self.geometry = schedule.knobs, schedule.kernel, schedule.geometry
        self.epilogue = Elementwise(self.kernel, "epilogue", text, namespace="gl")
        self.slots = self.epilogue.slots
        along, across = "[None, :]", "[:, None]"
        self._along, self._across = (across, along) if self.knobs.swapped else (along, across)
        # By the first feature of a part: the name of its features, and what depends on them alone.
        self._early: dict[str, tuple[str, Known]] = {}

    # ---- before the sum

    def begin(self) -> None:
        """What comes before the first tile; the program's features stay where tiles have but one block."""
        if self.schedule.copied:
            self.text.line("turn = 0")
        if self._is_early and self._stays:
            across = self.schedule.across
            at = f"gl.program_id(0) % {across} * {self.knobs.columns}" if across > 1 else "0"
            self.text.line(f"feature = {at}")
            self._prepare()

    def prepare(self) -> None:
        """What comes before the sum of a tile."""
        for operand in self.schedule.copied:
            self._bring(operand)
        if self._is_early and not self._stays:
            self._prepare()

    @property
    def _stays(self) -> bool:
        return self.knobs.resident or self.schedule.across == 1

    def _prepare(self) -> None:
        for part in self.schedule.parts:
            first = self._first_feature(part)
            if first not in self._early:
                column = self._column(part)
                known = self.epilogue.prepare(f"{column}{self._along}", self._channel_mask(column))
                self._early[first] = column, known

    def _first_feature(self, part: tuple[int, ...]) -> str:
        return self.schedule.at(part).split(", ")[-1]

    def _column(self, part: tuple[int, ...]) -> str:
        """Writes the vector of a part's features."""
        features = f"gl.arange(0, {self.schedule.part_columns}, layout=gl.SliceLayout({self._axis}, layout))"
        return self.text.let("column", f"{self._first_feature(part)} + {features}")

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
        values = sum(operand.per == "channel" for operand in self.epilogue.operands)
        each = rows // 32 if self.knobs.swapped else columns // 4
        return values > 1 and rows * columns // 128 + values * each <= HELD_REGISTERS[self.knobs.groups]

    def _bring(self, operand: KernelOperand) -> None:
        """Starts the copies of an operand's tile; they run while the group multiplies."""
        tile, full = brought(operand)
        schedule = self.schedule
        name = argument(Slot("operand", operand.key))
        self.text.line(f"mbarrier.expect({full}, {prod(schedule.sum_shape) * HALF})")
        for place, part in enumerate(schedule.parts):
            into = f"{tile}.index({place})"
            self.text.line(f"tma.async_load({name}, [{schedule.at(part)}], {full}, {into})")

    # ---- after it

    def finish(self) -> None:
        """The stages after the sum, a part at a time, each copied out when it is ready."""
        text, schedule = self.text, self.schedule
        for operand in schedule.copied:
            text.line(f"mbarrier.wait({brought(operand)[1]}, turn)")
        if schedule.copied:
            text.line("turn ^= 1")
        stored = STORED[self.kernel.dst.dtype]
        for place, (part, summed) in enumerate(zip(schedule.parts, self._split(), strict=True)):
            column, known = self._early.get(self._first_feature(part)) or (self._column(part), None)
            found = self._place(part, column)
            result = self.epilogue.apply(summed, found, self._read(place), known=known)
            text.line(
                f"tma.store_wait(pendings={PART_TILES - 1})",
                "gl.barrier()",
                f"{self._as_sum('c.index(slot)')}.store({result}.to({stored}))",
                "fence_async_shared()",
                f"tma.async_store(dst, [{schedule.at(part)}], c.index(slot))",
                "slot ^= 1",
            )

    def _as_sum(self, tile: str) -> str:
        """A part of dst in shared memory, as the products' rows and columns."""
        schedule = self.schedule
        matrix = f"{tile}.reshape([{prod(schedule.part)}, {schedule.part_columns}])"
        return f"{matrix}.permute((1, 0))" if self.knobs.swapped else matrix

    def _split(self) -> list[str]:
        """The parts of the sum, columns in order; every thread keeps what it has."""
        text, parts, width = self.text, ["total"], self.schedule.sum_shape[1]
        if width == self.schedule.part_width:
            return parts
        while width > self.schedule.part_width:
            width //= 2
            parts = [half for whole in parts for half in self._halves(whole, width)]
        return [text.let("part", f"gl.convert_layout({each}, layout, assert_trivial=True)") for each in parts]

    def _halves(self, whole: str, width: int) -> tuple[str, str]:
        left, right = self.text.name("half"), self.text.name("half")
        halved = f"{whole}.reshape([{self.schedule.sum_shape[0]}, 2, {width}]).permute((0, 2, 1)).split()"
        self.text.line(f"{left}, {right} = {halved}")
        return left, right

    def _read(self, place: int) -> dict[str, str]:
        """Names of the copied operands' parts, in registers."""
        found = {}
        for operand in self.schedule.copied:
            tile, _ = brought(operand)
            read = f"{self._as_sum(f'{tile}.index({place})')}.load(layout)"
            found[operand.key] = self.text.let(f"{operand.key}_read", read)
        return found

    def _channel_mask(self, column: str) -> str:
        features = self.geometry.features
        return f"({column} < {features}){self._along}" if features % self.knobs.columns else ""

    def _place(self, part: tuple[int, ...], column: str) -> Place:
        """How the elements of a part are indexed."""
        text, schedule = self.text, self.schedule
        channel, channel_mask = f"{column}{self._along}", self._channel_mask(column)
        if all(operand.per != "activation" for operand in self.epilogue.operands):
            return Place("", channel, "", "", channel_mask)
        text.line(
            f"row = gl.arange(0, {prod(schedule.part)}, layout=gl.SliceLayout({1 - self._axis}, layout))"
        )
        inside, mask = self._positions(schedule.at(part).split(", "))
        masks = " & ".join(filter(None, (f"({mask}){self._across}", channel_mask)))
        return Place("", channel, f"({inside}){self._across} + {channel}", masks, channel_mask)

    def _positions(self, first: list[str]) -> tuple[str, str]:
        """Offset of each row of a part within its image, and which rows there are."""
        text, geometry = self.text, self.geometry
        if geometry.is_flat:
            text.line(f"position = {first[0]} + row")
            pixels = prod(self.kernel.dst.spatial)
            return f"position % {pixels} * {geometry.features}", f"position < {geometry.axes[0].rows}"
        inside, masks, inner = [], [], prod(self.schedule.part)
        for axis, start, size in zip(geometry.axes, first, self.schedule.part, strict=False):
            inner //= size
            text.line(f"{axis.letter}_row = {start} + row // {inner} % {size}")
            masks.append(f"({axis.letter}_row < {axis.rows})")
            if axis.letter != "n":
                inside.append(f"{axis.letter}_row * {axis.dst_stride}")
        return " + ".join(inside), " & ".join(masks)


def brought(operand: KernelOperand) -> tuple[str, str]:
    """A copied operand's tile in shared memory, and its barrier."""
    return f"{operand.key}_tile", f"{operand.key}_full"


def accumulator(columns: int) -> str:
    """The layout of a product's rows and columns over the threads of a group."""
    return f"gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, {columns}, 16])"
