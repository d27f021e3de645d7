"""Writes the text of the depthwise kernel: a tile of outputs along w and of features, some rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from fuseplan.backends.triton.elementwise import Elementwise, Known, Place, argument
from fuseplan.backends.triton.text import Text
from fuseplan.emit import Slot, Source
from fuseplan.kernel import Kernel

WIDE = 2**31  # elements: from here on offsets need 64 bits
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


class DepthwiseWriter:
    """Writes one kernel."""

    def __init__(self, knobs: DepthwiseKnobs, kernel: Kernel, title: str) -> None:
        self.knobs, self.kernel, self.title = knobs, kernel, title
        contraction = kernel.contraction
        self.last = kernel.dst.is_channels_last
        self.kernel_size = _three(contraction.kernel, 1)
        self.stride, self.dilation = _three(contraction.stride, 1), _three(contraction.dilation, 1)
        self.low = _three(tuple(low for low, _ in contraction.padding), 0)
        self.src_size, self.dst_size = _three(kernel.src.spatial, 1), _three(kernel.dst.spatial, 1)
        self.src_steps = _three(kernel.src.element_strides[2:], 0)
        self.dst_steps = _three(kernel.dst.element_strides[2:], 0)
        self.compute = f"tl.{'float64' if kernel.compute_dtype == 'f64' else 'float32'}"
        self.text = Text()
        self.prologue = Elementwise(kernel, "prologue", self.text)
        self.epilogue = Elementwise(kernel, "epilogue", self.text)

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The kernel's arguments."""
        weight = Slot("operand", self.kernel.weight.key)
        return (Slot("src"), weight, *self.prologue.slots, *self.epilogue.slots, Slot("dst"))

    @property
    def blocks(self) -> tuple[int, int, int, int]:
        """How many blocks of features, columns and rows, and planes (images times depths), there are."""
        knobs, contraction = self.knobs, self.kernel.contraction
        depth, height, width = self.dst_size
        threads = -(-width // knobs.span) * (contraction.features if self.last else 1)
        return (
            1 if self.last else -(-contraction.features // knobs.features),
            -(-threads // knobs.columns),
            -(-height // knobs.rows),
            contraction.batch * depth,
        )

    @property
    def programs(self) -> int:
        """All of them."""
        return prod(self.blocks)

    def source(self) -> Source:
        """The whole kernel."""
        text = self.text
        text.line("import triton", "import triton.language as tl", "", "")
        text.line(*(f"# {line}" for line in [self.title, *self.kernel.text.splitlines()]))
        text.line("@triton.jit")
        with text.block(f"def fused({', '.join(argument(slot) for slot in self.slots)})"):
            self._indices()
            self._offsets()
            self._rows()
        return Source(
            str(text),
            "fused",
            self.slots,
            language="triton",
            grid=(self.programs, 1, 1),
            options=(("num_warps", self.knobs.warps), ("num_stages", 1)),
        )

    # ---- where the tile lies

    def _indices(self) -> None:
        """Which elements of dst the program makes."""
        text, knobs, contraction = self.text, self.knobs, self.kernel.contraction
        features, columns, rows, _ = self.blocks
        per = contraction.features_per_group
        text.line(
            "program = tl.program_id(0)",
            f"feature_block = program % {features}",
            f"column_block = program // {features} % {columns}",
            f"row_block = program // {features * columns} % {rows}",
            f"plane = program // {features * columns * rows}",
            f"image = plane // {self.dst_size[0]}",
            f"depth = plane % {self.dst_size[0]}",
            f"place = column_block * {knobs.columns} + tl.arange(0, {knobs.columns})",
            f"row = row_block * {knobs.rows}",
        )
        if self.last:
            count = contraction.features
            text.line(f"feature = place % {count}", f"column = place // {count} * {knobs.span}")
        else:
            feature = f"feature_block * {knobs.features} + tl.arange(0, {knobs.features})"
            text.line(f"feature = {feature}", f"column = place * {knobs.span}")
        text.line(f"channel = feature // {per}" if per > 1 else "channel = feature")
        if max(self.kernel.src.span, self.kernel.dst.span) >= WIDE:
            text.line("# offsets of a tensor this large need 64 bits")
            wide = ("image", "depth", "row", "feature", "channel", "column")
            text.line(*(f"{name} = {name}.to(tl.int64)" for name in wide))

    def _offsets(self) -> None:
        """Where they lie, and the elements of src that they are made of."""
        text = self.text
        src, dst = self.kernel.src.element_strides, self.kernel.dst.element_strides
        steps = [step * stride for step, stride in zip(self.stride, self.src_steps, strict=True)]
        text.line(
            f"src_image = image * {src[0]}",
            f"dst_image = image * {dst[0]}",
            "# in 64 bits what lies beside an element is a constant away",
            f"src_first = src_image + {self._offset('channel', src[1], steps)}",
            f"dst_inside = {self._offset('feature', dst[1], self.dst_steps)}",
            "dst_first = dst_image + dst_inside",
        )
        text.line(f"features = {self._across_features('feature')}")
        if self._feature_ok:
            text.line(f"feature_ok = features < {self.kernel.contraction.features}")

    def _offset(self, channel: str, stride: int, steps: Sequence[int]) -> str:
        """Where the first element of each thread lies in its image."""
        depth, row, column = steps
        inner = f"{self._across_columns(f'(column * {column})')} + "
        inner += self._across_features(f"({channel} * {stride})")
        return f"(depth * {depth} + row * {row} + {inner}).to(tl.int64)"

    def _across_features(self, vector: str) -> str:
        """A vector over features as an axis of the tile, or over its elements."""
        return vector if self.last else f"{vector}[:, None]"

    def _across_columns(self, vector: str) -> str:
        return vector if self.last else f"{vector}[None, :]"

    @property
    def _feature_ok(self) -> str:
        """Which features of the tile exist; "" for all."""
        return "" if self.last or not self.kernel.contraction.features % self.knobs.features else "feature_ok"

    # ---- the sum

    def _rows(self) -> None:
        """Every src row that the output rows need is loaded once, and added to all of them."""
        knobs, (depths, height, width) = self.knobs, self.kernel_size
        known = self.epilogue.prepare("features", self._feature_ok)
        needs = self._needs()
        steps = list(product(range(depths), needs))
        coming = [self._load_row(*step) for step in steps[: knobs.ahead]]
        is_held = height * width * knobs.vector <= HELD_WEIGHTS
        held: dict[tuple[int, int], str] = {}
        sums: dict[tuple[int, int], str] = {}
        for at, (slice_, offset) in enumerate(steps):
            coming += [self._load_row(*step) for step in steps[at + knobs.ahead : at + knobs.ahead + 1]]
            if is_held and offset == min(needs):
                held = self._weights(slice_)
            self._add_row(slice_, coming.pop(0), needs[offset], held, sums)
            done = [place for place, tap in needs[offset] if tap == height - 1 and slice_ == depths - 1]
            for place, column in product(done, range(knobs.span)):
                self._store(place, column, sums.pop((place, column)), known)

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
        start = tap * self.kernel.contraction.features
        guard = ", mask=feature_ok, other=0.0" if self._feature_ok else ""
        return self.text.let("weight", f"tl.load({pointer} + {start} + features{guard}).to({self.compute})")

    def _load_row(self, slice_: int, offset: int) -> list[_Loaded]:
        """Begins to load what the tile's outputs need of a row of src, each element once."""
        text, (depth, height, width) = self.text, self.src_steps
        plane, line = slice_ * self.dilation[0] - self.low[0], offset - self.low[1]
        outside = [
            *self._inside(0, f"depth * {self.stride[0]} + {plane}", plane),
            *self._inside(1, f"row * {self.stride[1]} + {line}", line),
        ]
        found = []
        for at in self.reads:
            column = at - self.low[2]
            inside = self._inside(2, f"column * {self.stride[2]} + {column}", column)
            terms = outside + [self._across_columns(f"({each})") for each in inside]
            ok = self._mask(terms)
            element = text.let("where", f"src_first + {plane * depth + line * height + column * width}")
            guard = f", mask={ok}, other=0.0" if ok else ""
            found.append(_Loaded(at, text.let("x", f"tl.load(src + {element}{guard})"), element, ok))
        return found

    def _inside(self, axis: int, at: str, offset: int) -> list[str]:
        """That a coordinate of src exists: what of it the grid does not see to.

        Args:
            axis: of d, h, w.
            at: the coordinate, in the text.
            offset: what it is where the first output's is zero.
        """
        last = (self.dst_size[0] - 1, (self.blocks[2] - 1) * self.knobs.rows, self._last_column)[axis]
        low = [f"({at} >= 0)"] if offset < 0 else []
        leaves = last * self.stride[axis] + offset >= self.src_size[axis]
        return low + [f"({at} < {self.src_size[axis]})"] * leaves

    @property
    def _last_column(self) -> int:
        """The first output position of the last thread along w."""
        place = self.blocks[1] * self.knobs.columns - 1
        return (place // self.kernel.contraction.features if self.last else place) * self.knobs.span

    def _mask(self, terms: list[str]) -> str:
        """The name of a mask; "" where all elements exist."""
        terms = terms + [self._feature_ok] * bool(self._feature_ok)
        return self.text.let("ok", " & ".join(terms)) if terms else ""

    @property
    def reads(self) -> list[int]:
        """Columns of src, from the first one's, that a thread's outputs read."""
        step, dilation = self.stride[2], self.dilation[2]
        taps = product(range(self.knobs.span), range(self.kernel_size[2]))
        return sorted({place * step + tap * dilation for place, tap in taps})

    def _add_row(
        self,
        slice_: int,
        row: list[_Loaded],
        users: list[tuple[int, int]],
        held: dict[tuple[int, int], str],
        sums: dict[tuple[int, int], str],
    ) -> None:
        """Adds a row of src, times its weights, to the sums of the outputs that read it."""
        text, step, dilation = self.text, self.stride[2], self.dilation[2]
        for loaded in row:
            x = self._prepared(loaded)
            for (place, tap), column in product(users, range(self.knobs.span)):
                shift, rest = divmod(loaded.column - column * step, dilation)
                if rest or not 0 <= shift < self.kernel_size[2]:
                    continue
                weight = held.get((tap, shift)) or self._weight(slice_, tap, shift)
                before = f"{sums[place, column]} + " if (place, column) in sums else ""
                sums[place, column] = text.let("sum", f"{before}{x} * {weight}")

    def _prepared(self, loaded: _Loaded) -> str:
        """The prologue's result; padding is zero after it, whatever it makes of zero."""
        x = self.text.let("x", f"{loaded.name}.to({self.compute})")
        if not self.kernel.prologue:
            return x
        inside = self.text.let("inside", f"{loaded.element} - src_image")
        channel = self._across_features("channel")
        place = Place(loaded.element, channel, inside, loaded.mask, self._feature_ok)
        made = self.prologue.apply(x, place)
        return self.text.let("x", f"tl.where({loaded.mask}, {made}, 0.0)") if loaded.mask else made

    def _store(self, place: int, column: int, total: str, known: Known) -> None:
        text, knobs, (_, height, width) = self.text, self.knobs, self.dst_steps
        terms = [f"(row + {place} < {self.dst_size[1]})"] * (self.dst_size[1] % knobs.rows > 0)
        if self._last_column + knobs.span > self.dst_size[2]:
            terms.append(self._across_columns(f"(column + {column} < {self.dst_size[2]})"))
        ok = self._mask(terms)
        beside = place * height + column * width
        inside = text.let("inside", f"dst_inside + {beside}")
        element = text.let("element", f"dst_first + {beside}")
        found = Place(element, "features", inside, ok, self._feature_ok)
        result = self.epilogue.apply(total, found, known=known)
        guard = f", mask={ok}" if ok else ""
        text.line(f"tl.store(dst + {element}, {result}.to(tl.{_STORED[self.kernel.dst.dtype]}){guard})")


@dataclass(frozen=True)
class _Loaded:
    """A column of src: where it lies from the first, and the names of its elements, offsets and mask."""

    column: int
    name: str
    element: str
    mask: str


_STORED = {"f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16"}
