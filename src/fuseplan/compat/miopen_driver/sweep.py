"""The lines of a sweep: where they come from, and their words."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, product
from pathlib import Path

from fuseplan.compat.miopen_driver.letters import ACTIVATIONS, BATCH_NORM_MODES, DTYPES, MODES, PROBLEMS
from fuseplan.errors import ArgumentError, refusing
from fuseplan.system import limits
from fuseplan.system.reading import bytes_of, text_of

COMMANDS = ("driver", "run")  # whose options may stand before a line's problem


@dataclass(frozen=True)
class Line:
    """One of many lines; its place is the file and the line's number, or the combination's."""

    text: str
    place: str


def all_combinations() -> list[Line]:
    """A line for every combination."""
    return [Line(text, f"combination {number}") for number, text in enumerate(combinations(), 1)]


def lines_of(sweep: Path) -> list[Line]:
    """The lines of a file; empty lines and lines that begin with # are left out.

    Raises:
        ArgumentError: the file cannot be read, or holds none.
    """
    try:
        text = text_of(bytes_of(sweep, limits.SWEEP_BYTES))
    except (OSError, ValueError) as error:
        raise ArgumentError(f"--sweep {sweep} cannot be read: {error}; want lines of UTF-8 text") from None
    numbered = enumerate(map(str.strip, text.splitlines()), 1)
    lines = [Line(line, f"{sweep}, line {number}") for number, line in numbered if line and line[0] != "#"]
    if not lines:
        raise ArgumentError(f"--sweep {sweep} holds no line to run; want such as CBAInfer -F 4 -n 1")
    return lines


def words_of(line: Line) -> list[str]:
    """The line's problem and options, without the program's name or a log's words before them.

    Raises:
        ArgumentError: it names no problem.
    """
    with refusing("the line cannot be read", ValueError):
        words = shlex.split(line.text)
    # Problems first: in MIOpen's log a word in brackets, [LogCmdFusion], stands before the command.
    problems = [place for place, word in enumerate(words) if word in PROBLEMS]
    found = problems or [place for place, word in enumerate(words) if is_plan(word)]
    if not found:
        raise ArgumentError(
            f"the line names no problem; want {', '.join(PROBLEMS)}, or a plan's text in quotes"
        )
    if "->" in words:
        raise ArgumentError("a plan's text is one word: want it in quotes, such as 'f32[1x8] -> relu'")
    before = words[: found[0]]
    for place, word in enumerate(before):
        if word in COMMANDS:
            return words[place + 1 :]
    options = (place for place, word in enumerate(before) if word.startswith("-"))
    return words[next(options, found[0]) :]


def is_plan(word: str) -> bool:
    """Whether a word is a plan's text: each begins with a tensor's shape in brackets."""
    return "[" in word


NUMBERS = "-A 0.5 -B 1.5 -G 2"  # with them no activation is another, or constant
PLANE = "-n 2 -c 8 -H 9 -W 10"
BATCH = "-n 5 -c 8 -H 9 -W 10"  # of two images, normalized each by itself, every gradient is 0
LAYOUTS = ("NCHW", "NHWC")

# Filters by a name for each kind.
FILTERS = {"1x1": "-y 1 -x 1", "3x3": "-y 3 -x 3 -p 1 -q 1"}
OTHER_FILTERS = {
    "1x1, stride 2": "-y 1 -x 1 -u 2 -v 2",
    "3x3, stride 2": "-y 3 -x 3 -p 1 -q 1 -u 2 -v 2",
    "3x3, no padding": "-y 3 -x 3",
    "5x5": "-y 5 -x 5 -p 2 -q 2",
    "7x7, stride 2": "-y 7 -x 7 -p 3 -q 3 -u 2 -v 2",
    "9x9": "-y 9 -x 9 -p 4 -q 4",
    "11x11": "-y 11 -x 11 -p 5 -q 5",
    "1x7": "-y 1 -x 7 -q 3",
    "2x2, same": "-y 2 -x 2 -z same",
    "3x3, dilated": "-y 3 -x 3 -p 2 -q 2 -l 2 -j 2",
    "3x3, groups": "-y 3 -x 3 -p 1 -q 1 -g 2",
    "3x3, depthwise": "-y 3 -x 3 -p 1 -q 1 -g 8",
}
# One and three axes: sizes and a filter, and the layouts.
AXES = {
    "-_ 1 -n 5 -c 8 -W 19 -x 3 -q 1": ("NCW", "NWC"),
    "-_ 3 -n 5 -c 8 --in_d 4 -H 5 -W 6 --pad_d 1 -p 1 -q 1": ("NCDHW", "NDHWC"),
}


# Further options of the modes of training.
OPTIONS = {"na_train": ("--run 1",), "n_train": ("--save 0",), "na_backward": ("--save 1", "--save 0")}


def combinations() -> Iterator[str]:
    """The lines, in a fixed order."""
    convolving = [name for name, operators in MODES.items() if "c" in operators]
    others = [name for name in MODES if name not in convolving]
    for filters in FILTERS.values():
        yield from _lines(f"{PLANE} -k 8 {filters}", LAYOUTS, convolving, in_turn=False)
    yield from _lines(BATCH, LAYOUTS, others, in_turn=False)
    for filters in OTHER_FILTERS.values():
        yield from _lines(f"{PLANE} -k 8 {filters}", LAYOUTS, convolving, in_turn=True)
    for sizes, layouts in AXES.items():
        yield from _lines(f"{sizes} -k 8", layouts, list(MODES), in_turn=True)


def _lines(sizes: str, layouts: tuple[str, ...], modes: list[str], *, in_turn: bool) -> Iterator[str]:
    """All combinations of the rest; activations all, or one after the other in turn."""
    activations = cycle(ACTIVATIONS)
    for mode, ending, layout in product(modes, DTYPES, layouts):
        norms = BATCH_NORM_MODES if _has(mode, "ntg") else ("",)
        for norm, option in product(norms, OPTIONS.get(mode, ("",))):
            those = (next(activations),) if in_turn else ACTIVATIONS
            for activation in those if _has(mode, "agd") else ("",):
                yield " ".join(_words(mode, ending, layout, norm, option, activation, sizes))


def _has(mode: str, operators: str) -> bool:
    """Whether a mode has one of these operators."""
    return not set(operators).isdisjoint(MODES[mode])


def _words(
    mode: str, ending: str, layout: str, norm: str, option: str, activation: str, sizes: str
) -> Iterator[str]:
    yield f"CBAInfer{ending} -F {mode} {sizes} -I {layout}"
    if norm:
        yield f"-M {norm}"
    if option:
        yield option
    if activation:
        yield f"-m {activation} {NUMBERS}"
