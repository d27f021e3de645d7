"""Every bound on text, files and answers that come from outside, in one table.

A reader takes its bound from here: `if len(text) > limits.LINE_BYTES`. A new bound is a new `Limit`, in the
part of the table that fits; the reference page lists it, and a test demands that a reader uses it.
"""

from __future__ import annotations

MIB = 1 << 20


class Limit(int):
    """A bound: a whole number that knows its meaning.

    Attributes:
        unit: of the number: `bytes`, `levels`, `s`.
        subject: the text, file or answer that is bounded.
        beyond: the effect on a larger one: refused, skipped, built again.
    """

    unit: str
    subject: str
    beyond: str

    def __new__(cls, value: int, unit: str, subject: str, beyond: str) -> Limit:
        made = super().__new__(cls, value)
        made.unit, made.subject, made.beyond = unit, subject, beyond
        return made


# The cache folder. Entries of the suites have up to 0.4 MB.
ENTRY_BYTES = Limit(
    256 * MIB, "bytes", "an entry of the cache", "neither read nor stored: the kernel is compiled"
)
LOCK_SECONDS = Limit(
    60, "s", "the wait for another process that compiles the same kernel", "this process compiles too"
)
MEASUREMENT_BYTES = Limit(MIB, "bytes", "a stored measurement of this machine", "measured again")

# Files of measured choices and of verdicts: one JSON object a line.
LINES_BYTES = Limit(64 * MIB, "bytes", "a file of measured choices, or of verdicts", "the file is refused")
LINE_BYTES = Limit(
    MIB, "bytes", "a line of such a file", "the line is refused; in a file of the cache folder it is skipped"
)
JSON_LEVELS = Limit(32, "levels", "nested objects and lists in such a line", "as above")

# Files that a command is given.
TOML_BYTES = Limit(4 * MIB, "bytes", "a suite, or a list of accepted spills", "refused")
SWEEP_BYTES = Limit(64 * MIB, "bytes", "a file of MIOpenDriver's lines", "refused")

WEIGHTS_BYTES = Limit(1024 * MIB, "bytes", "a file of weights for `fuseplan export`", "refused")
SAVED_BYTES = Limit(256 * MIB, "bytes", "a saved plan (`.fpk`)", "refused")

EXTENTS_KEPT = Limit(64, "extents", "extents of a bound plan's open axes", "the oldest one is prepared again")

# Programs that are waited for.
COMPILER_SECONDS = Limit(
    120,
    "s",
    "the compilation of one kernel for a GPU, unless the caller gives a limit",
    "the process is stopped: an error",
)
ASSEMBLER_SECONDS = Limit(300, "s", "one run of ptxas or nvdisasm", "the process is stopped: an error")
TOOL_SECONDS = Limit(
    20,
    "s",
    "one answer of nvidia-smi, git or `ptxas --version`",
    "the process is stopped; its answer is unknown",
)

# Plans and their texts.
TEXT_CHARACTERS = Limit(100_000, "characters", "a plan's text", "a PlanError")
# Models.
MODEL_BYTES = Limit(2048 * MIB, "bytes", "a file of an ONNX model, its external data not counted", "refused")
FOLDED_BYTES = Limit(
    64 * MIB, "bytes", "a value of a model that depends on constants alone", "it is computed at each run"
)
PROFILE_BYTES = Limit(1024 * MIB, "bytes", "ONNX Runtime's file of times", "refused")
REPORT_BYTES = Limit(64 * MIB, "bytes", "a report on a model", "refused")
SHAPE_ELEMENTS = Limit(
    1024, "elements", "a constant from which the shape of a result is inferred", "the shape is unknown"
)
SHAPES_KEPT = Limit(8, "shapes", "shapes of its inputs that a model is compiled for", "the oldest goes")
GRAPH_CHARACTERS = Limit(64 * MIB, "characters", "a graph's text", "a PlanError")
JSON_CHARACTERS = Limit(1_000_000, "characters", "a plan's JSON", "a PlanError")
OPERATOR_CHARACTERS = Limit(10_000, "characters", "the text of one operator or formula", "a PlanError")
OPERATORS = Limit(1_000, "operators", "a plan", "a PlanError")
EXPRESSION_NODES = Limit(
    10_000, "functions", "a formula; a shared part counts at each of its uses", "a PlanError"
)
EXPRESSION_DEPTH = Limit(200, "levels", "a formula", "a PlanError")
SIZE_DIGITS = Limit(40, "digits", "an extent or stride in a text", "a PlanError")

# Messages.
SHOWN_CHARACTERS = Limit(1_000, "characters", "a line of a message", "its middle is left out")
SHOWN_VALUE_CHARACTERS = Limit(100, "characters", "a caller's value in a message", "its middle is left out")

# A process.
THREADS = Limit(1024, "threads", "threads of a launch, by `threads=` or `FUSEPLAN_THREADS`", "refused")
KERNELS_KEPT = Limit(
    128, "kernels", "compiled kernels in memory that no compiled plan holds", "the one used longest ago goes"
)
SPARE_MAPS = Limit(
    1024, "maps", "memory maps of the process that loading kernels leaves free", "no further kernel is loaded"
)


def limits() -> dict[str, Limit]:
    """Every bound by its name, in the order of the table."""
    return {name: value for name, value in globals().items() if isinstance(value, Limit)}
