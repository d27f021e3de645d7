"""Graphs as tests write them: a text, and random constants of the sizes that it declares."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np

from fuseplan.graph.graph import Graph
from fuseplan.graph.type import Type


def graph_of(text: str, seed: int = 0) -> Graph:
    """The graph of a text; positive constants, so that they serve as variances too."""
    rng = np.random.default_rng(seed)
    constants: dict[str, Any] = {}
    for name, written in re.findall(r"^constant (\S+): (\S+\])$", text, re.MULTILINE):
        shape = Type.parse(written).shape or ()
        scale = float(math.prod(shape[1:])) ** -0.5
        constants[name] = (rng.uniform(0.5, 1.5, shape) * scale).astype(np.float32)
    return Graph.parse(text, constants)


def random_inputs(graph: Graph, seed: int = 1) -> dict[str, Any]:
    """Normal values for each input; of bool, whether they are above -1/2."""
    rng = np.random.default_rng(seed)
    drawn = {name: rng.standard_normal(made.shape or ()) for name, made in graph.inputs.items()}
    is_bool = {name: made.dtype == "bool" for name, made in graph.inputs.items()}
    return {name: each > -0.5 if is_bool[name] else each.astype(np.float32) for name, each in drawn.items()}
