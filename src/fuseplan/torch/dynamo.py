"""`torch.compile(model, backend="fuseplan")`: plans in the graphs of forward and backward passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

from fuseplan.errors import ArgumentError
from fuseplan.torch.cutting import fused
from fuseplan.torch.reporting import report_of, trace

RESTS = ("torch", "inductor")  # what computes the operators that no plan does


def _compiled(
    given: fx.GraphModule, inputs: Sequence[Any], rest: str, is_inference: bool = False
) -> Callable[..., Any]:
    """The graph with plans; as it is where its tensors lie on several devices, or on one without plans."""
    devices = {each.device for each in inputs if isinstance(each, torch.Tensor)}
    device = devices.pop() if len(devices) == 1 else None
    is_known = device is not None and device.type in ("cpu", "cuda")
    if not is_known or device is None:
        return _boxed(given)
    if rest == "inductor":
        from fuseplan.torch import inductor

        return inductor.compiled(given, inputs, device, is_inference=is_inference)
    made = fused(given, device)
    trace(lambda: report_of(made, device))
    return _boxed(made.module)


def _boxed(module: fx.GraphModule) -> Callable[..., Any]:
    boxed: Callable[..., Any] = make_boxed_func(module.forward)
    return boxed


def compile_graph(
    given: fx.GraphModule, inputs: Sequence[Any], options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """The backend that torch.compile calls with each of its graphs.

    Values, shapes and strides of outputs are torch's. Shapes that torch leaves open are not in plans:
    dynamic=False fuses each shape.

    Args:
        given: the graph.
        inputs: tensors like those of its calls.
        options: `rest` names what computes the operators that no plan does: `torch`, its operators one by one
            (the default), or `inductor`, which also computes plans without weights.

    Raises:
        ArgumentError: there is no such option, or it has no such value.
    """
    rest = dict(options or {})
    chosen = rest.pop("rest", RESTS[0])
    if rest or chosen not in RESTS:
        known = " or ".join(map(repr, RESTS))
        raise ArgumentError(f"the backend fuseplan has the option rest={known}; got {dict(options or {})}")
    training, inference = (partial(_compiled, rest=chosen, is_inference=each) for each in (False, True))
    backend = aot_autograd(fw_compiler=training, inference_compiler=inference)
    made: Callable[..., Any] = backend(given, inputs)
    return made
