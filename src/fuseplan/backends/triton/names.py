"""Triton's names of the dtypes."""

from __future__ import annotations

SIGNATURES = {"f64": "fp64", "f32": "fp32", "f16": "fp16", "bf16": "bf16"}  # in the types of arguments
NAMES = {"f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16"}


def named(dtype: str, namespace: str = "tl") -> str:
    """The dtype in a kernel's text: `tl.float16`."""
    return f"{namespace}.{NAMES[dtype]}"
