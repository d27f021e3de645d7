"""Writes the text of a generated kernel, line by line."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from fuseplan.backends.triton.index import Index, Mask

# Names that stand for the same in every function of a text.
KNOWN = {"tl", "gl", "tma", "mbarrier", "fence_async_shared"}


class Text:
    """Lines of Python, indented by the blocks they stand in; names made here are never met twice.

    Attributes:
        converts: fp8 dtypes that the GPU's own instructions convert.
    """

    def __init__(self) -> None:
        self.functions: list[list[str]] = []
        self.converts: frozenset[str] = frozenset()
        self._lines: list[str] = []
        self._depth = 0
        self._names: dict[str, int] = {}
        self._called: dict[tuple[str, ...], tuple[str, list[str], int]] = {}  # functions and their names
        self._both: dict[str, Mask] = {}

    def line(self, *lines: str) -> None:
        """Appends lines at the present depth; an empty one stays empty."""
        self._lines += [" " * 4 * self._depth + line if line else "" for line in lines]

    @contextmanager
    def block(self, head: str) -> Iterator[None]:
        """Lines inside of `head:`."""
        self.line(f"{head}:")
        self._depth += 1
        yield
        self._depth -= 1

    @contextmanager
    def headed(self, comment: str) -> Iterator[None]:
        """Lines below a comment; without lines there is none."""
        self.line(f"# {comment}")
        before = len(self._lines)
        yield
        if len(self._lines) == before:
            self._lines.pop()

    @contextmanager
    def function(self, head: str) -> Iterator[None]:
        """Lines of a function `def head:`, which stands by itself, before the one that is being written."""
        outer = self._lines, self._depth
        self._lines, self._depth = [], 0
        with self.block(f"def {head}"):
            yield
        self.functions.append(self._lines)
        self._lines, self._depth = outer

    def name(self, stem: str) -> str:
        """A name that begins with `stem` and is new in this text."""
        number = self._names.get(stem, 0)
        self._names[stem] = number + 1
        return f"{stem}_{number}"

    def let(self, stem: str, value: str) -> str:
        """Writes `name = value` and gives the name, which is new."""
        name = self.name(stem)
        self.line(f"{name} = {value}")
        return name

    def index(self, name: str, value: Index) -> Index:
        """Writes `name = value`; a number or a name stays what it is, and nothing is written."""
        if value.constant is not None or value.text.isidentifier():
            return value
        self.line(f"{name} = {value}")
        return value.named(name)

    def mask(self, name: str, value: Mask) -> Mask:
        """Writes `name = value`; nothing where everything exists or the mask is a name already."""
        if not value or str(value).isidentifier():
            return value
        self.line(f"{name} = {value}")
        return value.named(name)

    def both(self, value: Mask) -> Mask:
        """A mask of several terms by its name, which is written where it is asked for first."""
        if len(value.terms) < 2:
            return value
        if str(value) not in self._both:
            self._both[str(value)] = self.mask(self.name("mask"), value)
        return self._both[str(value)]

    def call(
        self,
        name: str,
        given: Mapping[str, str],
        write: Callable[[], Sequence[str]],
        into: Sequence[str] = (),
    ) -> list[str]:
        """Writes a call of a function whose body is written once; the names of its results.

        Args:
            given: the values of names in the body that differ from call to call; its other names from outside
                are passed as they are. Calls that give other names are of a function of their own.
            write: writes the body, and gives the names that it returns; asked once.
            into: names that take the results; new ones without it.
        """
        known = (name, *given)
        if known not in self._called:
            is_first = all(name != each[0] for each in self._called)
            self._called[known] = self._defined(name if is_first else self.name(name), write)
        function, taken, results = self._called[known]
        call = f"{function}({', '.join(given.get(each, each) for each in taken)})"
        made = list(into or [self.name(name) for _ in range(results)])
        self.line(f"{', '.join(made)} = {call}" if made else call)
        return made

    def _defined(self, name: str, write: Callable[[], Sequence[str]]) -> tuple[str, list[str], int]:
        """The function's name, the names that it takes and the number of its results."""
        with self.function(name):
            results = write()
            if results:
                self.line(f"return {', '.join(results)}")
        head, *body = self.functions[-1]
        taken = list(_from_outside(ast.parse("\n".join(["if True:", *body])).body, set()))
        self.functions[-1][0] = head.replace(f"{name}:", f"{name}({', '.join(taken)}):")
        return name, taken, len(results)

    def __str__(self) -> str:
        return "\n".join(self._lines) + "\n"


def _from_outside(statements: Sequence[ast.stmt], made: set[str]) -> dict[str, None]:
    """The names that statements read before they write them, in order; `made` takes those they write."""
    found: dict[str, None] = {}
    for statement in statements:
        inner = [each for each in ast.iter_child_nodes(statement) if isinstance(each, ast.stmt)]
        own = [each for each in ast.iter_child_nodes(statement) if not isinstance(each, ast.stmt)]
        nodes = [node for each in own for node in ast.walk(each)]
        called = [node.func for node in nodes if isinstance(node, ast.Call)]  # functions of the text
        names = [node for node in nodes if isinstance(node, ast.Name) and node not in called]
        is_both = isinstance(statement, ast.AugAssign)
        read = [name.id for name in names if is_both or isinstance(name.ctx, ast.Load)]
        found |= dict.fromkeys(name for name in read if name not in made | KNOWN)
        made |= {name.id for name in names if isinstance(name.ctx, ast.Store)}
        found |= _from_outside(inner, made)
    return found
