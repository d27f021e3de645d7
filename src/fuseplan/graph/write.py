"""A region's expression as operators of a plan."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from fuseplan.errors import PlanError
from fuseplan.graph.formulas import Axes, spread
from fuseplan.graph.graph import Graph
from fuseplan.graph.layer import Layer
from fuseplan.graph.node import Node
from fuseplan.graph.op import Tensor
from fuseplan.graph.region import OUTSIDE, Region, X
from fuseplan.graph.rules import Holes, Rule
from fuseplan.graph.why import Reason, Why
from fuseplan.language.declarations import PER
from fuseplan.language.tensor import TensorSpec
from fuseplan.op import Elementwise, Op
from fuseplan.ops.activation import ACTIVATIONS
from fuseplan.ops.affine import Add, AddAlong, BatchNorm, Bias, Div, Maximum, Minimum, Mul, MulAlong, Scale
from fuseplan.ops.conversion import AddDequantized, Cast, Dequantize
from fuseplan.ops.expression import Expression
from fuseplan.scalar import CASTS, REBUILD, Scalar, const, fold, leaf, leaves_of, text


class Unwritten(Exception):  # noqa: N818 - an answer: the region ends earlier then
    """No run of operators computes the expression."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(str(reason))
        self.reason = reason


@dataclass(frozen=True)
class Stage:
    """An operator of a plan, its operands by name: names of values, or arrays; and the rule that names it.

    `nodes` are what it computes of its operands, which nothing else reads.
    """

    op: Op
    operands: Mapping[str, Bound] = field(default_factory=dict)
    rule: str = ""
    nodes: tuple[Node, ...] = ()


@dataclass(frozen=True, eq=False)
class Late:
    """An array that is made when NumPy asks for it: a model's weights are read once, when they are packed."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    make: Callable[[], Tensor]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Tensor:
        made = self.make()
        return made if dtype is None else made.astype(dtype)

    def astype(self, dtype: Any) -> Tensor:
        """The array in another dtype."""
        return np.asarray(self, dtype)


def _concatenated(arrays: tuple[Any, ...], axis: int) -> Tensor:
    return np.concatenate([*map(np.asarray, arrays)], axis)


@dataclass(frozen=True)
class Joined:
    """Values one behind the other along an axis: weights or biases of products that are one product."""

    names: tuple[str, ...]
    axis: int


Constant = Tensor | Late
Bound = str | Constant | Joined  # an operand of a plan: the name of a value, an array, or several values


def names_in(bound: Bound) -> tuple[str, ...]:
    """The names of the values that an operand is."""
    return (bound,) if isinstance(bound, str) else bound.names if isinstance(bound, Joined) else ()


def joined(graph: Graph, parts: Sequence[Bound], axis: int) -> Bound | None:
    """Operands as one: all constants, or all inputs of the graph; None where they are others."""
    arrays = [each for each in parts if isinstance(each, np.ndarray | Late)]
    names = tuple(each for each in parts if isinstance(each, str) and each in graph.inputs)
    given = [*arrays, *(graph.types[name] for name in names)]
    if len({str(each.dtype) for each in given}) != 1 or len(parts) not in (len(arrays), len(names)):
        return None
    if names:
        return Joined(names, axis)
    shape = list(arrays[0].shape)
    shape[axis] = sum(each.shape[axis] for each in arrays)
    return Late(arrays[0].dtype, tuple(shape), partial(_concatenated, tuple(arrays), axis))


def aligned(constant: Any) -> Tensor:
    """A constant as an array that a kernel can read where it lies: in memory that no file backs."""
    return np.require(constant, requirements=("A", "O"))


def written(graph: Graph, region: Region, src: TensorSpec, rules: Sequence[Rule] = ()) -> list[Stage]:
    """The operators from x, which is `src` of plans, to the region's head; a rule's where its formula stands.

    Raises:
        Unwritten: there are none.
    """
    shape = graph.types[region.start].shape or ()
    whole = tuple(a for a, extent in enumerate(shape) if extent > 1)
    writer = _Writer(graph, region, src, whole, rules)
    return list(writer.stages(region.expression))


@dataclass(frozen=True)
class _Writer:
    graph: Graph
    region: Region
    src: TensorSpec
    whole: Axes  # the axes along which x has more than one element
    rules: Sequence[Rule]

    def stages(self, root: Scalar) -> Iterator[Stage]:
        """The operators from x to an expression."""
        if root == X:
            return
        src, ruled = self._by_rule(root)
        if ruled:
            yield from self.stages(src)
            yield from ruled
            return
        applied = self.region.applied.get(root)
        if applied is not None:
            yield from self.stages(applied.src)
            yield self._applied(applied.op, applied.operands)
            return
        operands = leaves_of(root) - {"x"}
        if not operands:
            yield from self._of_x(root)
            return
        inner = _kernel_of(root, operands)
        if inner == root:
            yield from self._binary(root)
            return
        yield from self.stages(inner)
        yield from self._of_x(_replaced(root, inner))

    def _of_x(self, root: Scalar) -> Iterator[Stage]:
        """The operators of an expression of x alone: one, or those of a rule, or a cast, between the rest."""
        parts = (
            sorted(_parts(root, frozenset({"x"})) - {X}, key=lambda each: -each.size) if self.rules else []
        )
        for part in parts:
            rest = _replaced(root, part)
            src, ruled = self._by_rule(part) if leaves_of(rest) == {"x"} else (X, [])
            if ruled:
                yield from self._of_x(src) if src != X else ()
                yield from ruled
                yield from self._of_x(rest) if rest != X else ()
                return
        casts = [each for each in _parts(root, frozenset({"x"})) if each.fn in CASTS]
        outer = max(casts, key=lambda each: each.size, default=None)
        if outer is None:
            yield Stage(activation(root))
            return
        (inner,), rest = outer.args, _replaced(root, outer)
        if leaves_of(rest) != {"x"} or not isinstance(inner, Scalar):
            raise Unwritten(Reason(Why.FORMULA, _short(root)))
        yield from self._of_x(inner) if inner != X else ()
        yield Stage(Cast(CASTS[outer.fn]))
        yield from self._of_x(rest) if rest != X else ()

    def _by_rule(self, root: Scalar) -> tuple[Scalar, list[Stage]]:
        """What a rule's operators are applied to, and the operators: none where no rule has the formula."""
        for rule in self.rules:
            for holes in rule.matches(root):
                with contextlib.suppress(PlanError, Unwritten):
                    pairs = zip(rule.ops(holes), rule.operands, strict=True)
                    return holes["x"], [self._ruled(rule, op, names, holes) for op, names in pairs]
        return root, []

    def _ruled(self, rule: Rule, op: Elementwise, names: Mapping[str, str], holes: Holes) -> Stage:
        """An operator of a rule with its operands, which have the axes that it declares."""
        axes = {"channel": self._channel, "element": self.whole, "shared": ()}
        shape = self.graph.types[self.region.start].shape or ()
        operands: dict[str, Bound] = {}
        for name, hole in names.items():
            value = str(holes[hole].args[0]).removeprefix(OUTSIDE)
            per = str(op.operand_fields[name].per)
            if self.region.axes[value] != axes.get(per):
                raise Unwritten(Reason(Why.BROADCAST, f"{value}: {self.graph.types[value]}"))
            constant = self.graph.constants.get(value)
            operands[name] = (
                value if constant is None else constant.reshape(shape if per == "element" else -1)
            )
        return Stage(op, operands, rule.name)

    def _applied(self, op: Elementwise, names: tuple[str, ...]) -> Stage:
        declared = op.operands(self.src)
        for each, name in zip(declared, names, strict=True):
            if self.region.axes.get(name, ()) not in ((), spread(self.src.shape, each.axes)):
                raise Unwritten(Reason(Why.BROADCAST, f"{name}: {self.graph.types[name]}"))
        given = (self.graph.constants.get(name, name) for name in names)
        return Stage(op, {each.name: value for each, value in zip(declared, given, strict=True)})

    @property
    def _channel(self) -> Axes:
        return tuple(axis for axis in (self.src.channel_axis,) if axis in self.whole)

    def _binary(self, root: Scalar) -> Iterator[Stage]:
        """A function of an expression of x and a value: see `_elements`."""
        if root.fn not in ("add", "sub", "mul", "div", "maximum", "minimum"):
            raise Unwritten(Reason(Why.FORMULA, _short(root)))
        left, right = root.args
        is_left = "x" in leaves_of(left)
        inner, other = (left, right) if is_left else (right, left)
        if other.fn != "leaf" or other == X:
            raise Unwritten(Reason(Why.FORMULA, _short(root)))
        yield from self.stages(inner)
        yield self._combined(root.fn, str(other.args[0]).removeprefix(OUTSIDE), is_left)

    def _combined(self, fn: str, name: str, is_left: bool) -> Stage:
        """x with a value on the right, or on the left."""
        axes = self.region.axes[name]
        constant = self.graph.constants.get(name)
        if axes == self.whole and constant is None:
            return self._elements(fn, name, is_left)
        if axes not in (self._channel, ()):
            return self._along(fn, name, axes, is_left)
        is_exact = fn in ("maximum", "minimum") or (fn == "div" and not is_left)  # no factor and summand
        if constant is not None and not is_exact:
            return self._constants(fn, constant, is_left)
        if fn in ("add", "mul") and axes == self._channel:
            return Stage(Bias(), {"bias": name}) if fn == "add" else Stage(Scale(), {"scale": name})
        if fn == "sub" and axes == self._channel:
            one = np.ones((self.graph.types[self.region.start].shape or ())[self.src.channel_axis])
            return _linear(one if is_left else -one, 0 * one, name)
        if fn == "mul":
            return Stage(Scale(shared=True), {"scale": name})
        raise Unwritten(Reason(Why.FORMULA, f"{fn} with {name}: {self.graph.types[name]}"))

    def _along(self, fn: str, name: str, axes: Axes, is_left: bool) -> Stage:
        """x with a value that has the first axis and others, or all but the first."""
        shape, first = self.src.shape, self.src.canonical_order[0]
        inside = PER["activation"](self.src)
        is_known = axes == spread(shape, inside) or first in axes or shape[first] == 1
        is_known &= len(shape) < 4 or axes != (1,)  # with its channels there, src has a factor for each
        if fn not in ("add", "sub", "mul") or not is_known:
            raise Unwritten(Reason(Why.BROADCAST, f"{name}: {self.graph.types[name]}"))
        along = inside if axes == spread(shape, inside) else tuple(sorted({*axes, first}))
        constant = self.graph.constants.get(name)
        value = name if constant is None else constant.reshape([shape[axis] for axis in along])
        if fn == "mul":
            return Stage(MulAlong(along), {"other": value})
        signs = {"alpha2" if is_left else "alpha1": -1.0} if fn == "sub" else {}
        return Stage(AddAlong(along, **signs), {"other": value})

    def _elements(self, fn: str, name: str, is_left: bool) -> Stage:
        """x with a value of its shape; a sum reads the integers of a dequantized one."""
        node = dequantized(self.graph, name) if fn == "add" else None
        numbers = [self.graph.constants.get(each) for each in node.inputs[1:]] if node else []
        is_own = id(node) not in self.region.claimed and not self.graph.leaves(name, self.region.nodes)
        if node and is_own and all(each is not None for each in numbers):
            told = (float(str(each.reshape(()))) for each in numbers if each is not None)
            dtype = self.graph.types[node.inputs[0]].dtype
            return Stage(AddDequantized(dtype, *told), {"other": node.inputs[0]}, nodes=(node,))
        ops: dict[str, Elementwise] = {
            **{"add": Add(), "mul": Mul(), "maximum": Maximum(), "minimum": Minimum()},
            "sub": Add(alpha2=-1.0) if is_left else Add(alpha1=-1.0),
            "div": Div(turned=not is_left),
        }
        return Stage(ops[fn], {"other": name})

    def _constants(self, fn: str, constant: Tensor, is_left: bool) -> Stage:
        """x with a constant a channel: its factor and summand."""
        shape = self.graph.types[self.region.start].shape or ()
        values = np.broadcast_to(constant.reshape(-1).astype(np.float64), shape[self.src.channel_axis])
        if fn in ("add", "sub") and is_left:
            return Stage(Bias(), {"bias": values if fn == "add" else -values})
        if fn == "add":
            return Stage(Bias(), {"bias": values})
        if fn == "sub":
            return _linear(np.full_like(values, -1.0), values, np.zeros_like(values))
        with np.errstate(divide="ignore"):
            return Stage(Scale(), {"scale": values if fn == "mul" else 1 / values})


def dequantized(graph: Graph, name: str) -> Node | None:
    """The node that makes a value of integers, by one scale for all of them; None where none does."""
    node = graph.made_by.get(name)
    op = node.op.op if node is not None and isinstance(node.op, Layer) else None
    return node if isinstance(op, Dequantize) and op.per == "tensor" else None


def _linear(factor: Tensor, summand: Tensor, mean: Bound) -> Stage:
    """factor * (x - mean) + summand, as frozen batch normalization."""
    operands: dict[str, Bound] = {"mean": mean, "inverse_variance": np.ones_like(summand)}
    operands |= {"scale": factor, "shift": summand}
    return Stage(BatchNorm(inverse=True), operands)


def _kernel_of(root: Scalar, operands: frozenset[str]) -> Scalar:
    """The smallest part that x and the operands reach the root through; the root if there is no smaller."""
    needed = operands | {"x"}
    for part in sorted(_parts(root, needed), key=lambda each: each.size):
        if part != root and leaves_of(_replaced(root, part)) == {"x"}:
            return part
    return root


def _parts(root: Scalar, needed: frozenset[str]) -> set[Scalar]:
    """The parts that have all these leaves and are no comparisons."""
    found: set[Scalar] = set()
    ahead = [root]
    while ahead:
        node = ahead.pop()
        if node in found or not needed <= leaves_of(node):
            continue
        if not node.is_condition:
            found.add(node)
        ahead += [arg for arg in node.args if isinstance(arg, Scalar)]
    return found


def _replaced(root: Scalar, part: Scalar) -> Scalar:
    """The expression with x in the place of a part; the old x, where it is left, has another name."""
    if root == part:
        return X
    if root.fn in ("leaf", "const"):
        return leaf("x outside") if root == X else root
    return Scalar(root.fn, tuple(_replaced(arg, part) for arg in root.args))


def activation(expression: Scalar) -> Elementwise:
    """The operator of a formula of x: that of the same formula, else the formula itself."""
    is_symmetric = expression.fn in ("add", "mul")
    turned = Scalar(expression.fn, expression.args[::-1]) if is_symmetric else expression
    return _KNOWN.get(expression) or _KNOWN.get(turned) or Expression(text(expression))


def _known() -> Iterator[tuple[Scalar, Elementwise]]:
    for kind in ACTIVATIONS:
        for _, op in kind.samples():
            if isinstance(op, Elementwise):
                meanings = {"x": X} | {each.name: const(each.value) for each in op.parameters()}
                yield fold(op.formula(), meanings, REBUILD), op


_KNOWN = dict(_known())


def _short(root: Scalar) -> str:
    told = text(root)
    return told if len(told) <= 80 else f"{told[:77]}..."
