"""The text and JSON forms of a plan: `f16[64x256x55x55, nhwc] -> conv2d(64, kernel=1) -> bias -> relu`.

The text of an operator is a call of its word. Its first field may stand without a name, fields at their
default are left out, and a string that is a word needs no quotes.
"""

from __future__ import annotations

import ast
import json
import keyword
import math
from collections.abc import Collection, Iterable
from typing import Any

from fuseplan.errors import PlanError, counted, did_you_mean
from fuseplan.language.extents import OPEN
from fuseplan.language.fields import fields_of, no_field
from fuseplan.language.syntax import check_joined, check_length, number, python_expression, span_of
from fuseplan.language.tensor import TensorSpec
from fuseplan.messages.excerpt import ARROW, Span, bounded, segments, shown
from fuseplan.op import Op
from fuseplan.ops import BY_NAME, no_operator
from fuseplan.plans import naming
from fuseplan.scalar import number as number_text
from fuseplan.system import limits

CALL = "such as conv2d(64, kernel=3, padding=same), or bias"
JSON_KINDS: dict[type, str] = {dict: "an object", list: "an array", str: "a text"}


def plan_text(src: TensorSpec, ops: Iterable[Op]) -> str:
    """The text of a plan; the names of src's axes are left out where the operators give the same ones."""
    listed = list(ops)
    return joined(src.text(names_layout=not naming.are_implied(src, listed)), listed)


def named_text(src: TensorSpec, ops: Iterable[Op]) -> str:
    """The text of a plan with the names of src's axes."""
    return joined(str(src), ops)


def joined(src: str, ops: Iterable[Op]) -> str:
    """The texts of a tensor and of operators as a plan's."""
    return f" {ARROW} ".join([src, *map(operator_text, ops)])


def operator_text(op: Op, *, parameters: bool = True) -> str:
    """The text of an operator; without `parameters`, of its attributes alone."""
    given = {each.name for each in op.parameters()}
    fields = []
    for position, (name, value, is_default) in enumerate(op.written()):
        if is_default or (name in given and not parameters):
            continue
        bare = position == 0 and not isinstance(value, bool)
        shown = value_text(value, parameters=parameters)
        fields.append(shown if bare else f"{name}={shown}")
    return f"{op.name}({', '.join(fields)})" if fields else op.name


def value_text(value: object, *, parameters: bool = True) -> str:
    """The text of a field's value; an operator is written with or without its parameters."""
    if isinstance(value, Op):
        return operator_text(value, parameters=parameters)
    if isinstance(value, str):
        is_word = value.isidentifier() and not keyword.iskeyword(value) and value != "inf"
        return value if is_word else json.dumps(value, ensure_ascii=False)
    if isinstance(value, tuple):
        return f"({', '.join(map(value_text, value))}{',' * (len(value) == 1)})"
    return number_text(value) if isinstance(value, float) else str(value)


def parse_plan(text: str) -> tuple[TensorSpec, list[Op]]:
    """The src and the operators in a plan's text; `FusionPlan` checks that they fit together.

    Raises:
        PlanError: a piece cannot be read; carets stand under it.
    """
    if not isinstance(text, str):
        raise PlanError("a plan is read from its text", got=shown(text))
    check_length(text, "the text of a plan", limits.TEXT_CHARACTERS)
    pieces = segments(text)
    check_count(len(pieces) - 1)
    src = _read(TensorSpec.parse, text, pieces[0], None)
    return src, [_read(parse_operator, text, piece, index) for index, piece in enumerate(pieces[1:])]


def check_count(operators: int) -> None:
    """Refuses a plan of more operators than one may have; a PlanError where there are more."""
    if operators > limits.OPERATORS:
        raise PlanError(f"a plan has at most {limits.OPERATORS} operators", got=operators)


def _read(parse: Any, text: str, piece: Span, operator: int | None) -> Any:
    """`parse` of one piece of the text; an error says where in the whole."""
    begin, end = piece
    try:
        return parse(text[begin:end])
    except PlanError as error:
        inner = error.span or (0, end - begin)
        raise error.located(text, operator, (begin + inner[0], begin + inner[1])) from None


def parse_operator(text: str) -> Op:
    """The operator that a text names.

    Raises:
        PlanError: it names none; carets stand under the piece to blame.
    """
    if not text:
        raise PlanError("an operator is missing", want=CALL, text=text, span=(0, 0))
    check_joined(text)
    try:
        return _operator(text, python_expression(text, "an operator", CALL))
    except RecursionError:
        raise PlanError("this is not an operator", want=CALL, text=text, span=(0, len(text))) from None


def _operator(text: str, tree: ast.expr) -> Op:
    """The operator that a node of the text's tree names."""
    call = tree if isinstance(tree, ast.Call) else ast.Call(tree, [], [])
    if not isinstance(call.func, ast.Name):
        raise PlanError("this is not an operator", want=CALL, text=text, span=span_of(text, tree))
    word = call.func.id
    if word not in BY_NAME:
        raise no_operator(word).located(text, span=span_of(text, call.func))
    kind = BY_NAME[word]
    nodes = _fields(text, call, kind)
    inner = kind.inner_names()
    values = {name: (_operator if name in inner else _value)(text, node) for name, node in nodes.items()}
    try:
        return kind(**values)
    except PlanError as error:
        raise error.located(text, span=_blamed(text, tree, nodes, error)) from None


def _fields(text: str, call: ast.Call, kind: type[Op]) -> dict[str, ast.expr]:
    """The node of each field that the call writes."""
    names, required, is_open = fields_of(kind)
    found: dict[str, ast.expr] = {}
    for position, node in enumerate(call.args):
        if position >= 1 or not names:
            is_too_many = len(names) <= position and not is_open
            count = counted(len(names), "field") if names else "no fields"
            whole = f"({', '.join(map(ast.unparse, call.args))})"
            several = f"{kind.name}({whole}), or " if names[:1] == ["axes"] else ""
            few = "only the first field may stand without its name"
            raise PlanError(
                f"{kind.name} has {count}" if is_too_many else few,
                want=f"{several}{names[position]}=..." if names[position:] else None,
                text=text,
                span=span_of(text, node),
            )
        found[names[0]] = node
    for given in call.keywords:
        name = given.arg or "**"
        if name in found or not (name in names or (is_open and given.arg)):
            error = PlanError(f"{name} is given twice") if name in found else no_field(kind, name)
            raise error.located(text, span=span_of(text, given))
        found[name] = given.value
    missing = [name for name in required if name not in found]
    if missing:
        _, sample = next(iter(kind.samples()))
        raise PlanError(
            f"{kind.name} needs {' and '.join(missing)}",
            want=f"such as {operator_text(sample)}",
            text=text,
            span=span_of(text, call.func),
        )
    return found


def _value(text: str, node: ast.expr) -> Any:
    """A number, a truth value, a word or a quoted string, or a tuple of them."""
    match node:
        case ast.Constant(value=bool() | int() | str() as value):
            return value
        case ast.Constant(value=float() as value):
            return _number_at(text, node, value)
        case ast.Name(id=word):
            return math.inf if word == "inf" else word
        case ast.Tuple(elts=elements) | ast.List(elts=elements):
            return tuple(_value(text, element) for element in elements)
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=operand):
            inner = _value(text, operand)
            if isinstance(inner, int | float) and not isinstance(inner, bool):
                return -inner if isinstance(sign, ast.USub) else inner
    raise PlanError(
        "this is not a value",
        want="a number, a word, a quoted text or a tuple",
        text=text,
        span=span_of(text, node),
    )


def _number_at(text: str, node: ast.expr, value: float) -> float:
    try:
        return number(value)
    except PlanError as error:
        raise error.located(text, span=span_of(text, node)) from None


def _blamed(text: str, call: ast.expr, nodes: dict[str, ast.expr], error: PlanError) -> Span:
    """The span of the carets: a piece of a quoted text, a field, or the whole operator."""
    node = nodes.get(error.field or "")
    if node is None:
        return span_of(text, call)
    begin, end = span_of(text, node)
    if error.span is not None and text[begin + 1 : end - 1] == error.text:
        return begin + 1 + error.span[0], begin + 1 + error.span[1]
    return begin, end


def plan_json(src: TensorSpec, ops: Iterable[Op]) -> str:
    """The JSON of a plan: `{"src": ..., "operators": [{"name": ..., "fields": {...}}, ...]}`; null is `*`."""
    shape = [None if extent is OPEN else extent for extent in src.shape]
    tensor: dict[str, object] = {"shape": shape, "dtype": src.dtype}
    tensor |= {"strides": src.strides} if src.strides else {"layout": src.layout_text}
    tensor |= {"names": src.names} if src.strides and not src.has_channel_names else {}
    return json.dumps({"src": tensor, "operators": list(map(_written, ops))}, allow_nan=False)


def _written(op: Op) -> dict[str, object]:
    """An operator, with the fields that are not at their default."""
    fields = {name: _written_value(value) for name, value, is_default in op.written() if not is_default}
    return {"name": op.name, "fields": fields}


def _written_value(value: object) -> object:
    """A field's value; JSON has no infinities, so they are words there."""
    if isinstance(value, Op):
        return _written(value)
    return number_text(value) if isinstance(value, float) and math.isinf(value) else value


def parse_json(text: str) -> tuple[TensorSpec, list[Op]]:
    """The src and the operators in a plan's JSON; `FusionPlan` checks that they fit together.

    Raises:
        PlanError: it is broken, or says something else; the message says where.
    """
    whole = _loaded(text)
    _check_members("the plan", whole, {"src": dict, "operators": list}, ())
    check_count(len(whole["operators"]))
    return _json_tensor(whole["src"]), [
        _json_operator(f"operators[{index}]", each) for index, each in enumerate(whole["operators"])
    ]


def _loaded(text: str) -> Any:
    if not isinstance(text, str):
        raise PlanError("this is not a plan's JSON: it is read from its text", got=shown(text))
    check_length(text, "the JSON of a plan", limits.JSON_CHARACTERS)
    try:
        return json.loads(text, object_pairs_hook=_members, parse_constant=_no_constant, parse_float=_number)
    except json.JSONDecodeError as error:
        line = error.doc.splitlines()[error.lineno - 1] if error.doc.strip() else ""
        column = error.colno - 1
        problem = f"this is not JSON: {error.msg}, at line {error.lineno}, column {error.colno}"
        raise PlanError(problem, text=line, span=(column, column)) from None
    except (TypeError, ValueError, RecursionError) as error:
        raise PlanError(f"this is not a plan's JSON: {error}") from None


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object's members; a name given twice is refused, where JSON would quietly take the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is given twice")
    return found


def _number(digits: str) -> float:
    return number(float(digits))


def _no_constant(word: str) -> float:
    raise ValueError(f'{word} is no number in JSON; write the word "inf" for an infinity')


def _check_members(where: str, value: Any, needed: dict[str, type], optional: Collection[str]) -> None:
    """Checks that a JSON value is an object with these members."""
    if not isinstance(value, dict):
        raise PlanError(f"{where} is an object in a plan's JSON", got=_shown(value))
    for name in value:
        if name not in needed and name not in optional:
            remedy = did_you_mean(name, [*needed, *optional])
            raise PlanError(f"{where} has no member {shown(name)} in a plan's JSON", remedy=remedy)
    for name, kind in needed.items():
        if not isinstance(value.get(name), kind):
            got = _shown(value[name]) if name in value else "nothing"
            raise PlanError(f"{where} needs {shown(name)} in a plan's JSON", got=got, want=JSON_KINDS[kind])


def _shown(value: Any) -> str:
    return bounded(json.dumps(value), limits.SHOWN_VALUE_CHARACTERS)


def _json_tensor(member: dict[str, Any]) -> TensorSpec:
    _check_members("src", member, {"shape": list, "dtype": str}, ("layout", "strides", "names"))
    try:
        return TensorSpec(**member)
    except PlanError as error:
        raise _at("src", error) from None


def _json_operator(where: str, member: Any) -> Op:
    _check_members(where, member, {"name": str, "fields": dict}, ())
    kind = BY_NAME.get(member["name"])
    if kind is None:
        raise _at(where, no_operator(member["name"]))
    inner = kind.inner_names()
    fields = {
        name: _json_operator(f"{where}.fields.{name}", value) if name in inner else _json_value(value)
        for name, value in member["fields"].items()
    }
    try:
        return kind(**fields)
    except PlanError as error:
        raise _at(where, error) from None


def _at(where: str, error: PlanError) -> PlanError:
    error.what = f"{where}: {error.what}"
    return error


def _json_value(value: Any) -> Any:
    """A field's value: JSON's lists are tuples, and its words `inf` and `-inf` are numbers."""
    if isinstance(value, list):
        return tuple(map(_json_value, value))
    return {"inf": math.inf, "-inf": -math.inf}.get(value, value) if isinstance(value, str) else value
