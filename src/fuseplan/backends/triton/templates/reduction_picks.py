"""Parts of statistics that are the value of one element, which is loaded instead of summed with zeros."""

from __future__ import annotations

from fuseplan.backends.lattice import Lattice
from fuseplan.kernels.kernel import Kernel
from fuseplan.language.dtypes import dtype_of
from fuseplan.language.reduction import INDEX, Part
from fuseplan.scalar import Scalar, leaf, leaves_of, where


def picks(kernel: Kernel, lattice: Lattice) -> dict[Part, str]:
    """The parts that are the value of x at a cell's index, or 0, each with the operand that has the index.

    So is cross-entropy's logit of the target. The sum takes six instructions of an element's twenty.
    """
    if INDEX not in lattice.tensors or len(lattice.elements) != 1 or len(lattice.starts) > 1:
        return {}
    (axis,) = lattice.elements
    steps = dict(zip(lattice.tensors, axis.steps, strict=True))
    if steps[INDEX] != 1:
        return {}
    whole = [op.key for op in kernel.operands if not (dtype_of(op.dtype).is_float or steps[op.key])]
    parts = [part for each in kernel.statistics for part in each.parts if part.join == "add"]
    return {part: key for part in parts for key in whole if _is_value_at(part.term, key)}


def _is_value_at(term: Scalar, key: str) -> bool:
    """Whether a term is a value of x where the index is the operand's, and 0 elsewhere."""
    if term.fn != "where" or not leaves_of(term.args[1]) <= {"x"}:
        return False
    return term == where(abs(leaf(INDEX) - leaf(key)) < 0.5, term.args[1], 0)
