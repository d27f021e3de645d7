"""Triton's names of the dtypes; those of arguments' types are in the table of `dtypes`."""

from __future__ import annotations

from fuseplan.language.dtypes import dtype_of

_NAMES = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_NAMES |= {"u8": "uint8", "i8": "int8", "i32": "int32"}


def named(dtype: str, namespace: str = "tl") -> str:
    """The dtype in a kernel's text: `tl.float16`."""
    return f"{namespace}.{_NAMES[dtype_of(dtype).triton]}"
