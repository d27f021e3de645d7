"""Writes the text of the depthwise kernel: a tile of output positions along w times features, some rows."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from fuseplan.backends.triton.elementwise import Elementwise, Place, argument
from fuseplan.backends.triton.text import Text
from fuseplan.emit import Slot, Source
from fuseplan.kernel import Kernel

WIDE = 2**31  # elements: from here on offsets need 64 bits
HELD_TAPS = 9  # weights of so many taps are kept in registers; more are loaded where they are used


@dataclass(frozen=True)
class DepthwiseKnobs:
    """The fields of `GpuDepthwise`, which says what they mean."""

    columns: int
    features: int
    rows: int
    warps: int


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
        return (
            -(-contraction.features // knobs.features),
            -(-width // knobs.columns),
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
            f"feature = feature_block * {knobs.features} + tl.arange(0, {knobs.features})",
            f"channel = feature // {per}" if per > 1 else "channel = feature",
            f"column = column_block * {knobs.columns} + tl.arange(0, {knobs.columns})",
            f"row = row_block * {knobs.rows}",
            f"has_feature = feature < {contraction.features}",
            f"has_column = column < {self.dst_size[2]}",
        )
        if max(self.kernel.src.span, self.kernel.dst.span) >= WIDE:
            text.line("# offsets of a tensor this large need 64 bits")
            text.line(
                *(f"{name} = {name}.to(tl.int64)" for name in ("image", "feature", "channel", "column"))
            )
        text.line(
            f"src_image = image * {self.kernel.src.element_strides[0]}",
            f"dst_image = image * {self.kernel.dst.element_strides[0]}",
            f"src_channel = {self._across_features('channel')} * {self.kernel.src.element_strides[1]}",
            f"feature_ok = {self._across_features('has_feature')}",
        )

    def _across_features(self, vector: str) -> str:
        """A vector over features as the tile's axis; the innermost axis of dst is the tile's last."""
        return f"{vector}[None, :]" if self.last else f"{vector}[:, None]"

    def _across_columns(self, vector: str) -> str:
        return f"{vector}[:, None]" if self.last else f"{vector}[None, :]"

    @property
    def _shape(self) -> str:
        columns, features = self.knobs.columns, self.knobs.features
        return f"[{columns}, {features}]" if self.last else f"[{features}, {columns}]"

    # ---- the sum

    def _rows(self) -> None:
        """Every src row that the output rows need is loaded once a shift, and added to all of them."""
        text, knobs = self.text, self.knobs
        height, step, low = self.kernel_size[1], self.stride[1], self.low[1]
        for place in range(knobs.rows):
            text.line(f"result_{place} = tl.zeros({self._shape}, {self.compute})")
        needs: dict[int, list[tuple[int, int]]] = {}
        for place in range(knobs.rows):
            for tap in range(height):
                needs.setdefault(place * step + tap * self.dilation[1], []).append((place, tap))
        for slice_ in range(self.kernel_size[0]):
            self._depth(slice_)
            held = self._weights(slice_) if height * self.kernel_size[2] <= HELD_TAPS else {}
            for offset in sorted(needs):
                text.line(f"src_row = row * {step} + {offset - low}")
                text.line(f"row_ok = depth_ok & (src_row >= 0) & (src_row < {self.src_size[1]})")
                self._src_row(slice_, needs[offset], held)
        for place in range(knobs.rows):
            self._store(place)

    def _depth(self, slice_: int) -> None:
        offset = slice_ * self.dilation[0] - self.low[0]
        self.text.line(
            f"src_depth = depth * {self.stride[0]} + {offset}",
            f"depth_ok = (src_depth >= 0) & (src_depth < {self.src_size[0]})",
        )

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
        loaded = f"tl.load({pointer} + {start} + feature, mask=has_feature, other=0.0)"
        return self.text.let("weight", self._across_features(f"{loaded}.to({self.compute})"))

    def _src_row(self, slice_: int, users: list[tuple[int, int]], held: dict[tuple[int, int], str]) -> None:
        text = self.text
        depth, height, width = self.src_steps
        base = text.let("base", f"src_image + src_depth * {depth} + src_row * {height}")
        for shift in range(self.kernel_size[2]):
            offset = shift * self.dilation[2] - self.low[2]
            text.line(f"src_column = column * {self.stride[2]} + {offset}")
            inside = f"has_column & (src_column >= 0) & (src_column < {self.src_size[2]})"
            ok = text.let("ok", f"row_ok & {self._across_columns(f'({inside})')} & feature_ok")
            where = text.let(
                "where", f"{base} + {self._across_columns('src_column')} * {width} + src_channel"
            )
            x = text.let("x", f"tl.load(src + {where}, mask={ok}, other=0.0).to({self.compute})")
            x = self._prepared(x, where, ok)
            for place, tap in users:
                weight = held.get((tap, shift)) or self._weight(slice_, tap, shift)
                text.line(f"result_{place} += {x} * {weight}")

    def _prepared(self, x: str, where: str, ok: str) -> str:
        """The prologue's result; padding is zero after it, whatever it makes of zero."""
        if not self.kernel.prologue:
            return x
        inside = self.text.let("inside", f"{where} - src_image")
        place = Place(where, self._across_features("channel"), inside, ok, "feature_ok")
        return self.text.let("x", f"tl.where({ok}, {self.prologue.apply(x, place)}, 0.0)")

    def _store(self, place: int) -> None:
        text = self.text
        depth, height, width = self.dst_steps
        text.line(f"dst_row = row + {place}")
        ok = text.let(
            "ok", f"(dst_row < {self.dst_size[1]}) & {self._across_columns('has_column')} & feature_ok"
        )
        inside = text.let(
            "inside",
            f"depth * {depth} + dst_row * {height} + {self._across_columns('column')} * {width} + "
            f"{self._across_features('feature')} * {self.kernel.dst.element_strides[1]}",
        )
        element = text.let("element", f"dst_image + {inside}")
        found = Place(element, self._across_features("feature"), inside, ok, "feature_ok")
        result = self.epilogue.apply(f"result_{place}", found)
        text.line(f"tl.store(dst + {element}, {result}.to(tl.{_STORED[self.kernel.dst.dtype]}), mask={ok})")


_STORED = {"f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16"}
