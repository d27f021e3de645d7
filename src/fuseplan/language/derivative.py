"""The derivative of an expression: one rule a function, applied from the leaves up.

What a backward pass multiplies a gradient by is made here from the forward formula, so that no operator says
its arithmetic twice. Where a branch is chosen, the slope is the chosen branch's; a tie takes the second
argument's: `maximum(x, 0)` has slope 0 at 0, and `minimum(a, x)` slope 1 at a. The slope of |x| at 0 is 0,
those of `round(x)` and of random numbers are 0 everywhere, and that of a change of dtype is 1.
"""

from __future__ import annotations

from collections.abc import Callable
from math import pi, sqrt

from fuseplan.scalar import CASTS, Scalar, const, exp, leaf, leaves_of, log, neg, sigmoid, softplus, where
from fuseplan.scalar import sqrt as root_of

ZERO, ONE = const(0), const(1)


def derivative(root: Scalar, by: str = "x") -> Scalar:
    """The slope of `root` along its leaf `by`.

    Raises:
        PlanError: the slope's expression is too large for one element.
    """
    known: dict[Scalar, Scalar] = {leaf(by): ONE}

    def slope(node: Scalar) -> Scalar:
        if node not in known:
            known[node] = _slope(node, slope) if by in leaves_of(node) else ZERO
        return known[node]

    return slope(root)


def _slope(node: Scalar, slope: Callable[[Scalar], Scalar]) -> Scalar:
    """By the rule of the whole where it has one, else by its function's."""
    for inner, rule in _wholes(node):
        return times(rule(inner), slope(inner))
    if node.fn == "where":
        condition, chosen, other = node.args
        return _choice(condition, slope(chosen), slope(other))
    if node.fn == "random":
        return ZERO
    if node.fn in _OF_ONE:
        (inner,) = node.args
        return times(_OF_ONE[node.fn](inner), slope(inner))
    a, b = node.args
    return _OF_TWO[node.fn](a, b, slope(a), slope(b))


def _wholes(node: Scalar) -> list[tuple[Scalar, Callable[[Scalar], Scalar]]]:
    """The argument and the rule of a composition that is known as a whole, at most one.

    Branch by branch, the slope of the exponential of -|x| would be 0 at 0, which that of the whole is not,
    and that of a fraction which levels off would be a difference of nearly equal numbers.
    """
    if node.fn == "add" and node.args[0].fn == "maximum":
        inner = node.args[0].args[0]
        return [(inner, sigmoid)] if node == softplus(inner) else []
    if node.fn != "div":
        return []
    top, bottom = node.args
    if top.fn == "where" and top.args[0].fn == "ge":
        inner = top.args[0].args[0]
        return [(inner, _sigmoid_slope)] if node == sigmoid(inner) else []
    is_softsign = bottom == Scalar("add", (ONE, Scalar("abs", (top,))))
    return [(top, _softsign_slope)] if is_softsign else []


def _softsign_slope(x: Scalar) -> Scalar:
    """1/(1 + |x|)**2 without the difference 1 - |x|/(1 + |x|)."""
    bottom = 1 + abs(x)
    return 1 / (bottom * bottom)


def _sigmoid_slope(x: Scalar) -> Scalar:
    """d/(1 + d)**2 with d = exp(-|x|): sigmoid(x) * sigmoid(-x) without the difference 1 - sigmoid(x)."""
    decay = exp(-abs(x))
    return decay / ((1 + decay) * (1 + decay))


_OF_ONE: dict[str, Callable[[Scalar], Scalar]] = {
    "neg": lambda x: const(-1),
    "abs": lambda x: where(x > 0, 1, where(x < 0, -1, 0)),
    "exp": exp,
    "expm1": exp,
    "log": lambda x: 1 / x,
    "log1p": lambda x: 1 / (1 + x),
    "sqrt": lambda x: 0.5 / root_of(x),
    "tanh": lambda x: 4 * _sigmoid_slope(2 * x),  # 1/cosh(x)**2 without the difference 1 - tanh(x)**2
    "erf": lambda x: 2 / sqrt(pi) * exp(-(x * x)),
    "round": lambda x: ZERO,
    **dict.fromkeys(CASTS, lambda x: ONE),
}


def _power(a: Scalar, b: Scalar, da: Scalar, db: Scalar) -> Scalar:
    """b * a**(b - 1) * a' + a**b * log(a) * b'; the latter is 0 where a is."""
    lower = const(b.args[0] - 1) if b.fn == "const" else b - 1
    base = ONE if lower == ZERO else a if lower == ONE else a**lower
    by_base = ZERO if da == ZERO else times(times(b, base), da)
    by_exponent = ZERO if db == ZERO else times(a**b * where(a > 0, log(a), 0), db)
    return _plus(by_base, by_exponent)


def _choice(condition: Scalar, chosen: Scalar, other: Scalar) -> Scalar:
    return chosen if chosen == other else where(condition, chosen, other)


_OF_TWO: dict[str, Callable[[Scalar, Scalar, Scalar, Scalar], Scalar]] = {
    "add": lambda a, b, da, db: _plus(da, db),
    "sub": lambda a, b, da, db: _minus(da, db),
    "mul": lambda a, b, da, db: _plus(times(da, b), times(a, db)),
    "div": lambda a, b, da, db: _over(da if db == ZERO else _minus(da, times(a / b, db)), b),
    "pow": _power,
    "maximum": lambda a, b, da, db: _choice(a > b, da, db),
    "minimum": lambda a, b, da, db: _choice(a >= b, db, da),
}


def _plus(a: Scalar, b: Scalar) -> Scalar:
    if a == ZERO:
        return b
    return a if b == ZERO else a + b


def _minus(a: Scalar, b: Scalar) -> Scalar:
    if a == ZERO:
        return times(const(-1), b)
    return a if b == ZERO else a - b


def times(a: Scalar, b: Scalar) -> Scalar:
    """a * b for a slope b: 0 where b is by choice, whatever a is there, be it infinite or NaN."""
    if ZERO in (a, b):
        return ZERO
    for mask, other in ((a, b), (b, a)):
        if _is_mask(mask):
            condition, chosen, rest = mask.args
            return _choice(condition, times(other, chosen), times(other, rest))
    for one, other in ((a, b), (b, a)):
        if one == ONE:
            return other
        if one == const(-1):
            return neg(other)
    return a * b


def _over(a: Scalar, b: Scalar) -> Scalar:
    """a / b for a slope a: 0 where it is by choice, so that it stays known as one."""
    if _is_mask(a):
        condition, chosen, rest = a.args
        return _choice(condition, _over(chosen, b), _over(rest, b))
    return ZERO if a == ZERO else a / b


def _is_mask(node: Scalar) -> bool:
    """A choice of which one is 0."""
    return node.fn == "where" and any(each == ZERO or _is_mask(each) for each in node.args[1:])
