"""Rules of users: a formula that models spell out, and the operators of plans in its place.

    fuseplan.rule("x * sigmoid(beta * x) -> learned_swish")

The names in the formula are holes: `x` is any value, the keys of the operators' operands are tensors, and the
others are numbers, which the operators' texts may have in the place of their own.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fuseplan.errors import ArgumentError, PlanError
from fuseplan.language.formula import parse_expression
from fuseplan.language.syntax import python_expression
from fuseplan.messages.excerpt import ARROW
from fuseplan.op import Elementwise, Op
from fuseplan.plans.plan import FusionPlan
from fuseplan.plans.text import CALL, parse_operator
from fuseplan.scalar import NUMPY, Scalar, fold, leaves_of
from fuseplan.scalar import number as number_text

SRC = "f64[2x3x4x5, nchw]"  # of a trial
TRIALS = 16
TURNING = ("add", "mul", "maximum", "minimum")  # whose arguments may stand in either order
NEAR = 1e-6  # of a number: a model in f32 has 0.70710677 for 0.7071067811865476

Holes = Mapping[str, Scalar]


@dataclass(frozen=True)
class Rule:
    """A formula, and the operators in its place; made by `fuseplan.rule`.

    Attributes:
        text: `before -> after`.
        name: what reports call it.
        before: the formula, over the holes.
        after: the operators' texts, over the holes that are numbers.
        numbers: the holes that are numbers.
        operands: for each operator, its own name of each operand, and the hole.
    """

    text: str
    name: str
    before: Scalar = field(repr=False)
    after: tuple[str, ...]
    numbers: frozenset[str]
    operands: tuple[Mapping[str, str], ...]

    def __str__(self) -> str:
        return self.text

    def matches(self, root: Scalar) -> Iterator[Holes]:
        """What the holes may be for the formula to be an expression, whose other values are leaves but x."""
        yield from self._matches(self.before, root, {})

    def ops(self, holes: Holes) -> list[Elementwise]:
        """The operators for some numbers.

        Raises:
            PlanError: they do not take these.
        """
        numbers = {name: float(holes[name].args[0]) for name in self.numbers}
        return _operators(self.after, numbers)

    def _matches(self, part: Scalar, other: Scalar, holes: Holes) -> Iterator[Holes]:
        if part.fn == "leaf":
            name = str(part.args[0])
            if holes.get(name, other) == other and self._takes(name, other):
                yield {**holes, name: other}
        elif part.fn == "const":
            if other.fn == "const" and math.isclose(part.args[0], other.args[0], rel_tol=NEAR):
                yield holes
        elif part.fn == other.fn:
            turned = [other.args[::-1]] if part.fn in TURNING else []
            for args in (other.args, *turned):
                yield from self._all(list(zip(part.args, args, strict=True)), holes)

    def _all(self, pairs: Sequence[tuple[Scalar, Scalar]], holes: Holes) -> Iterator[Holes]:
        if not pairs:
            yield holes
            return
        for found in self._matches(*pairs[0], holes):
            yield from self._all(pairs[1:], found)

    def _takes(self, name: str, other: Scalar) -> bool:
        if name == "x":
            return "x" in leaves_of(other)
        return other.fn == "const" if name in self.numbers else other.fn == "leaf" and other.args[0] != "x"


def rule(text: str, *, name: str = "", tolerance: float = 1e-6) -> Rule:
    """A rule for whole models: where a formula stands, plans have the operators that you name.

        fuseplan.rule("x * sigmoid(beta * x) -> learned_swish")
        fuseplan.rule("x / (1 + exp(-(k * x))) -> elementwise('x * sigmoid(k * x)', k=k)", name="quick gelu")

    A model may spell a formula in many ways; a rule is for one of them, with summands and factors in either
    order. `fuseplan.torch.fuse` and `fuseplan.onnx.load` take rules.

    Args:
        text: a formula, as `elementwise` reads it; an arrow; and elementwise operators, as in a plan's text.
            The formula's names are holes: `x` is any value, the key of an operand is a tensor, and any other
            name is a number, which the operators' texts may have in the place of one.
        name: what reports call the rule; the operators' text unless given.
        tolerance: the most that the operators may be away from the formula in float64, for random numbers
            and tensors: |operators - formula| / (1 + |formula|).

    Raises:
        PlanError: the text is no formula and operators, or the operators do not take the holes.
        ArgumentError: the operators compute something else than the formula: the message has an example.
    """
    before, arrow, after = text.partition(ARROW)
    root = parse_expression(before.strip())
    holes = {str(each) for each in leaves_of(root)}
    if not arrow or "x" not in holes or root.is_condition:
        want = "a formula of x, an arrow, and operators: x * sigmoid(x) -> silu"
        raise PlanError("this is no rule", got=text, want=want)
    pieces = tuple(each.strip() for each in after.split(ARROW))
    draws = np.random.default_rng(0)
    plan, _ = _drawn(pieces, holes, draws)
    keys = {each.key for each in plan.operands}
    if not keys < holes:
        want = " ".join(sorted(keys))
        raise PlanError("the formula of a rule names all operands", got=before.strip(), want=want)
    operands = tuple({each.name: each.key for each in step.operands} for step in plan.steps)
    told = f" {ARROW} ".join(pieces)
    text = f"{before.strip()} {ARROW} {told}"
    made = Rule(text, name or told, root, pieces, frozenset(holes - keys - {"x"}), operands)
    if not sum(_compared(made, draws, tolerance) for _ in range(TRIALS)):
        raise ArgumentError(f"the formula of the rule {made.name} is finite for no random numbers: {made}")
    return made


def _operators(pieces: Sequence[str], numbers: Mapping[str, float]) -> list[Elementwise]:
    """The operators of texts with numbers for their holes.

    Raises:
        PlanError: a text is no elementwise operator.
    """
    made: list[Op] = [parse_operator(_filled(piece, numbers)) for piece in pieces]
    for each in made:
        if not isinstance(each, Elementwise) or each.has_parts or each.again or each.results_made:
            raise PlanError("a rule's operators are elementwise, without results", got=each.name)
    return [each for each in made if isinstance(each, Elementwise)]


def _filled(piece: str, numbers: Mapping[str, float]) -> str:
    tree = python_expression(piece, "an operator", CALL)
    if not isinstance(tree, ast.Call) or not numbers:
        return piece

    def number(node: ast.expr) -> ast.expr:
        if isinstance(node, ast.Name) and node.id in numbers:
            return ast.parse(number_text(numbers[node.id]), mode="eval").body
        return node

    args = [number(each) for each in tree.args]
    named = [ast.keyword(each.arg, number(each.value)) for each in tree.keywords]
    return ast.unparse(ast.Call(tree.func, args, named))


def _drawn(
    pieces: Sequence[str], holes: Collection[str], draws: np.random.Generator
) -> tuple[FusionPlan, dict[str, float]]:
    """A plan of the operators for random numbers that they take, and the numbers; some holes are tensors.

    Raises:
        PlanError: the operators take none.
    """
    trees = [python_expression(each, "an operator", CALL) for each in pieces]
    words = {node.id for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Name)} & {*holes}
    for last in reversed(range(TRIALS)):
        numbers = {name: float(draws.standard_normal()) for name in sorted(holes)}
        try:
            return FusionPlan(SRC, *_operators(pieces, {word: numbers[word] for word in words})), numbers
        except PlanError:
            if not last:
                raise
    raise AssertionError


def _compared(rule: Rule, draws: np.random.Generator, tolerance: float) -> int:
    """For how many random elements the operators give the formula's finite value.

    Raises:
        ArgumentError: for one, they give another.
    """
    plan, known = _drawn(rule.after, rule.numbers, draws)
    src = draws.standard_normal(plan.src.shape) * 10.0 ** draws.integers(-2, 3)
    given = {each.key: draws.standard_normal(each.shape) for each in plan.operands}
    leaves = {"x": src} | {name: np.float64(known[name]) for name in sorted(rule.numbers)}
    for each in plan.operands:
        spread = [n if axis in each.axes else 1 for axis, n in enumerate(plan.src.shape)]
        leaves[each.key] = given[each.key].reshape(spread)
    got = plan.evaluate(src, given)[0]
    with np.errstate(all="ignore"):
        made = fold(rule.before, leaves, {**NUMPY, "const": np.float64})
        want = np.broadcast_to(made, got.shape)
        away = np.where(np.isfinite(want), abs(got - want) / (1 + abs(want)), 0.0)
    worst = np.unravel_index(np.nan_to_num(away, nan=math.inf).argmax(), away.shape)
    if not away[worst] <= tolerance:
        pairs = [f"{name}={np.broadcast_to(each, got.shape)[worst]:.6g}" for name, each in leaves.items()]
        told = f"its formula is {want[worst]:.6g}, and its operators give {got[worst]:.6g}"
        raise ArgumentError(
            f"the rule {rule.name} is wrong: for {', '.join(pairs)}, {told}; the tolerance is {tolerance:g}"
        )
    return int(np.isfinite(want).sum())
