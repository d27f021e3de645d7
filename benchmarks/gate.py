"""What must hold of every compiled kernel: faults that cost speed and that no result shows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

from fuseplan.kernels.emit import Source
from fuseplan.kernels.target import Target

PRODUCTS = ("tl.dot(", "warpgroup_mma(")
NARROW = ("fp16", "bf16")


def faults(
    source: Source, types: tuple[str, ...], used: Mapping[str, int], target: Target, allowed_spill: int = 0
) -> Iterator[str]:
    """Each thing that is wrong with a kernel, in words.

    Args:
        source: what it was made of.
        types: of its arguments.
        used: its resources.
        target: what it is for.
        allowed_spill: bytes that it may spill.
    """
    if used["spill_bytes"] > allowed_spill:
        yield f"spills {used['spill_bytes']} bytes of registers; at most {allowed_spill} are allowed"
    if used["serialized"]:
        yield "its matrix instructions are serialized"
    if used["shared_bytes"] > target.l1_bytes:
        yield f"needs {used['shared_bytes']} bytes of shared memory of {target.l1_bytes}"
    if not used["programs"]:
        yield "not even one program fits on a multiprocessor"
    places, programs = used["programs"] * target.processors, prod(source.grid)
    if dict(source.options).get("cooperative") and programs > places:
        yield f"its {programs} programs wait for each other, and {places} can run at once"
    reads = [slot for slot in source.slots if slot.map is not None and slot.kind != "dst"]
    if reads and not used.get("tma_loads"):
        yield "has tensor maps, but reads none"
    if _wants_matrix_instructions(source, types) and not _matrix_instructions(used):
        yield "has products, but no matrix instruction"


def _wants_matrix_instructions(source: Source, types: tuple[str, ...]) -> bool:
    """Products of 16-bit elements and exact ones of i8, which every GPU has instructions for.

    Of f32 where TF32 is asked.
    """
    is_product = any(word in source.text for word in PRODUCTS)
    is_narrow = any(name in kind for name in NARROW for kind in types)
    is_asked = any(word in source.text for word in ("tf32", "out_dtype=tl.int32"))
    return is_product and (is_narrow or is_asked)


def _matrix_instructions(used: Mapping[str, int]) -> int:
    return sum(used.get(name, 0) for name in ("wgmma", "mma", "mfma", "wmma"))
