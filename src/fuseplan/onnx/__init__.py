"""Models of ONNX: read, cut into plans, and run on NumPy arrays.

    y = fuseplan.onnx.load("model.onnx").run(None, {"x": x})[0]

- model: `load`, and the model that runs; files: models on disk
- reader: a model as a graph; table: the graph's operators of each of ONNX's; rows: its longer rows
- runtime: what runs the operators that no plan computes; writing: models with plans as functions
- profiling: the time of each operator
- given, protos: ONNX's messages as values of ours
"""

from __future__ import annotations

from typing import Any

__all__ = ["OnnxModel", "Type", "load"]


def __getattr__(name: str) -> Any:
    """Loads what needs the package onnx when it is asked for."""
    if name not in __all__:
        raise AttributeError(f"module 'fuseplan.onnx' has no attribute {name!r}")
    from fuseplan.onnx import model

    return getattr(model, name)
