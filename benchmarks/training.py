"""Training steps of models of the transformers library: fuseplan beside torch and torch.compile.

    python -m benchmarks.training --results benchmarks/results
    python -m benchmarks.training --compile --share 0/4

The second command fills the caches of the compilers, as one of four processes.

A step is a forward pass, the model's loss, and a backward pass. `fuseplan` leaves what no plan computes to
Inductor, `fuseplan:torch` to eager torch. On a GPU, each step is captured in a CUDA graph; `host` has the
times of steps without, and `bytes` the most memory of such a step: weights, values and gradients. All take
turns on the same tensors. Gradients are right where none is more than twice as far from float64 as torch's.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.models_of_torch import COMPILED, PROTOCOL, captured, launches, times
from benchmarks.recorded import stamp
from benchmarks.zoo import TRAINED, Entry, trained
from fuseplan.bench.results import append_json
from fuseplan.measure.clock import GpuClock, HostClock
from fuseplan.torch.dynamo import compile_graph

TOLERANCE = 1e-5  # of a gradient's norm, where torch is nearer to float64 than its dtype
NOTHING = 1e-6  # of the largest norm: a gradient below is rounding alone, as that of keys' biases
RESTS = {"fuseplan": "inductor", "fuseplan:torch": "torch"}

Call = Callable[[], object]
Gradients = dict[str, torch.Tensor]


def steps(module: nn.Module, x: torch.Tensor, peers: list[str]) -> Iterator[tuple[str, Call]]:
    """The step of each peer."""
    for peer in peers:
        how: dict[str, Any] = {"mode": COMPILED.get(peer)}
        if peer in RESTS:
            how = {"backend": compile_graph, "options": {"rest": RESTS[peer]}}
        yield (
            peer,
            _step(module, module if peer == "torch" else torch.compile(module, dynamic=False, **how), x),
        )


def _step(module: nn.Module, run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Call:
    parameters = list(module.parameters())

    def step() -> None:
        module.zero_grad(set_to_none=True)
        for each in parameters:
            torch.autograd.graph.increment_version(each)  # an optimizer writes them between steps
        run(x).backward()

    return step


def measured(entry: Entry, batch: int, given: argparse.Namespace) -> dict[str, Any]:
    """A model's row: of each peer the error of its gradients, memory, seconds and launches."""
    device, dtype = torch.device(given.device), getattr(torch, given.dtype)
    module, x = trained(entry, batch, given.tokens)
    module.to(device, dtype)
    x = x.to(device)
    exact = _exact(module, x)
    calls, errors, nbytes = dict[str, Call](), dict[str, float](), dict[str, int]()
    for peer, call in steps(module, x, given.peers):
        calls[peer] = call
        call()
        errors[peer] = error(_gradients(module), exact)
        nbytes[peer] = most_bytes(module, call)
    row = {
        "batch": batch, "tokens": given.tokens, "dtype": given.dtype, "threads": given.threads,
        "errors": errors,
        "right": {
            peer: each <= max(2 * errors["torch"], TOLERANCE)
            for peer, each in errors.items() if peer in RESTS
        },
    }  # fmt: skip
    host = times(HostClock(PROTOCOL).interleave(calls))
    if device.type != "cuda":
        return row | host
    graphs = {peer: captured(call) for peer, call in calls.items()}
    row |= times(GpuClock(device.index or 0).interleave(graphs))
    counts = {peer: launches(call) for peer, call in graphs.items()}
    return row | {"host": host["seconds"], "launches": counts, "bytes": nbytes}


def _gradients(module: nn.Module) -> Gradients:
    return {name: each.grad for name, each in module.named_parameters() if each.grad is not None}


def _exact(module: nn.Module, x: torch.Tensor) -> Gradients:
    """The gradients in float64, of the weights as they are, on the host."""
    held = {name: each.detach().clone() for name, each in module.state_dict().items()}
    dtype = next(module.parameters()).dtype
    module.to(torch.float64)
    _step(module, module, x)()
    made = {name: each.cpu() for name, each in _gradients(module).items()}
    module.zero_grad(set_to_none=True)
    module.to(dtype).load_state_dict(held)
    return made


def error(got: Gradients, exact: Gradients) -> float:
    """The norm of a gradient's difference from float64 over the gradient's norm: that of the worst."""
    norms = {name: float(each.norm()) for name, each in exact.items()}
    least = NOTHING * max(norms.values())
    counted = (name for name, norm in norms.items() if norm > least)
    return max(float((got[name].cpu().double() - exact[name]).norm()) / norms[name] for name in counted)


def most_bytes(module: nn.Module, call: Call) -> int:
    """The most memory of a step on a GPU, with the weights: torch's allocator counts it; 0 on a CPU."""
    parameters = list(module.parameters())
    device = parameters[0].device
    if device.type != "cuda":
        return 0
    module.zero_grad(set_to_none=True)
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    most: int = torch.cuda.max_memory_allocated(device) - before + sum(each.nbytes for each in parameters)
    return most


def main() -> int:
    """Measures models and writes a record with a row of each; 1 where a gradient is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    peers = ["torch", *COMPILED, *RESTS]
    parser.add_argument("--only", nargs="*", choices=TRAINED, default=list(TRAINED), help="the models")
    parser.add_argument("--peers", nargs="*", choices=peers, default=peers)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch", type=int, nargs="+", default=(16,))
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2, help="on a CPU")
    parser.add_argument("--results", type=Path, help="the folder of training.jsonl")
    parser.add_argument("--commit", help="of the sources, where they are no checkout")
    parser.add_argument("--compile", action="store_true", help="compile, and measure nothing")
    parser.add_argument("--share", default="0/1", help="this process's number from 0, and how many there are")
    given = parser.parse_args()
    device = torch.device(given.device)
    if device.type == "cpu":
        torch.set_num_threads(given.threads)
    mine, processes = map(int, given.share.split("/"))
    pairs = list(product(given.only, given.batch))
    if given.compile:
        for name, batch, peer in list(product(given.only, given.batch, given.peers))[mine::processes]:
            module, x = trained(TRAINED[name], batch, given.tokens)
            module.to(device, getattr(torch, given.dtype))
            for _, call in steps(module, x.to(device), [peer]):
                call()
        return 0
    rows = []
    for name, batch in pairs:
        rows.append({"model": name} | measured(TRAINED[name], batch, given))
        print(json.dumps(rows[-1]), flush=True)
    index = 0 if device.type == "cuda" else None
    made = stamp("training", "torch", "transformers", device=index, named=given.commit or "")
    if given.results:
        append_json([made | {"rows": rows}], "training", given.results)
    return 0 if all(all(row["right"].values()) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
