"""What attention and its gradients on Hopper share: tiles of rows for groups of warps, and their copies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from math import gcd

import numpy as np

from fuseplan.backends.attending import Heads
from fuseplan.backends.triton.index import DOWN, Index, as_index, ceil_div, number, power_of_two, sliced
from fuseplan.backends.triton.shell import of_launch, programs_of
from fuseplan.backends.triton.templates.attention import GpuAttention
from fuseplan.backends.triton.templates.attention_scores import Scores
from fuseplan.backends.triton.templates.hopper_schedule import IMPORTS
from fuseplan.backends.triton.templates.hopper_tiles import ALIGNED, HALF, taken
from fuseplan.kernels.emit import TensorMap
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.target import Target
from fuseplan.kernels.template import Accuracy
from fuseplan.language.attend import AttendGradient
from fuseplan.language.dtypes import dtype_of
from fuseplan.messages.reasons import Claim, Reason, claim

OWN = 64  # rows of a group: the rows of one product
WARP = 32  # threads
LEAST = 16  # elements of a product's factor
# Of an exponential, for each byte beside a score: 3.5 to 5.9 on an H200, of masks and of biases in bf16.
BESIDE_A_BYTE = 3.5
BESIDE = ("bias", "mask", "lengths")  # of the scores
ROWS = ("key", "value", "grad")  # what attention calls tensors of rows besides src


def tensors(kernel: Kernel) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Extents and strides of what the copy engine moves: images, heads, rows, elements of a row."""
    found: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    for role, spec in (("src", kernel.src), ("dst", kernel.dst)):
        (b, d, h, s), (images, width, heads, rows) = spec.element_strides, spec.shape
        found[role] = (images, heads, rows, width), (b, h, s, d)
    beside = [each for each in kernel.operands if each.role in ROWS]
    found |= {each.role: (each.shape, each.strides) for each in beside}
    made = kernel.results if isinstance(kernel.centre, AttendGradient) else ()
    return found | {each.key: (each.shape, each.strides) for each in made}


def bytes_beside(kernel: Kernel) -> int:
    """Of the numbers that there are for each score: of biases and masks with both queries and keys."""
    made = kernel.attention
    axes = {"bias": made.bias_axes, "mask": made.mask_axes}
    return sum(dtype_of(each.dtype).itemsize for each in kernel.operands if "s" in axes.get(each.role, ""))


def padded(size: int) -> int:
    """Elements of a row in shared memory; zeros follow its own."""
    return power_of_two(max(size, LEAST))


def limits(
    plain: type[GpuAttention], roles: tuple[str, ...], kernel: Kernel, target: Target, accuracy: Accuracy
) -> Iterator[Claim]:
    """What both templates demand besides those for any GPU, which is `plain`; `roles` are what they read."""
    yield from plain.limits(kernel, target, accuracy)
    yield claim(target.name == "sm_90", Reason.NOT_HOPPER, got=str(target), want="sm_90")
    dtypes = dict.fromkeys((kernel.src.dtype, kernel.dst.dtype))
    is_half = len(dtypes) == 1 and kernel.src.dtype in ("f16", "bf16")
    yield claim(is_half, Reason.NOT_HALF, got=" to ".join(dtypes), operator=0)
    odd = next(_odd(kernel), None)
    yield claim(odd is None, Reason.COPY_ALIGNMENT, got=odd, want=f"multiples of {ALIGNED}", operator=0)
    others = [each for each in kernel.operands if each.role not in (*roles, *BESIDE, "cos", "sin")]
    found = [each.key for each in others if not each.is_channel]
    beside = next((each for each in (*found, *(index.key for index in kernel.indices))), None)
    yield claim(beside is None, Reason.BESIDE_KEYS, got=beside)
    rotary = kernel.attention.rotary
    yield claim(not rotary, Reason.TURNED_COPIES, got=f"rotary={rotary}", operator=0)
    saved = next(iter(kernel.saved), None)
    yield claim(saved is None, Reason.SAVED, operator=saved)


def _odd(kernel: Kernel) -> Iterator[str]:
    """Rows and strides that the copy engine does not take."""
    for name, ((*extents, width), (*strides, step)) in tensors(kernel).items():
        if width % ALIGNED or step != 1:
            yield f"rows of {width} elements {step} apart in {name}"
        for extent, stride in zip(extents, strides, strict=True):
            if extent > 1 and (stride % ALIGNED or not stride):
                yield f"a stride of {stride} in {name}"


class Lots:
    """The order of the tiles, which follows from a kernel and a choice.

    Attributes:
        rows: of a tile, queries or keys.
        size, features: elements of a row of keys and of values in shared memory.
        tiles: of a head.
        is_folded: whether a program has two tiles of a head in turn, which meet as many others together as
            any other two: where rows meet those up to their place, and programs go on to further tiles.
        lots: of a head, for programs to take: tiles, or pairs of them.
        is_turning: whether a program takes another lot of a head each time, since one of them is half of a
            pair, and the program's next place would be the same.
        is_rising: whether the first tile of a head is the longest.
        heads: those whose tiles follow one another by length: the longest first, for the shortest to fill up
            the processors at the end, and few enough for what they read to stay in the L2.
    """

    def __init__(self, kernel: Kernel, groups: int, keys: int, is_persistent: bool, target: Target) -> None:
        self.made, self.meeting, self.groups, self.keys = kernel.attention, Heads.of(kernel, 0), groups, keys
        self.is_persistent = is_persistent
        made, meeting = self.made, self.meeting
        self.rows, self.size, self.features = OWN * groups, padded(made.size), padded(made.features)
        self.tiles = ceil_div(meeting.rows, self.rows)
        self.is_rising = meeting.by == "key"
        self.is_folded = is_persistent and made.is_causal and self.tiles > 1
        self.lots = ceil_div(self.tiles, 2) if self.is_folded else self.tiles
        self.processors = target.processors
        self.is_turning = self.is_folded and self.tiles % 2 == 1 and self.processors % self.lots == 0
        self.heads = 1
        if made.is_causal and not is_persistent:
            each = meeting.others * meeting.through * (made.size + made.features) * HALF
            many = max(1, target.l2_bytes // 2 // each) * (1 if self.is_rising else made.group)
            self.heads = gcd(meeting.per_image, 1 << (many.bit_length() - 1))

    def met(self, first: int, count: int) -> tuple[int, int]:
        """The first of the others that some of `count` rows may meet, and the one past the last."""
        place, meeting = first + self.meeting.offset, self.meeting
        low = max(0, place - meeting.back + 1) if meeting.back else 0
        high = min(meeting.others, place + count - 1 + meeting.front) if meeting.front else meeting.others
        return low, max(low, high)

    def seconds(self, block: float, beside: float) -> float:
        """The time of all tiles, by that of a block and that of a tile besides its blocks."""
        spans = [self.met(tile * self.rows, self.rows) for tile in range(self.tiles)]
        steps = [self.meeting.through * max(1, ceil_div(end - begin, self.keys)) for begin, end in spans]
        tiles, heads = np.array(steps) * block + beside, self.meeting.groups
        if not self.is_persistent:
            # The last tiles fill up the processors, but for half of one.
            filled = heads * tiles.sum() / self.processors + tiles.mean() / 2
            return float(max(tiles.max(), filled))
        lots = (tiles + tiles[::-1])[: self.lots] if self.is_folded else tiles
        if self.is_folded and self.tiles % 2:
            lots[-1] /= 2
        places = np.arange(ceil_div(heads * self.lots, self.processors) * self.processors)
        turned = places // self.processors * self.is_turning
        taken = np.where(places < heads * self.lots, lots[(places + turned) % self.lots], 0)
        return float(taken.reshape(-1, self.processors).sum(axis=0).max())

    @property
    def is_idle(self) -> bool:
        """Whether a group multiplies others that none of its rows meets, as the kernel's text shows.

        ptxas drops such products, which cannot be told from those that it drops in error.
        """
        firsts = [range(group * OWN, self.tiles * self.rows, self.rows) for group in range(self.groups)]
        spans = [[self.met(first, OWN) for first in each] for each in firsts]
        if self.tiles > 1:
            return not all(any(low < high for low, high in each) for each in spans)
        begin, end = self.met(0, self.rows)
        blocks = range(begin // self.keys * self.keys, end, self.keys)
        return any(high <= first or first + self.keys <= low for ((low, high),) in spans for first in blocks)


class HopperRows(Scores):
    """Writes parts of one kernel: what all of its warps agree on."""

    language, imports = "gluon", IMPORTS
    options = (("num_warps", 4),)

    def __init__(self, lots: Lots, kernel: Kernel, title: str) -> None:
        super().__init__(kernel, title, 0, lots.rows, lots.keys, "gl")
        self.lots, groups = lots, self.heads.groups
        self.total = of_launch(kernel, groups) * lots.lots
        most = lots.processors if lots.is_persistent else 0
        self.programs = programs_of(kernel, groups, 1, lots.lots, most)
        known = self.programs if isinstance(self.programs, int) else most
        self.grid: Index | int = known or self.total

    def vector(self, count: int, lacking: int, of: str = "score_layout") -> Index:
        return sliced(count, lacking, of)

    def mapped(self, role: str, rows: int) -> TensorMap:
        """A tensor in boxes of rows of one head."""
        shape, strides = tensors(self.kernel)[role]
        steps = (*map(taken, shape[:3], strides, shape[3:] * 3), 1)
        box = (1, 1, rows, padded(shape[3]))
        opened = shape[0] // self.kernel.images if self.is_open else 0
        return TensorMap(self.kernel.src.dtype, shape, steps, box, (1,) * 4, opened)

    @contextmanager
    def each_tile(self) -> Iterator[None]:
        """Lines for each tile of a program, behind those that say where it lies and what it meets."""
        text, lots, made = self.text, self.lots, self.made
        if self.is_open:
            text.line("extent = extent.to(gl.int32)")
        with text.block(f"for place in range(gl.program_id(0), {self.total}, {self.grid})"):
            place = number("place", self.total)
            if not lots.is_folded:
                chunk = self.tiles * lots.heads
                tile = place % chunk // lots.heads
                tile = (self.tiles - 1) - tile if made.is_causal and not lots.is_rising else tile
                self._place(tile, place // chunk * lots.heads + place % lots.heads)
                yield
                return
            turned = place // lots.processors if lots.is_turning else 0
            short = text.index("short", (place + turned) % lots.lots)
            # The middle one of an odd number of tiles is in no pair.
            pair = f"gl.where({short} == {lots.lots - 1}, 1, 2)" if self.tiles % 2 else "2"
            with text.block(f"for turn in range(0, {pair})"):
                known = short.constant
                long = f"{self.tiles - 1} - {short.atom}" if known is None else str(self.tiles - 1 - known)
                both = long, str(short)
                first, second = both[::-1] if lots.is_rising else both
                tile = number(f"gl.where(turn == 0, {first}, {second})", self.tiles)
                self._place(tile, place // lots.lots)
                yield

    def _place(self, tile: Index, group: Index) -> None:
        """Where a tile lies, and what it meets: at least a block, if only of hidden scores."""
        text, keys, others = self.text, self.keys, self.heads.others
        self.head = self.place_tile(tile, group)
        self.image_keys, is_key = self.length(), self.heads.by == "key"
        self.limit = as_index(others) if is_key else self.image_keys
        low, high, begin, end = self.seen(self.limit)
        if is_key and self.made.is_padded:  # no query sees the keys behind the length
            high = Index(f"gl.where({self.rows_at(0)} < length, {high}, 0)", 0, high.high)
        low = self.least(low, as_index((others - 1) // keys * keys))
        self.low = text.index("low", low)
        self.high = text.index("high", self.most(high, self.low + 1))
        self.begin, self.end = text.index("begin", begin), text.index("end", end)

    def clear_layouts(self, roles: Iterable[str]) -> None:
        """Names the layouts that `clear` reads blocks in."""
        self.cleared = list(roles) if self.made.is_padded and self.heads.by != "key" else []
        for role in self.cleared:
            across = min(padded(self.beside[role].shape[-1]) // ALIGNED, WARP)
            layout = f"gl.BlockedLayout([1, {ALIGNED}], [{WARP // across}, {across}], [4, 1], [1, 0])"
            self.text.line(f"{role}_layout: gl.constexpr = {layout}")

    def clear(self, stage: str, start: Index) -> None:
        """Zeros in a block of keys from `start` on, behind the image's length: 0 times NaN is no 0."""
        if not self.cleared:
            return
        text, keys = self.text, self.keys
        with text.block(f"if {start + keys} > length"):
            for role in self.cleared:
                exists = (start + self.vector(keys, 1, f"{role}_layout") < self.limit).at(DOWN)
                shape = f"[{keys}, {padded(self.beside[role].shape[-1])}]"
                text.line(
                    f"block = {role}_ring.index({stage}).reshape({shape})",
                    f"block.store(gl.where({exists}, block.load({role}_layout), 0.0))",
                )
            text.line("fence_async_shared()", "gl.barrier()")

    def rows_at(self, team: Index | int) -> Index:
        """The first row of a group of warps."""
        return self.tile * self.rows + as_index(team) * OWN
