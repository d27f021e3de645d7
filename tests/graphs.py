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
    """Normal values for each input."""
    rng = np.random.default_rng(seed)
    return {
        name: rng.standard_normal(made.shape or ()).astype(np.float32) for name, made in graph.inputs.items()
    }
