"""Graphviz's text of a plan: tensors as boxes, operators as ellipses, operands beside them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from fuseplan.language.tensor import Dense, TensorSpec
from fuseplan.plans.text import operator_text


def dot_text(src: TensorSpec, steps: Sequence[Any], fused: str | None = None) -> str:
    """The graph of a plan.

    Args:
        fused: what makes one kernel of them; they stand in a frame with this title.
    """
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
