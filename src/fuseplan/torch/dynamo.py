"""`torch.compile(model, backend="fuseplan")`: plans in the graphs of forward and backward passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

from fuseplan.torch.cutting import fused
from fuseplan.torch.reporting import report_of, trace


def _compiled(given: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """The graph with plans; as it is where its tensors lie on several devices, or on one without plans."""
    devices = {each.device for each in inputs if isinstance(each, torch.Tensor)}
    device = devices.pop() if len(devices) == 1 else None
    is_known = device is not None and device.type in ("cpu", "cuda")
    if not is_known or device is None:
        return _boxed(given)
    made = fused(given, device)
    trace(lambda: report_of(made, device))
    return _boxed(made.module)


def _boxed(module: fx.GraphModule) -> Callable[..., Any]:
    boxed: Callable[..., Any] = make_boxed_func(module.forward)
    return boxed


_backend = aot_autograd(fw_compiler=_compiled)


def compile_graph(
    given: fx.GraphModule, inputs: Sequence[Any], options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """The backend that torch.compile calls with each of its graphs.

    The operators that no plan computes are torch's own. Values, shapes and strides of outputs are torch's.
    Shapes that torch leaves open are not in plans: dynamic=False fuses each shape.

    Raises:
        TypeError: it is given options; it has none.
    """
    if options:
        raise TypeError(f"the backend fuseplan has no options; got {', '.join(options)}")
    made: Callable[..., Any] = _backend(given, inputs)
    return made
