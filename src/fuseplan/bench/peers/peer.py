"""What a peer is: something that prepares a plan with its arrays and can then be called again and again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fuseplan.measure.layers import CannotRunError
from fuseplan.measure.spaces import Tensors
from fuseplan.plans.plan import FusionPlan

Array = NDArray[Any]
Arrays = Mapping[str, Array]  # `src` and every operand by its key, each of logical shape


@dataclass(frozen=True)
class Prepared:
    """A plan made ready: weights bound, outputs allocated.

    Attributes:
        call: runs it once; with several copies of the arrays, on the next of them each time.
        result: runs it on the first copy and gives its output, in logical order; of a plan with further
            results a tuple, the output first.
        facts: what a result line says of it: template, knobs, traffic.
    """

    call: Callable[[], object]
    result: Callable[[], Any]
    facts: Mapping[str, Any] = field(default_factory=dict)


class Peer:
    """A library in one of its forms; on a CPU made in a process of its own.

    Args:
        threads: of a CPU; None on a GPU.

    Raises:
        ImportError: its package is not installed.
    """

    name: ClassVar[str]
    packages: ClassVar[tuple[str, ...]] = ()

    def __init__(self, threads: int | None = None) -> None:
        self.threads = threads

    def takes(self, plan: FusionPlan) -> bool:
        """Whether it is measured for the plan at all, on a GPU."""
        return True

    def asked(self, plan: FusionPlan, tensors: Tensors) -> tuple[FusionPlan, Tensors]:
        """What it computes, for the check against float64: the plan, unless it says otherwise."""
        return plan, tensors

    def prepare(self, plan: FusionPlan, copies: Sequence[Tensors]) -> Prepared:
        """Makes the plan ready on copies of its tensors, one on a GPU; the weights are those of the first.

        Raises:
            CannotRunError: the peer does not take the plan.
        """
        raise NotImplementedError

    def prepare_backward(self, plan: FusionPlan, wrt: Sequence[str], tensors: Tensors) -> Prepared:
        """Runs the plan on a GPU, and makes its gradients ready.

        Args:
            wrt: of what the gradients are, in this order.
            tensors: `src`, the operands, and `grad`, the gradient of the output.

        Raises:
            CannotRunError: the peer does not take the plan, or is not measured with gradients.
        """
        raise CannotRunError(f"{self.name} is not measured with gradients of plans")


def only_in(dtypes: Sequence[str], plan: FusionPlan, name: str) -> None:
    """Refuses dtypes that the peer is not measured with: it converts, or computes in another precision.

    Raises:
        CannotRunError: the plan is in another dtype.
    """
    if plan.src.dtype not in dtypes:
        raise CannotRunError(f"{name} is measured in {' and '.join(dtypes)}; the plan is in {plan.src.dtype}")


def aligned(array: Array) -> Array:
    """A dense copy, outermost axis first, that begins at a cache line, as the libraries allocate theirs."""
    raw = np.empty(array.nbytes + 64, np.uint8)
    offset = -raw.ctypes.data % 64
    made = raw[offset : offset + array.nbytes].view(array.dtype).reshape(array.shape)
    made[...] = array
    return made
