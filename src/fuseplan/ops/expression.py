"""A user's own formula of one element."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

from fuseplan.errors import PlanError
from fuseplan.language.declarations import SAMPLE_TENSORS, Parameter
from fuseplan.language.fields import NAME, RESERVED, is_name, real, refused
from fuseplan.language.formula import ARGUMENTS, parse_expression
from fuseplan.language.syntax import python_expression
from fuseplan.messages.excerpt import shown
from fuseplan.op import Elementwise, Op, operator
from fuseplan.scalar import Scalar, leaf, leaves_of, replaced, scalar, text

TAKEN = (*RESERVED, "inf", "expression", "index", *ARGUMENTS)


@operator
class Expression(Elementwise):
    """expression(x): `elementwise("x * sigmoid(k * x)", k=1.702)`

    `expression` is a text, or a Python function of Scalars, which is traced and kept as text: its arguments
    are x and the parameters, by name. A text is kept as Python writes it, so that spacing makes no
    difference.

    It is made of numbers, names, + - * / **, comparisons by > >= < <= where `where` takes one, and of
    abs, erf, exp, expm1, log, log1p, maximum, minimum, pow, relu, round, sigmoid, softplus, sqrt, tanh and
    where(condition, a, b). In Python `abs` and `round` are Python's, `pow` is `**`, the others are
    `fuseplan.scalar`'s.

    `index(s)` is the element's place along the axis s, from 0: `where(index(s) >= index(t), x, -inf)` on
    f16[8x512x512, bst] hides the upper triangle. `index()` is the place among all elements, and
    `random(seed, offset)` an even number from 0 to 1, the same for a place on every target. Axes have their
    letters from the plan, n, c, and spatial ones unless a layout names others. In f32 an index must be below
    2^24.
    """

    name = "elementwise"

    expression: str
    values: tuple[tuple[str, float], ...]

    def __init__(self, /, expression: str | Callable[..., Scalar | float], **parameters: float) -> None:
        values = {name: real(self.name, name, value) for name, value in sorted(parameters.items())}
        for name in values:
            if not is_name(name, TAKEN):
                raise PlanError(
                    f"no parameter of elementwise can be named {shown(name)}", want=NAME, field=name
                )
        self._set("expression", written(self.name, "expression", expression, tuple(values)))
        self._set("values", tuple(values.items()))

    def apply(self, x: Scalar, **leaves: Scalar) -> Scalar:
        made = parse_expression(self.expression, ("x", *leaves))
        return replaced(made, {"x": x, **leaves})

    def parameters(self) -> tuple[Parameter, ...]:
        return tuple(Parameter(name, value) for name, value in self.values)

    def attributes(self) -> dict[str, object]:
        return {"expression": self.expression}

    def written(self) -> Iterator[tuple[str, object, bool]]:
        """The formula and each parameter: there are no defaults."""
        yield "expression", self.expression, False
        yield from ((name, value, False) for name, value in self.values)

    @classmethod
    def samples(cls) -> Iterator[tuple[str, Op]]:
        for src in SAMPLE_TENSORS:
            yield src, cls("x * sigmoid(k * x)", k=1.702)
        yield "f32[3x5]", cls(lambda x, low, high: (x - low) / (high - low), low=-1, high=3)
        yield "f32[2x5x3x7, nhwc]", cls("where(index(w) >= index(c), x, index())")
        yield "f32[2x3x7]", cls("x * random(seed, offset)", seed=3, offset=1)


def written(
    name: str, field: str, formula: str | Callable[..., Scalar | float], parameters: tuple[str, ...] = ()
) -> str:
    """The formula of an operator's field, as Python writes it; a function of Scalars is traced.

    Raises:
        PlanError: it is none, is a comparison, or does not use x and all parameters.
    """
    source = _traced(name, field, formula, parameters) if callable(formula) else formula
    if not isinstance(source, str):
        raise refused(name, field, "must be a formula", got=shown(source), want="a text or a function")
    try:
        _check_formula(name, parse_expression(source, ("x", *parameters)), source, parameters)
    except PlanError as error:
        error.field = field
        raise
    return ast.unparse(python_expression(source, "an expression", "x"))


def _check_formula(name: str, made: Scalar, source: str, parameters: tuple[str, ...]) -> None:
    unused = [each for each in ("x", *parameters) if each not in leaves_of(made)]
    if unused:
        raise PlanError(
            f"the formula of {name} does not use all its names",
            got=f"{source!r}, which is without {' '.join(unused)}",
            want="x and each of its parameters" if parameters else "x",
        )
    if made.is_condition:
        raise PlanError(
            f"the formula of {name} is a comparison, not a number",
            got=shown(source),
            want=f"such as where({source}, 1, 0)",
        )


def _traced(
    name: str, field: str, function: Callable[..., Scalar | float], parameters: tuple[str, ...]
) -> str:
    """The text of the expression that the function builds of its arguments."""
    try:
        return text(scalar(function(leaf("x"), **{each: leaf(each) for each in parameters})))
    except TypeError as error:
        if Scalar.__name__ not in str(error):
            raise  # the function's own
        raise refused(
            name,
            field,
            "calls a function of numbers or tensors, such as NumPy's or torch's",
            got=f"TypeError: {error}",
            want="the functions of fuseplan.scalar",
            remedy="For numpy.exp, write: from fuseplan.scalar import exp",
        ) from error
