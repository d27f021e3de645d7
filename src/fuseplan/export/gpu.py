"""A kernel for a GPU as files: the binary and the assembly that vendors' tools read, and how to launch it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any

from fuseplan.backends.triton import toolchain
from fuseplan.backends.triton.artifact import Artifact
from fuseplan.execution.runner import Packings
from fuseplan.execution.stages import Records
from fuseplan.export.packings import exported_packings
from fuseplan.kernels.emit import COUNTER_BYTES, Slot

SUFFIXES = {"sm": (".cubin", ".ptx"), "gfx": (".hsaco", ".s")}


def gpu_files(records: Records, output: Path) -> dict[Path, bytes]:
    """The contents of each file: the binary, its assembly, and a JSON that says how it is launched.

    Raises:
        BuildError: triton is missing, or refuses the source.
    """
    artifact = toolchain.artifact(records.source, records.kernel, records.choice.template, records.target)
    vendor = "gfx" if artifact.architecture.startswith("gfx") else "sm"
    binary, assembly = (output.with_suffix(suffix) for suffix in SUFFIXES[vendor])
    told = {"binary": binary.name, "assembly": assembly.name, **launch_of(records, artifact)}
    return {
        binary: artifact.binary,
        assembly: artifact.assembly.encode(),
        output.with_suffix(".json"): (json.dumps(told, indent=1) + "\n").encode(),
    }


def launch_of(records: Records, artifact: Artifact) -> dict[str, Any]:
    """All that a launch has to be told, as JSON values."""
    source = records.source
    return {
        "plan": str(records.plan),
        "target": str(records.target),
        "template": records.choice.template.text,
        "entry": artifact.entry,
        "grid": list(source.grid),
        **({"open": _open(records)} if records.plan.is_open else {}),
        "block": [artifact.threads, 1, 1],
        "shared_bytes": artifact.shared_bytes,
        "cooperative": bool(dict(source.options).get("cooperative")),
        "workspace_bytes": source.workspace(1),
        "workspace_zeros": COUNTER_BYTES
        if source.workspace(1)
        else 0,  # at its front, before its first launch
        "src": str(records.plan.src),
        "dst": str(records.plan.output),
        "operands": dict(_operands(records, exported_packings(records))),
        "arguments": list(_arguments(records, artifact)),
    }


def _open(records: Records) -> dict[str, Any]:
    """What an extent of the open axes sets: `extent`, the grid's first number, tensor maps, the workspace.

    The grid has `across` programs for each of ceil(extent x rows / tile) tiles, at most `most` if that is
    not 0. The extent of a map's `axis` is `per_extent` times the extent, where that is not 0. The workspace
    has `workspace_bytes_per_extent` more bytes for each of its elements.
    """
    source, told = records.source, {"extent": "elements along all open axes, 1 or more"}
    assert source.programs is not None
    more = source.workspace_bytes_per_extent
    return {**told, "programs": asdict(source.programs), "workspace_bytes_per_extent": more}


def _operands(records: Records, packings: Packings) -> Iterator[tuple[str, Any]]:
    """How each operand lies: as a tensor of the plan, or packed."""
    for operand in records.plan.operands:
        packing = packings[operand.key]
        if packing is None:
            yield operand.key, {"tensor": str(records.plan[operand.step].dst)}
            continue
        shape, dtype, steps = packing.to_json()
        packed = {"dtype": dtype, "shape": list(packing.extents), "elements": prod(packing.extents)}
        yield operand.key, {"logical_shape": shape, "packed": packed, "steps": steps}


def _arguments(records: Records, artifact: Artifact) -> Iterator[dict[str, Any]]:
    """Every argument of the binary in its order: slots, what follows tensor maps, and two null pointers."""
    values = {each.key: each.value for each in records.plan.parameters}
    for place, (slot, kind) in enumerate(zip(records.source.slots, artifact.types, strict=True)):
        if slot.map is not None:
            yield from _mapped(slot, artifact.maps[place].swizzle, artifact.maps[place].box)
        elif slot.kind == "parameter":
            yield {"slot": str(slot), "type": kind, "value": values[slot.key]}
        elif slot.kind == "parameters":
            yield {"slot": str(slot), "type": kind, "values": list(values.values())}
        else:
            yield {"slot": str(slot), "type": kind}
    yield from ({"slot": "scratch", "type": "*i8", "value": 0} for _ in range(2))


def _mapped(slot: Slot, swizzle: int, box: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """A tensor map for cuTensorMapEncodeTiled, `begin` bytes behind the slot; strides are elements."""
    assert slot.map is not None
    yield {
        "slot": str(slot),
        "type": "tensor map",
        "map": asdict(slot.map) | {"swizzle": swizzle, "box": box},
    }
    yield from ({"type": "i32", "value": extent} for extent in slot.map.shape)
    yield from ({"type": "i64", "value": stride} for stride in slot.map.strides)
