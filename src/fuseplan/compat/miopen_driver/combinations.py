"""Lines for every combination of the driver, on small tensors, as in MIOpen's fusion_tests.sh.

Modes, activations, modes of batch normalization, dtypes and layouts in all combinations, with the two filters
that most networks are made of; every other kind of filter with one activation after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, product

from fuseplan.compat.miopen_driver.letters import ACTIVATIONS, BATCH_NORM_MODES, DTYPES, MODES

NUMBERS = "-A 0.5 -B 1.5 -G 2"  # with them no activation is another, or constant
PLANE = "-n 2 -c 8 -H 9 -W 10"
BATCH = "-n 5 -c 8 -H 9 -W 10"  # of two images, normalized each by itself, every gradient is 0
LAYOUTS = ("NCHW", "NHWC")

# Filters by a name for each kind.
FILTERS = {
    "1x1": "-y 1 -x 1",
    "3x3": "-y 3 -x 3 -p 1 -q 1",
}
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
