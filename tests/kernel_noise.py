"""Finds arithmetic and masks in a GPU kernel's text that say nothing.

    assert not list(noise(source))

Whole numbers are followed as ranges, from the grid and from `arange` on, without the algebra that wrote them.
Faults are a comparison that always holds, a quotient that is always zero, a remainder that changes nothing, a
sum with zero, a product with one, a number made of two numbers, a name for a name, a mask that is computed
twice, and a mask that has a term twice.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import count
from math import inf

from fuseplan.kernels.emit import Source

Range = tuple[float, float]
EVERYTHING: Range = (-inf, inf)
ORDERS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)


def noise(source: Source) -> Iterator[str]:
    """Each fault: what it is, and the expression."""
    for function in ast.parse(source.text).body:
        if isinstance(function, ast.FunctionDef):
            yield from _Function(source).faults(function)


class _Function:
    def __init__(self, source: Source) -> None:
        self.grid = source.grid
        self.ranges: dict[str, Range] = {}
        self.masks: dict[str, frozenset[str]] = {}  # names of masks: the terms that they have
        self.versions: dict[str, int] = {}
        self.seen: set[str] = set()
        self.numbers = count()

    def faults(self, function: ast.FunctionDef) -> Iterator[str]:
        stored = [node.id for node in ast.walk(function) if isinstance(node, ast.Name) and _is_stored(node)]
        arguments = {argument.arg for argument in function.args.args}
        loops = {ast.unparse(node.target) for node in ast.walk(function) if isinstance(node, ast.For)}
        for statement in ast.walk(function):
            if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Name):
                (name,), other = _stored(statement), statement.value.id
                # a value that changes later needs a name before
                if stored.count(name) == 1 - (name in arguments) and stored.count(other) <= (
                    other not in arguments | loops
                ):
                    yield f"a name for a name: {ast.unparse(statement)}"
        yield from self._block(function.body)

    def _block(self, body: list[ast.stmt]) -> Iterator[str]:
        for statement in body:
            inner = [each for each in ast.iter_child_nodes(statement) if isinstance(each, ast.stmt)]
            if isinstance(statement, ast.For | ast.While):
                self._forget(_stored(statement))
            if isinstance(statement, ast.For):
                self._loop(statement)
            for each in ast.iter_child_nodes(statement):
                if isinstance(each, ast.expr):
                    yield from self._expression(each)
            yield from self._block(inner)
            if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                self._assign(statement.targets[0].id, statement.value)
            elif not isinstance(statement, ast.Expr):
                self._forget(_stored(statement))

    def _loop(self, loop: ast.For) -> None:
        """The variable's range, of `range`; its bounds are what they are before the loop."""
        assert isinstance(loop.target, ast.Name)
        if isinstance(loop.iter, ast.Call) and ast.unparse(loop.iter.func) == "range":
            first, *rest = [self._range(each) for each in loop.iter.args]
            begin, end = (first, rest[0]) if rest else ((0.0, 0.0), first)
            self.ranges[loop.target.id] = begin[0], end[1] - 1

    def _forget(self, names: set[str]) -> None:
        for name in names:
            self.ranges.pop(name, None)
            self.masks.pop(name, None)
            self.versions[name] = next(self.numbers)

    def _assign(self, name: str, value: ast.expr) -> None:
        found, terms = self._range(value), self._terms(value)
        self._forget({name})
        if found != EVERYTHING:
            self.ranges[name] = found
        if _is_mask(value):
            self.masks[name] = frozenset(terms)

    # ---- faults of an expression

    def _expression(self, root: ast.expr) -> Iterator[str]:
        for node in ast.walk(root):
            if isinstance(node, ast.BinOp) and self._is_idle(node):
                yield f"arithmetic that does nothing: {ast.unparse(node)}"
            if isinstance(node, ast.Compare) and self._always(node):
                yield f"a comparison that always holds: {ast.unparse(node)}"
        for mask in _masks(root):
            terms = self._terms(mask)
            if len(terms) != len(set(terms)):
                yield f"a term twice: {ast.unparse(mask)}"
            named = {node.id for node in ast.walk(mask) if isinstance(node, ast.Name)}
            key = f"{ast.unparse(mask)} {[(name, self.versions.get(name)) for name in sorted(named)]}"
            if key in self.seen:
                yield f"a mask again: {ast.unparse(mask)}"
            self.seen.add(key)

    def _is_idle(self, node: ast.BinOp) -> bool:
        left, right = _whole(node.left), _whole(node.right)
        if left is not None and right is not None:
            return True
        if isinstance(node.op, ast.Add | ast.Sub):
            return left == 0 or (right is not None and right <= 0)
        if isinstance(node.op, ast.Mult):
            return left in (0, 1) or right in (0, 1)
        if not isinstance(node.op, ast.FloorDiv | ast.Mod) or right is None:
            return False
        low, high = self._range(node.left)
        return right == 1 or (low >= 0 and high < right)

    def _always(self, node: ast.Compare) -> bool:
        if len(node.ops) > 1 or not isinstance(node.ops[0], ORDERS):
            return False
        (low, high), (other_low, other_high) = self._range(node.left), self._range(node.comparators[0])
        return {
            ast.Lt: high < other_low,
            ast.LtE: high <= other_low,
            ast.Gt: low > other_high,
            ast.GtE: low >= other_high,
        }[type(node.ops[0])]

    def _terms(self, node: ast.expr) -> list[str]:
        """The conditions of a conjunction; a name of a mask stands for its own."""
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd):
            return [*self._terms(node.left), *self._terms(node.right)]
        if isinstance(node, ast.Name) and node.id in self.masks:
            return sorted(self.masks[node.id])
        return [ast.unparse(node)]

    # ---- ranges

    def _range(self, node: ast.expr) -> Range:
        whole = _whole(node)
        if whole is not None:
            return whole, whole
        if isinstance(node, ast.Name):
            return self.ranges.get(node.id, EVERYTHING)
        if isinstance(node, ast.Subscript):
            return self._range(node.value)
        if isinstance(node, ast.BinOp):
            return _combined(node.op, self._range(node.left), self._range(node.right))
        return self._called(node) if isinstance(node, ast.Call) else EVERYTHING

    def _called(self, node: ast.Call) -> Range:
        name = ast.unparse(node.func)
        if name.endswith(".arange"):
            return 0, self._range(node.args[1])[1] - 1
        if name.endswith(".program_id"):
            return 0, self.grid[int(self._range(node.args[0])[0])] - 1
        if name.endswith(".minimum"):
            first, second = map(self._range, node.args)
            return min(first[0], second[0]), min(first[1], second[1])
        if name.endswith(".to") and isinstance(node.func, ast.Attribute):
            return self._range(node.func.value)
        return EVERYTHING


def _combined(op: ast.operator, first: Range, second: Range) -> Range:
    if EVERYTHING in (first, second) and not isinstance(op, ast.Mod):
        return EVERYTHING
    if isinstance(op, ast.Add):
        return first[0] + second[0], first[1] + second[1]
    if isinstance(op, ast.Sub):
        return first[0] - second[1], first[1] - second[0]
    if isinstance(op, ast.Mult) and inf not in (*map(abs, first), *map(abs, second)):
        ends = [one * other for one in first for other in second]
        return min(ends), max(ends)
    if second[0] == second[1] > 0 and first[0] >= 0:
        if isinstance(op, ast.FloorDiv):
            return first[0] // second[0], first[1] // second[0]
        if isinstance(op, ast.Mod):
            return (0, second[0] - 1) if first[1] >= second[0] else first
    return EVERYTHING


def _whole(node: ast.expr) -> int | None:
    """The whole number that is written there."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = _whole(node.operand)
        return None if inner is None else -inner
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    return None


def _is_mask(node: ast.expr) -> bool:
    """Whether it is a condition: a comparison, or several."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd):
        return any(isinstance(each, ast.Compare) or _whole(node.right) is None for each in ast.walk(node))
    return isinstance(node, ast.Compare) and isinstance(node.ops[0], ORDERS)


def _masks(root: ast.expr) -> Iterator[ast.expr]:
    """The widest conditions in an expression."""
    if _is_mask(root):
        yield root
        return
    for child in ast.iter_child_nodes(root):
        if isinstance(child, ast.expr | ast.keyword):
            yield from _masks(child.value if isinstance(child, ast.keyword) else child)


def _is_stored(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def _stored(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and _is_stored(each)}
