"""A plan's graph in Graphviz's language, and a plan in a notebook."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import Any

from fuseplan.language.tensor import Dense, TensorSpec
from fuseplan.plans.text import operator_text


def dot_text(src: TensorSpec, steps: Sequence[Any], fused: str | None = None) -> str:
    """The graph of a plan; `fused` is the title of a frame around all steps, which are one kernel."""
    lines = [
        "digraph plan {",
        "  node [fontname=monospace]",
        *_node("src", str(src), "box"),
        *([f"  subgraph cluster_kernel {{ label={json.dumps(fused)}"] if fused else []),
        *(line for step in steps for line in _node(_name(step.index), operator_text(step.op), "ellipse")),
        *(["  }"] if fused else []),
        *(line for step in steps for line in _given(step)),
        *_node("dst", str(steps[-1].dst if steps else src), "box"),
    ]
    chain = ["src", *(_name(step.index) for step in steps), "dst"]
    tensors = [None, *(str(step.dst) for step in steps[:-1]), None]
    for before, after, tensor in zip(chain, chain[1:], tensors, strict=False):
        label = f" [label={json.dumps(tensor)}]" if tensor else ""
        lines.append(f"  {before} -> {after}{label}")
    return "\n".join([*lines, "}"]) + "\n"


def _name(index: int) -> str:
    return f"operator_{index}"


def _node(name: str, label: str, shape: str) -> Iterator[str]:
    yield f"  {name} [shape={shape}, label={json.dumps(label)}]"


def _given(step: Any) -> Iterator[str]:
    """The step's operands and results, and the arrows from and to them."""
    for each in step.operands:
        yield from _tensor(each.key, Dense(each.shape, each.dtype))
        yield f"  {each.key} -> {_name(step.index)}"
    for each in step.results:
        yield from _tensor(each.key, each.spec)
        yield f"  {_name(step.index)} -> {each.key}"
    yield from (f"  {key} -> {_name(step.index)}" for key in step.op.again.values())


def _tensor(key: str, lies: TensorSpec | Dense) -> Iterator[str]:
    yield from _node(key, f"{key}: {lies}", "box, style=dashed")


def preformatted(text: str) -> str:
    """The HTML of a text with its lines and spaces."""
    return f"<pre>{escape(text)}</pre>"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """The HTML of a table; cells are code."""
    lines = ["".join(f"<th>{escape(each)}</th>" for each in head)]
    lines += ["".join(f"<td><code>{escape(str(cell))}</code></td>" for cell in row) for row in rows]
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


class PlanTable:
    """A plan that a notebook shows as a table: a row for each operator, with its operands and output."""

    def _repr_html_(self) -> str:
        plan: Any = self
        rows: list[Sequence[object]] = [("", "src", "", plan.src)]
        for step in plan.steps:
            given = [f"{each.key}: {Dense(each.shape, each.dtype)}" for each in step.operands]
            rows.append((step.index, operator_text(step.op), ", ".join(given), step.dst))
        return table(("", "operator", "operands", "output"), rows)
