"""What each template takes of each combination of operators: asked of its limits, by probe plans.

A combination is written as MIOpen writes it, a letter an operator: Convolution, Matmul, Bias, batch
Normalization, Activation, Scaled residual; `-train` and `-backward` say which pass it is of. A cell is a
combination, a template, a layout and a dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any, TypeVar, cast

from fuseplan.backends import backend_of
from fuseplan.errors import Unsupported
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import match
from fuseplan.kernels.target import Target
from fuseplan.kernels.template import Template
from fuseplan.language.dtypes import FACTORS
from fuseplan.language.layouts import LAYOUTS
from fuseplan.language.tensor import TensorSpec
from fuseplan.messages.reasons import Refusal, first_refusal
from fuseplan.op import Elementwise, Op
from fuseplan.ops import activation, affine, conv, matmul, training
from fuseplan.plans.naming import as_rows
from fuseplan.plans.plan import FusionPlan
from fuseplan.system.gathering import gathered

Value = TypeVar("Value", bound=Hashable)

COMBINATIONS = (
    "C", "CB", "CA", "CBA", "CN", "CNA", "CBN", "CBNA", "CSBA", "CNSA", "CAN", "CAA", "CNN", "CANA", "NAC",
    "M", "MB", "MBA", "MSBA",
    "B", "A", "BA", "N", "NA", "NSA",
    "N-train", "NA-train", "N-backward", "NA-backward", "A-backward", "CNA-train",
)  # fmt: skip
MODES = tuple(affine.MODES)
SPATIAL = {2: (), 3: (9,), 4: (5, 6), 5: (3, 4, 5)}
PLACES = tuple(layout for rank in SPATIAL for layout in LAYOUTS[rank])
BATCH = 2
CONVOLUTIONS: dict[int, Callable[..., Op]] = {3: conv.Conv1d, 4: conv.Conv2d, 5: conv.Conv3d}
ACTIVATIONS: dict[str, Elementwise] = {  # each with its first sample's parameters
    kind.name: cast(Elementwise, next(iter(kind.samples()))[1]) for kind in activation.ACTIVATIONS
}
USUAL = "relu"

# What a convolution may be, an axis of the table each; the first value is the usual one.
AXES: dict[str, tuple[str, ...]] = {
    "filter": ("3", "1", "2", "4", "5", "7", "11", "1x3"),
    "stride": ("1", "2", "3"),
    "dilation": ("1", "2"),
    "padding": ("same", "none", "asymmetric"),
    "groups": ("1", "2", "8 narrow", "depthwise", "depthwise, 2 features"),
    "channels": ("multiples of 16", "odd"),
}
# Channels, features and groups, by whether channels are odd and by the groups' axis.
SIZES = {
    "multiples of 16": ((32, 64, 1), (32, 64, 2), (32, 32, 8), (32, 32, 32), (32, 64, 32)),
    "odd": ((19, 23, 1), (10, 14, 2), (24, 24, 8), (19, 19, 19), (19, 38, 19)),
}


@dataclass(frozen=True)
class Geometry:
    """A value on each axis: what the contraction of a probe is."""

    filter: str = "3"
    stride: str = "1"
    dilation: str = "1"
    padding: str = "same"
    groups: str = "1"
    channels: str = "multiples of 16"

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Channels, features, groups."""
        return SIZES[self.channels][AXES["groups"].index(self.groups)]

    def to_json(self) -> dict[str, str]:
        """The values that are not the usual ones, by their axes."""
        return {axis: value for axis, (usual, *_) in AXES.items() if (value := getattr(self, axis)) != usual}

    def convolution(self, axes: int) -> Op:
        """The operator, for a tensor with so many spatial axes."""
        kernel: Any = int(self.filter) if "x" not in self.filter else (*(1,) * (axes - 1), 3)
        padding: Any = {"same": "same", "none": 0, "asymmetric": ((0, 1),) * axes}[self.padding]
        _, features, groups = self.sizes
        return CONVOLUTIONS[axes + 2](
            features,
            kernel=kernel,
            stride=int(self.stride),
            dilation=int(self.dilation),
            padding=padding,
            groups=groups,
        )


Activations = dict[Hashable, tuple[str, ...]]  # that are taken, by combination, template, dtype and geometry
# A template takes one of these, or nothing.
BASES = (Geometry(), Geometry(filter="1"), Geometry(groups="8 narrow"), Geometry(groups="depthwise"))


@dataclass(frozen=True)
class Cell:
    """What a template takes of a combination in a layout and dtype.

    Attributes:
        code: the reason's code where it takes nothing; else empty.
        taken: geometries that it takes, the usual one first; one that says nothing without a contraction.
        refused: axes and values that it takes none of, with the reason's code.
        modes: of batch normalization; empty where there is none.
        activations: by their operators' names; empty where there is none.
    """

    combination: str
    template: str
    layout: str
    dtype: str
    code: str = ""
    taken: tuple[Geometry, ...] = ()
    refused: tuple[tuple[str, str, str], ...] = ()
    modes: tuple[str, ...] = ()
    activations: tuple[str, ...] = ()

    def plan(self, turn: int = 0) -> FusionPlan:
        """A plan of the cell: another geometry, mode and activation each turn."""
        geometry = self.taken[turn % len(self.taken)] if self.taken else BASES[turn % len(BASES)]
        modes, activations = self.modes or MODES, self.activations or tuple(ACTIVATIONS)
        return probe(
            self.combination,
            self.layout,
            self.dtype,
            geometry,
            modes[turn % len(modes)],
            activations[turn % len(activations)],
        )


def probe(
    combination: str,
    layout: str,
    dtype: str,
    geometry: Geometry = BASES[0],
    mode: str = MODES[0],
    act: str = USUAL,
) -> FusionPlan:
    """The plan of a combination."""
    rank = len(layout)
    src = TensorSpec((BATCH, geometry.sizes[0], *SPATIAL[rank]), dtype, layout)
    src = as_rows(src) if "M" in combination else src
    return FusionPlan(src, *_operators(combination, rank - 2, geometry, mode, ACTIVATIONS[act]))


@cache
def _operators(
    combination: str, axes: int, geometry: Geometry, mode: str, act: Elementwise
) -> tuple[Op, ...]:
    letters, _, phase = combination.partition("-")
    if phase == "backward":
        return (_backward(letters, mode, act),)
    makers: dict[str, Callable[[], Op]] = {
        "C": lambda: geometry.convolution(axes),
        "M": lambda: matmul.Matmul(geometry.sizes[1]),
        "B": affine.Bias,
        "A": lambda: act,
        "S": lambda: affine.Add(alpha1=2.0, alpha2=0.5),
        "N": lambda: (training.BatchNormTraining if phase else affine.BatchNorm)(mode),
    }
    return tuple(makers[letter]() for letter in letters)


def _backward(letters: str, mode: str, act: Elementwise) -> Op:
    if letters == "A":
        return training.ActivationBackward(act)
    through = act if "A" in letters else activation.Identity()
    return training.BatchNormBackward(activation=through, mode=mode)


@cache
def _kernel(
    combination: str, layout: str, dtype: str, geometry: Geometry, mode: str, act: str
) -> Kernel | Refusal:
    """What the templates are asked about; a refusal where no rule takes the plan."""
    try:
        return lower(match(probe(combination, layout, dtype, geometry, mode, act)))
    except Unsupported as error:
        return error.refusals[0]


def cells(target: Target, part: int | None = None) -> Iterator[Cell]:
    """Every cell of a target, or a part: of each combination and layout, those of one dtype, in turn."""
    templates, known = backend_of(target.backend).templates, Activations()
    for place, (combination, layout) in enumerate(product(COMBINATIONS, PLACES)):
        if "C" in combination and len(layout) == 2:  # a matrix has nothing to slide a kernel along
            continue
        dtypes = FACTORS if part is None else (FACTORS[(place + part) % len(FACTORS)],)
        for dtype, template in product(dtypes, templates):
            yield _cell(_Asked(combination, template, layout, dtype, target), known)


@dataclass(frozen=True)
class _Asked:
    """A template, a target, and what to ask about."""

    combination: str
    template: type[Template]
    layout: str
    dtype: str
    target: Target

    def refusal(self, geometry: Geometry, mode: str = MODES[0], act: str = USUAL) -> Refusal | None:
        """Why the template does not take it."""
        kernel = _kernel(self.combination, self.layout, self.dtype, geometry, mode, act)
        if isinstance(kernel, Refusal):
            return kernel
        return first_refusal(self.template.limits(kernel, self.target, "default"), self.template.name)

    @property
    def bases(self) -> tuple[Geometry, ...]:
        """What to begin with."""
        return BASES if "C" in self.combination else BASES[:1]

    def named(self, **others: Any) -> Cell:
        """The cell."""
        return Cell(self.combination, self.template.name, self.layout, self.dtype, **others)


def _cell(asked: _Asked, known: Activations) -> Cell:
    """What a template takes; which activations does not depend on the layout, so it is asked in one."""
    refusals = [asked.refusal(base) for base in asked.bases]
    bases = [base for base, refusal in zip(asked.bases, refusals, strict=True) if refusal is None]
    if not bases:
        nearest = max((each for each in refusals if each), key=lambda each: each.held)
        return asked.named(code=nearest.code)
    taken, refused = dict.fromkeys(bases), []
    axes = AXES if "C" in asked.combination else ("channels",)
    for axis, value in ((name, value) for name in axes for value in AXES[name]):
        codes = []
        for each in (replace(base, **{axis: value}) for base in bases):
            refusal = None if each in taken else asked.refusal(each)
            if refusal is None:
                taken[each] = None
                break
            codes.append(refusal.code)
        else:
            refused.append((axis, value, codes[0]))
    first = bases[0]
    modes = [mode for mode in MODES if "N" in asked.combination and not asked.refusal(first, mode)]
    alike = asked.combination, asked.template, asked.dtype, first
    if "A" not in asked.combination:
        known[alike] = ()
    elif alike not in known:
        known[alike] = tuple(name for name in ACTIVATIONS if not asked.refusal(first, act=name))
    return asked.named(
        taken=tuple(taken), refused=tuple(refused), modes=tuple(modes), activations=known[alike]
    )


@dataclass(frozen=True)
class Row:
    """Cells that agree: every combination in every layout and dtype.

    Attributes:
        combinations, layouts, dtypes: their product are the cells.
        code: why none of them is taken; else empty.
        refused: axes and values that are not taken, with the reason's code.
        modes, activations: those that are not taken.
        taken: geometries that are taken, which tests run.
    """

    template: str
    combinations: tuple[str, ...]
    layouts: tuple[str, ...]
    dtypes: tuple[str, ...]
    code: str
    refused: tuple[tuple[str, str, str], ...]
    modes: tuple[str, ...]
    activations: tuple[str, ...]
    taken: tuple[Geometry, ...]

    def axis(self, name: str) -> str:
        """What is taken on an axis: `any`, or the values."""
        out = {value for axis, value, _ in self.refused if axis == name}
        return ", ".join(value for value in AXES[name] if value not in out) if out else "any"

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values, with what is taken on each axis."""
        told: dict[str, Any] = {
            "algorithm": self.template,
            "combinations": list(self.combinations),
            "layouts": list(self.layouts),
            "dtypes": list(self.dtypes),
        }
        if self.code:
            return told | {"reason": self.code}
        return told | {
            **{axis: self.axis(axis) for axis in AXES},
            "modes": [mode for mode in MODES if mode not in self.modes],
            "activations": [name for name in ACTIVATIONS if name not in self.activations],
            "reasons": list(dict.fromkeys(code for _, _, code in self.refused)),
            "geometries": [each.to_json() for each in self.taken],
        }


def rows(found: Iterable[Cell]) -> Iterator[Row]:
    """Cells that agree in one row."""
    same: dict[Any, list[Cell]] = gathered(
        ((each.template, each.code, each.refused, *_missing(each), each.taken), each) for each in found
    )
    for (template, code, *rest), held in same.items():
        for names, where in alike((each.combination, (each.layout, each.dtype)) for each in held):
            for layouts, dtypes in alike(where):
                yield Row(template, names, layouts, dtypes, code, *rest)


def _missing(cell: Cell) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Modes and activations that a cell does not take, of those it could."""
    modes = MODES if "N" in cell.combination and not cell.code else ()
    acts = tuple(ACTIVATIONS) if "A" in cell.combination and not cell.code else ()
    return (
        tuple(mode for mode in modes if mode not in cell.modes),
        tuple(name for name in acts if name not in cell.activations),
    )


def alike(pairs: Iterable[tuple[str, Value]]) -> Iterator[tuple[tuple[str, ...], tuple[Value, ...]]]:
    """Names that have the same values, together, with these values."""
    same = gathered((tuple(values), name) for name, values in gathered(pairs).items())
    return ((tuple(names), values) for values, names in same.items())
