"""The parts of a kernel's text around its body: imports, a header that says what is computed, the entry."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import sqrt

from fuseplan.backends.triton.elementwise import argument
from fuseplan.backends.triton.index import EXTENT, Index, as_index, ceil_div
from fuseplan.backends.triton.storage import converted_by
from fuseplan.backends.triton.text import Text
from fuseplan.kernels.centre import Reduction, Summary, Unary
from fuseplan.kernels.contraction import Contraction
from fuseplan.kernels.emit import Programs, Slot, Source
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.target import Target
from fuseplan.language.attend import Attend, AttendGradient
from fuseplan.language.tensor import TensorSpec
from fuseplan.plans.naming import as_rows

IMPORTS = ("import triton", "import triton.language as tl")


class Writer(ABC):
    """Writes one kernel: a template's writer has the lines of the body, and says how it is launched.

    Attributes:
        title: the template's text.
        text: takes the body; functions of its own stand in front of the entry.
        is_open: whether a launch says the extent of an axis.
        entry: the name of the kernel.
        language: `triton` or `gluon`.
        imports: the first lines.
        tensors: the arguments, but for the workspace and the extent of open axes.
        programs: of a launch; with an open extent, how they follow from it.
        options: what the toolchain is told.
        workspace_bytes: of a launch; 0 where it has no workspace.
        workspace_bytes_per_extent: more of them for each element along open axes.
        parts: programs along the grid's second axis.
    """

    entry = "fused"
    language = "triton"
    imports: Sequence[str] = IMPORTS
    tensors: tuple[Slot, ...]
    programs: int | Programs
    options: tuple[tuple[str, int], ...]
    workspace_bytes = workspace_bytes_per_extent = 0
    parts = 1

    def __init__(self, kernel: Kernel, title: str) -> None:
        self.kernel, self.title, self.text = kernel, title, Text()
        self.is_open = kernel.open_axis is not None

    @abstractmethod
    def write_body(self) -> None:
        """Writes the lines of the entry."""

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The kernel's arguments."""
        more = {"workspace": self.workspace_bytes, "extent": self.is_open}
        return (*self.tensors, *(Slot(kind) for kind, is_there in more.items() if is_there))

    @property
    def arguments(self) -> list[str]:
        """The names of the slots."""
        return [argument(slot) for slot in self.slots]

    def source(self, target: Target) -> Source:
        """The whole kernel, for a kind of GPU."""
        self.text.converts = converted_by(target)
        with self.text.function(f"{self.entry}({', '.join(self.arguments)})"):
            self.write_body()
        programs = self.programs
        lines = [*(f"# {line}" for line in header(self.kernel, self.title)), "", *self.imports]
        for function in self.text.functions:
            lines += ["", "", f"@{self.language}.jit", *function]
        return Source(
            "\n".join(lines) + "\n",
            self.entry,
            self.slots,
            workspace_bytes=self.workspace_bytes,
            workspace_bytes_per_extent=self.workspace_bytes_per_extent,
            language=self.language,
            grid=(programs if isinstance(programs, int) else 1, self.parts, 1),
            options=self.options,
            programs=programs if isinstance(programs, Programs) else None,
        )


@contextmanager
def last_to_arrive(text: Text, counter: object, count: int) -> Iterator[None]:
    """Lines of the last of `count` programs: all have written then; the counter is left zero."""
    text.line("tl.debug_barrier()", f"arrived = tl.atomic_add({counter}, 1, sem='acq_rel', scope='gpu')")
    with text.block(f"if arrived == {count - 1}"):
        text.line("tl.debug_barrier()", f"tl.store({counter}, 0)")
        yield


def of_launch(kernel: Kernel, count: int) -> Index:
    """A count in the text: where an axis is open, as many for each element along it as the number has."""
    return EXTENT * (count // kernel.images) if kernel.open_axis is not None else as_index(count)


def programs_of(kernel: Kernel, count: int, tile: int, across: int = 1, most: int = 0) -> int | Programs:
    """Programs of a launch, `across` for each tile of what is counted; at most `most`, 0: any number."""
    if kernel.open_axis is not None:
        return Programs(count // kernel.images, tile, across, most)
    programs = across * ceil_div(count, tile)
    return min(programs, most or programs)


def header(kernel: Kernel, title: str) -> Iterator[str]:
    """The plan, the choice, and the formulas and tensors by the names that they have in the plan."""
    centre, told, src = kernel.centre, kernel.text.splitlines(), kernel.src
    middle, reads_rows = [], isinstance(centre, Reduction) and centre.per == "row"
    if isinstance(centre, Contraction | Summary):
        middle, reads_rows = [contraction(kernel)], _is_matmul(kernel)
        conv = kernel.contraction
        told = [line for line in told if conv.pool or line != conv.text]
    elif isinstance(centre, Attend | AttendGradient):
        middle, reads_rows = [attention(kernel)], True
    elif isinstance(centre, Unary):
        middle = [centre.text]
    elif centre is None:  # parts of the last axis, unless the operator names another
        parted = [stage.op_text for stage in (*kernel.prologue, *kernel.epilogue) if stage.reads_parts]
        reads_rows = bool(parted) and "axis=" not in parted[0]
    roles = (kernel.prologue, (*kernel.between, *kernel.epilogue))
    before, behind = ([stage.op_text for stage in stages] for stages in roles)
    src = _as_matrix(kernel, as_rows(src) if reads_rows else src)
    yield " -> ".join([kernel.told(src), *before, *middle, *behind])
    yield title
    yield from told


def _as_matrix(kernel: Kernel, src: TensorSpec) -> TensorSpec:
    """src as a plan has it: the rows of a matrix are channels, or positions, of one image of the kernel."""
    tensors = {each.shape for each in kernel.operands} | {each.shape for each in kernel.outputs}
    is_matrix = src.rank == 3 and src.shape[0] == 1 and src.shape[1:] in tensors
    if not is_matrix or kernel.open_axis is not None:
        return src
    return TensorSpec(src.shape[1:], src.dtype, strides=src.element_strides[1:])


def attention(kernel: Kernel) -> str:
    """Attention, or a gradient of it, as a plan writes it."""
    made, centre = kernel.attention, kernel.centre
    by = centre.by if isinstance(centre, AttendGradient) else ""
    fields = (
        ("is_causal", made.is_causal, False),
        ("keys", made.keys, made.queries),
        ("key_heads", made.key_heads, made.heads),
        ("features", made.features, made.size),
        ("scale", made.scale, 1 / sqrt(made.size)),
        ("offset", made.offset, 0),
        ("window", made.window, 0),
        ("softcap", made.softcap, 0.0),
        ("bias_axes", made.bias_axes, ""),
        ("mask_axes", made.mask_axes, ""),
        ("is_padded", made.is_padded, False),
        ("return_lse", bool(kernel.results) and not by, False),
        ("nan_unseen", made.nan_unseen, False),
        ("score", repr(made.formula), repr("")),
        ("rotary", made.rotary, 0),
        ("interleaved", made.interleaved, False),
        ("by", by, by and "query"),
    )
    told = ", ".join(f"{name}={value}" for name, value, usual in fields if value != usual)
    return f"attention{by and '_gradient'}({told})"


def contraction(kernel: Kernel) -> str:
    """The contraction as a plan writes it."""
    conv = kernel.contraction
    if conv.written:
        return conv.written
    if _is_matmul(kernel):
        is_transposed = kernel.weight.axes[-2] < kernel.weight.axes[-1]
        name, words = "matmul", {"batched=True": conv.weight_per_batch, "transposed=True": is_transposed}
    else:
        name, words = f"{_word(conv)}{len(conv.kernel)}d", {f"kernel={_sizes(conv.kernel)}": True}
        words[f"stride={_sizes(conv.stride)}"] = any(step != 1 for step in conv.stride)
        words[f"padding={_sizes(conv.padding)}"] = any(map(any, conv.padding))
        words[f"dilation={_sizes(conv.dilation)}"] = any(step != 1 for step in conv.dilation)
        words[f"groups={conv.groups}"] = conv.groups > 1 and conv.pool is None
    words[f"precision={conv.precision}"] = conv.precision != "full"
    features = [] if conv.pool else [str(conv.features)]
    return f"{name}({', '.join([*features, *(word for word, said in words.items() if said)])})"


def _word(conv: Contraction) -> str:
    """The operator's name in front of its number of axes."""
    if conv.pool is None:
        return "conv"
    return "avg_pool" if conv.pool.counted else "max_pool"


def _is_matmul(kernel: Kernel) -> bool:
    """Whether there is a weight that has no axes for taps."""
    conv = kernel.contraction
    return conv.pool is None and len(kernel.weight.axes) - conv.weight_per_batch == 2


def _sizes(sizes: Sequence[int | tuple[int, int]]) -> str:
    """One number where all axes have it on both sides, else all of them."""
    pairs = [size for size in sizes if isinstance(size, tuple)]
    flat = [low for low, _ in pairs] if pairs and all(low == high for low, high in pairs) else list(sizes)
    return str(flat[0] if len(set(flat)) == 1 and isinstance(flat[0], int) else tuple(flat))
