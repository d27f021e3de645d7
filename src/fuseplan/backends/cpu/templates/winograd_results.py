"""The last part of `Winograd`: products become outputs, the tail is applied, dst is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from fuseplan.backends.cpu.elementwise import Elementwise, Place, finish
from fuseplan.backends.cpu.frame import Frame
from fuseplan.backends.cpu.gather import transposed
from fuseplan.backends.cpu.ir import Index, Value
from fuseplan.backends.cpu.ir_text import I1, I64, PTR
from fuseplan.backends.cpu.loops import pieces
from fuseplan.backends.cpu.math_format import bitwise
from fuseplan.backends.cpu.templates.winograd_grid import Corner, Grid, Image
from fuseplan.backends.cpu.transforms import columns_of, power_of_two

REPAIR = "direct_tile"


class Results:
    """Writes the dst transform of a block of tiles.

    Args:
        image: what tiles are read from, for those that must be computed again.
        products: where a thread's products are.
        strip: a thread's room for a run of outputs, where dst has its positions innermost.
    """

    def __init__(self, frame: Frame, grid: Grid, image: Image, products: Value, strip: Value) -> None:
        self.frame, self.b, self.grid, self.image = frame, frame.body, grid, image
        self.products, self.strip = products, strip
        self.lanes, self.features = grid.lanes, grid.conv.features
        self.tail = Elementwise(frame, "epilogue")
        self.weight = frame.pointer("operand", grid.kernel.weight.key)
        self.patch = self.b.buffer(grid.tile**2 * grid.lanes)
        if grid.dot is None:
            _write_repair(frame, grid, image)

    def emit(self, first: Value, last: Value, begin: Index, end: Index) -> None:
        """Runs first..last, features of the panels begin..end."""
        b, grid = self.b, self.grid
        start, stop = begin * grid.panel, b.smaller(end * grid.panel, self.features)
        with b.loop(first, last, name="run") as run:
            corner = grid.corner(run, first)
            at = b.at(self.products, (run - first) * (grid.run * grid.columns) - start)
            if grid.features_innermost:
                with b.loop(0, grid.run, name="tile") as tile:
                    products = b.at(at, tile * grid.columns)
                    self._vectors(start, stop, partial(self._tile, products, corner, tile))
            else:
                self._vectors(start, stop, partial(self._line, at, corner))

    def _vectors(self, start: Index, stop: Index, part: Callable[[Index, int], None]) -> None:
        """part(first feature, how many) for every vector of features."""
        pieces(self.b, self.features, self.lanes, part, name="feature", within=(start, stop))

    # ---- one tile of outputs

    def _outputs(self, at: Value) -> list[list[Value]]:
        """The dst transform: a tile of sums, lanes along features."""
        b, grid, matrix = self.b, self.grid, self.grid.transforms.dst
        between = []
        for j in range(grid.size):
            places = (b.at(at, (i * grid.size + j) * grid.products_plane) for i in range(grid.size))
            between.append(columns_of(matrix, [b.load(place, grid.sums) for place in places], grid.fma))
        made = [columns_of(matrix, [column[r] for column in between], grid.fma) for r in range(grid.tile)]
        return [[self._divided(value) for value in line] for line in made] if grid.dot else made

    def _divided(self, value: Value) -> Value:
        """A sum of integers, from the last 32 bits of a multiple of it.

        An odd divisor has an inverse among the numbers of 32 bits, so that what is left is a shift.
        """
        b, shift = self.b, power_of_two(self.grid.transforms.divisor)
        odd = self.grid.transforms.divisor >> shift
        value = value * pow(odd, -1, 1 << 32) if odd > 1 else value
        return b.convert("sitofp", bitwise(b, "ashr", value, shift), b.element)

    def _is_broken(self, outs: list[list[Value]]) -> Value:
        """Whether an output is infinite or NaN: so is their sum then, and the sum minus itself is NaN.

        A sum that overflows by itself costs time only.
        """
        b = self.b
        if self.grid.dot:
            return Value(b, I1, "false")
        sums = [value for line in outs for value in line]
        while len(sums) > 1:
            sums = [sums[i] + sums[i + 1] for i in range(0, len(sums), 2)]
        difference = sums[0] - sums[0]
        lanes = b.compare("uno", difference, difference)
        word = f"i{self.lanes}"
        mask = b.op(word, f"bitcast {lanes.type} {lanes.name} to {word}")
        return b.compare("ne", mask, 0)

    def _repair(self, into: Value, step: int, corner: Corner, x: Value, feature: Index) -> None:
        """Computes the tile again, by the definition, into lines of outputs `step` elements apart."""
        b = self.b
        numbers = (b.const(number, I64) for number in (corner.picture, corner.line, x, feature, step))
        plain = b.at(self.weight, self.grid.positions * self.grid.weight_plane)
        pointers = ", ".join(f"ptr {pointer.name}" for pointer in (self.image.start, plain, into))
        words = ", ".join(f"i64 {number.name}" for number in numbers)
        b.line(f"call void @{REPAIR}({pointers}, {words}) noinline cold")

    # ---- dst with features innermost

    def _tile(self, at: Value, corner: Corner, tile: Value, feature: Index, count: int) -> None:
        b, grid, pitch = self.b, self.grid, self.grid.kernel.pitch
        outs = self._outputs(b.at(at, feature))
        y, x = corner.y, corner.x + tile * grid.tile
        places = [[b.variable(b.vector, value) for value in line] for line in outs]
        with b.when(self._is_broken(outs)):
            self._repair(self.patch, grid.tile * self.lanes, corner, x, feature)
            for r, line in enumerate(places):
                for c, place in enumerate(line):
                    place.set(b.load(b.at(self.patch, (r * grid.tile + c) * self.lanes)))
        element = ((corner.image * grid.height + y) * grid.width + x) * pitch + feature
        known: dict[object, Value] = {}
        self.tail.prepare(Place(element, feature, True, count), known)
        for r, line in enumerate(places):
            for c, place in enumerate(line):
                with self._inside(r, c, y, x):
                    where = Place(element + (r * grid.width + c) * pitch, feature, True, count)
                    finish(self.frame, self.tail, place.get(), where, known)

    @contextmanager
    def _inside(self, r: int, c: int, y: Value, x: Value) -> Iterator[None]:
        """Runs its block where dst has the tile's output (r, c); asks only where tiles hang over the edge."""
        b, grid = self.b, self.grid
        with ExitStack() as tests:
            if 0 < grid.height % grid.tile <= r:
                tests.enter_context(b.when(b.compare("slt", y + r, grid.height)))
            if 0 < grid.width % grid.tile <= c:
                tests.enter_context(b.when(b.compare("slt", x + c, grid.width)))
            yield

    # ---- dst with positions innermost

    def _line(self, at: Value, corner: Corner, feature: Index, count: int) -> None:
        """A line of tiles: outputs go to the strip, lanes along features, then through transposes to dst."""
        b, grid = self.b, self.grid
        step = grid.run * grid.tile * self.lanes
        with b.loop(0, grid.run, name="tile") as tile:
            outs = self._outputs(b.at(at, tile * grid.columns + feature))
            into = b.at(self.strip, tile * (grid.tile * self.lanes))
            for r, line in enumerate(outs):
                for c, value in enumerate(line):
                    b.store(value, b.at(into, r * step + c * self.lanes))
            with b.when(self._is_broken(outs)):
                self._repair(into, step, corner, tile * grid.tile, feature)
        lines = b.smaller(corner.y + grid.tile, grid.height) - corner.y
        element = ((corner.image * self.features + feature) * grid.height + corner.y) * grid.width
        positions = min(self.lanes, grid.width)
        with b.loop(0, lines, name="line") as number, b.loop(0, grid.width, self.lanes, name="x") as start:
            # The last square starts early and writes some outputs twice.
            x = b.smaller(start, grid.width - positions)
            square = b.at(self.strip, number * step + x * self.lanes)
            self._square(square, element + number * grid.width + x, feature, count, positions)

    def _square(self, strip: Value, element: Value, feature: Index, count: int, positions: int) -> None:
        """`positions` outputs side by side of `count` features."""
        b, lanes, image = self.b, self.lanes, self.grid.height * self.grid.width
        rows = [b.load(b.at(strip, i * lanes)) for i in range(positions)]
        rows += [Value(b, b.vector, "poison")] * (lanes - positions)
        known: dict[object, Value] = {}
        for i, column in enumerate(transposed(b, rows)[:count]):
            place = Place(element + i * image, feature + i, False, positions)
            finish(self.frame, self.tail, column, place, known)


def _write_repair(frame: Frame, grid: Grid, image: Image) -> None:
    """A function that computes a tile, one vector of features, as direct convolution does.

    Winograd's transforms mix the pixels of a tile, so one infinity would make all its outputs NaN. Who has
    such data gets IEEE's answer, only slower. Products are summed in direct's order: taps, then channels.
    """
    numbers = [(I64, word) for word in ("picture", "y", "x", "feature", "step")]
    b = frame.builder(REPAIR, [(PTR, "image"), (PTR, "weight"), (PTR, "into"), *numbers])
    start, weight, into, picture, y, x, feature, step = b.parameters
    channels, width = grid.conv.channels, grid.panels * grid.panel
    padding = b.buffer(1)
    b.store(b.const(0.0, b.element), padding)
    total = b.variable(b.vector)
    with b.loop(0, grid.tile, name="r") as r, b.loop(0, grid.tile, name="c") as c:
        total.set(b.number(0.0))
        with b.loop(0, grid.taps, name="i") as i, b.loop(0, grid.taps, name="j") as j:
            row, column = y + r + i - image.low[0], x + c + j - image.low[1]
            pixel = b.at(start, picture * image.picture + row * image.line + column * channels)
            pixel = b.select(b.compare("ult", row, image.extents[0]), pixel, padding)
            pixel = b.select(b.compare("ult", column, image.extents[1]), pixel, padding)
            # Padding is multiplied too: zero times an infinite weight is NaN.
            stride = b.select(b.compare("eq", pixel, padding), b.const(0, I64), 1)
            taps = b.at(weight, (i * grid.taps + j) * (channels * width) + feature)
            with b.loop(0, channels, name="channel") as channel:
                value = b.broadcast(pixel, channel * stride)
                total.set(b.fma(value, b.load(b.at(taps, channel * width)), total.get()))
        b.store(total.get(), b.at(into, r * step + c * grid.lanes))
    b.finish()
