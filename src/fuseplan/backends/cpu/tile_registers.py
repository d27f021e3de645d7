"""Products by tiles: AMX's eight registers of 16 rows of 64 bytes, each a small matrix.

A product adds rows of src times a tile of the weight to a tile of sums. Factors are bf16 with sums in f32, or
i8 with sums of 32 bits. In the weight, as many channels of a feature lie side by side as fill 4 bytes.
Denormal numbers of bf16, and sums that would be denormal, are taken for 0; sums are rounded to nearest even.
(Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fuseplan.backends.cpu.ir import Builder, Index, Value
from fuseplan.backends.cpu.loops import LINE_BYTES
from fuseplan.kernels.kernel import Kernel
from fuseplan.language.bounds import EXACT_IN_I32

ROWS, ROW_BYTES = 16, 64
TILE_BYTES = ROWS * ROW_BYTES
LANES = 16  # sums of 4 bytes in a row
_SUMS, _SRC, _WEIGHT = 0, 4, 6  # the first of four registers, and of two each
_CONFIGURATION = "@tile_extents"


@dataclass(frozen=True)
class Factors:
    """What is multiplied.

    Attributes:
        word: of the instruction.
        sums: LLVM's type of a sum.
        channels: of a row of a tile.
        products: the parts of src and of the weight that are multiplied, one pair after another.
    """

    word: str
    sums: str
    channels: int
    products: tuple[tuple[int, int], ...] = ((0, 0),)

    @property
    def parts(self) -> int:
        """Numbers whose sum a factor is."""
        return 1 + max(max(pair) for pair in self.products)


# Of three parts of f32, the products that a rounding of f32 does not hide. Neighbours share a part.
_OF_PARTS = ((0, 2), (0, 1), (1, 1), (1, 0), (0, 0), (2, 0))
FACTORS = {
    "bf16": Factors("tdpbf16ps", "float", 32),
    "i8": Factors("tdpbssd", "i32", 64),
    "f32": Factors("tdpbf16ps", "float", 32, _OF_PARTS),
}
FEATURES = {"bf16": "+amx-bf16", "i8": "+amx-int8", "f32": "+amx-bf16"}  # LLVM's, of a processor


def factors_of(kernel: Kernel) -> Factors | None:
    """What the kernel multiplies by tiles; None where it is another dtype, or sums of i8 exceed 32 bits."""
    dtype = kernel.src.dtype
    is_plain = kernel.weight.dtype == dtype and not kernel.contraction.factor
    is_plain &= dtype == "i8" or kernel.compute_dtype == "f32"
    return FACTORS.get(dtype) if is_plain and kernel.largest_sum < EXACT_IN_I32 else None


class Tiles:
    """The registers, for blocks of two by two tiles of sums, or of one by two.

    Args:
        rows: of src that a tile holds, at most 16.
    """

    def __init__(self, b: Builder, factors: Factors, rows: int = ROWS) -> None:
        self.b, self.factors = b, factors
        self._rows = rows

    def begin(self) -> None:
        """Gives the registers their extents; a thread's tiles are zero then."""
        heights = [self._rows] * _WEIGHT + [ROWS] * 2
        widths = [part for _ in heights for part in (ROW_BYTES, 0)]
        told = [1, *[0] * 15, *widths, *[0] * 16, *heights, *[0] * 8]
        content = "".join(f"\\{byte:02X}" for byte in told)
        constant = f'{_CONFIGURATION} = internal constant [{len(told)} x i8] c"{content}", align 64'
        self.b.module.declarations.add(constant)
        self._call("ldtilecfg", f"ptr {_CONFIGURATION}")

    def end(self) -> None:
        """Gives the registers back: a thread that holds tiles costs more where it is interrupted."""
        self._call("tilerelease")

    def zero(self, rows: int) -> None:
        """Zeros in the sums of `rows` tiles by two."""
        for number in range(2 * rows):
            self._call("tilezero", f"i8 {_SUMS + number}")

    def load(self, rows: int, pointer: Value, pitch: int) -> None:
        """Reads sums, whose rows lie `pitch` bytes apart."""
        self._move("tileloadd64", rows, pointer, pitch)

    def store(self, rows: int, pointer: Value, pitch: int) -> None:
        """Writes the sums."""
        self._move("tilestored64", rows, pointer, pitch)

    def add(
        self,
        rows: int,
        src: Value,
        weight: Value,
        steps: int,
        ahead: Value,
        lines: int,
        beside: Callable[[Index], None] = lambda _: None,
    ) -> None:
        """Adds the products of so many steps; of each part, src and the weight have two tiles, side by side.

        Every step brings so many lines from `ahead` on into the second cache. Without them, a product of
        512x1024 by 1024 took 1.2 times as long on a Xeon with AMX. They stand between the products: side by
        side they wait for one another, and the tiles behind them. `beside(step)` writes more of a step's
        code: a step multiplies for hundreds of cycles, in which vectors have nothing else to do.
        """
        b, products = self.b, 2 * rows
        all_products = [(pair, number) for pair in self.factors.products for number in range(products)]
        count = len(all_products)
        with b.loop(0, steps, name="k") as step:
            for at, (pair, number) in enumerate(all_products):
                held = all_products[at - products][0] if at >= products else (None, None)
                self._multiply(src, weight, step, number, pair, held)
                for line in range(at * lines // count, (at + 1) * lines // count):
                    b.prefetch(b.at(ahead, (step * lines + line) * LINE_BYTES, "i8"))
            beside(step)

    def _multiply(
        self,
        src: Value,
        weight: Value,
        step: Index,
        number: int,
        pair: tuple[int, int],
        held: tuple[int, int] | tuple[None, None],
    ) -> None:
        """Adds the products of two tiles of a step, of a part of src and a part of the weight.

        A product begins as soon as its two tiles are there, and the loads of the next go on beside it. Parts
        that the registers hold are not read again.
        """
        row, column = divmod(number, 2)
        begins = [(step * self.factors.parts + part) * (2 * TILE_BYTES) for part in pair]
        if row == 0 and pair[1] != held[1]:
            self._read(_WEIGHT + column, weight, begins[1] + column * TILE_BYTES)
        if column == 0 and pair[0] != held[0]:
            self._read(_SRC + row, src, begins[0] + row * TILE_BYTES)
        numbers = (_SUMS + number, _SRC + row, _WEIGHT + column)
        self._call(self.factors.word, *(f"i8 {each}" for each in numbers))

    def _read(self, number: int, pointer: Value, at: Index) -> None:
        place = self.b.at(pointer, at, "i8")
        self._call("tileloadd64", f"i8 {number}", f"ptr {place.name}", f"i64 {ROW_BYTES}")

    def _move(self, word: str, rows: int, pointer: Value, pitch: int) -> None:
        for number in range(2 * rows):
            row, column = divmod(number, 2)
            place = self.b.at(pointer, row * ROWS * pitch + column * ROW_BYTES, "i8")
            self._call(word, f"i8 {_SUMS + number}", f"ptr {place.name}", f"i64 {pitch}")

    def _call(self, word: str, *arguments: str) -> None:
        name = f"llvm.x86.{word}"
        kinds = ", ".join(each.split()[0] for each in arguments)
        self.b.module.declarations.add(f"declare void @{name}({kinds})")
        self.b.line(f"call void @{name}({', '.join(arguments)})")
