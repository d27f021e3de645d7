"""How an exported kernel's operands are packed: for tensors of known extents alone."""

from __future__ import annotations

from fuseplan.errors import BuildError
from fuseplan.execution.runner import Packings, packings_of
from fuseplan.execution.stages import Records


def exported_packings(records: Records) -> Packings:
    """How the kernel reads each operand.

    Raises:
        BuildError: one is packed and has an open axis, for which there are no numbers to write.
    """
    found = packings_of(records.kernel, records.choice.template, records.target)
    for operand in records.kernel.operands:
        if found[operand.key] is not None and records.kernel.has_open(operand):
            raise BuildError(
                f"operand `{operand.key}` is packed, and has the open axis of {records.plan.src}: no number "
                "says how\n  Export plan.with_extents(...), or save the plan: a saved plan packs it"
            )
    return found
