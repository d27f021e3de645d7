"""What a graph is made of: nodes with named inputs and results."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from fuseplan.graph.op import GraphOp, Tensor
from fuseplan.graph.type import Type
from fuseplan.graph.why import Reason

_CALLED = re.compile(r'File "([^"]+)", line (\d+), in [^\n]+(?:\n +(\S[^\n]*))?')


class Origin(NamedTuple):
    """The operator of the framework that a node stands for: name, kind (`Conv`), and line of source."""

    name: str
    kind: str
    line: str = ""


def line_of(trace: str | None) -> str:
    """The last line of source in a trace of Python's that is not torch's own; empty for none.

    Such as `model.py:12: x = self.conv(x)`.
    """
    calls = [(path.replace("\\", "/"), number, code) for path, number, code in _CALLED.findall(trace or "")]
    own = [each for each in calls if "/torch/" not in each[0]] or calls
    *_, (path, number, code) = [("", "", ""), *own]
    where = f"{path.rpartition('/')[2]}:{number}"
    return f"{where}: {code}" if code else where if path else ""


@dataclass(frozen=True)
class Node:
    """An operator with the names of its inputs and results.

    Attributes:
        inputs: names of values; empty where an optional input of another library's operator is left out.
        outputs: names of the results; empty where a result is not wanted.
        origin: the framework's operator; nodes are compared without it.
        why: the front end's reason to leave it to its library; None where the table has no row for it.
    """

    op: GraphOp
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    origin: Origin = field(default=Origin("", ""), compare=False)
    why: Reason | None = field(default=None, compare=False)


class Stored(NamedTuple):
    """The integers that a constant was dequantized from, elements of i8; its scales line up with them."""

    integers: Tensor
    scale: Tensor


@dataclass
class Parts:
    """The parts of a graph, unchecked.

    Attributes:
        inputs: the types of the inputs, by name.
        nodes: each after the nodes that make its inputs.
        outputs: names of values.
        constants: arrays by name: weights, and what the reader computed.
        folded: the framework's operators that the reader computed, because they depend on constants alone, or
            took away, because they change nothing.
        stored: of constants that were dequantized, the integers.
    """

    inputs: dict[str, Type] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    constants: dict[str, Tensor] = field(default_factory=dict)
    folded: list[Origin] = field(default_factory=list)
    stored: Mapping[str, Stored] = field(default_factory=dict)


def told(node: Node) -> str:
    """A node in messages: its name in the framework, or its operator and first result."""
    if node.origin.name:
        return f"{node.origin.name} ({node.origin.kind})"
    return f"{node.op.word} -> {next(filter(None, node.outputs), 'nothing')}"


def unlike(taken: Collection[str], name: str) -> str:
    """A name that is none of those that are taken."""
    return name if name not in taken else unlike(taken, f"{name}'")
