"""Models of the transformers library: fuseplan beside torch, torch.compile, ONNX Runtime and OpenVINO.

    python -m benchmarks.models_of_torch --results benchmarks/results
    python -m benchmarks.models_of_torch --device cuda --batch 1 32 --dtype float16
    python -m benchmarks.models_of_torch --device cuda --batch 1 32 --ieee --only resnet50 mobilenet_v2
    python -m benchmarks.models_of_torch --device cuda ... --compile --share 0/8

The last command fills the caches of the compilers, as one of eight processes.

On a CPU, each library runs the model for one input in f32: torch in both layouts of images, torch.compile,
and the runtimes of ONNX on the export of it. On a GPU, each is captured in a CUDA graph, torch.compile in its
default mode and with all choices tuned, and fuseplan with the rest left to Inductor, or to eager torch.
`host` has the times of calls without a graph. All take turns on the same tensors. A result is right where it
is at most twice as far from float64 as torch's.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fuseplan.onnx
import fuseplan.torch
from benchmarks.models import PEERS
from benchmarks.recorded import stamp
from benchmarks.zoo import EIGHT, MODELS, built
from fuseplan.bench.results import append_json
from fuseplan.measure.clock import GpuClock, HostClock, Protocol
from fuseplan.measure.stats import Timing
from fuseplan.torch.dynamo import compile_graph

PROTOCOL = Protocol(rounds=7, block_seconds=0.1)
HOST_CALLS = 2  # of up to 400 launches each: a stream's queue holds 1024
TOLERANCE = 1e-5  # of the largest element of the output, where torch is nearer to float64 than its dtype
COMPILED: Mapping[str, str | None] = {"torch.compile": None, "max-autotune": "max-autotune-no-cudagraphs"}

Call = Callable[[], torch.Tensor]


def on_a_cpu(module: nn.Module, x: torch.Tensor, threads: int) -> Iterator[tuple[str, Call]]:
    """What takes turns on a CPU, each compiled and called once."""
    yield "torch", partial(module, x)
    if x.ndim == 4:
        last = {"memory_format": torch.channels_last}
        other = copy.deepcopy(module).to(**last)
        yield "torch:nhwc", partial(other, x.contiguous(**last))
    torch._dynamo.reset()
    yield "torch.compile", partial(torch.compile(module, dynamic=False), x)
    yield "fuseplan.torch", partial(fuseplan.torch.fuse(module, x), x)
    exported = torch.onnx.export(module, (x,), dynamo=True, optimize=True, input_names=["x"], verbose=False)
    proto, array = exported.model_proto, x.numpy()
    ours = fuseplan.onnx.load(proto, threads=threads)
    yield "fuseplan.onnx", lambda: torch.from_numpy(ours.run(None, {"x": array})[0])
    for peer, make in PEERS.items():
        call = make(proto, threads)
        yield peer, partial(lambda run: torch.from_numpy(run(array)), call)


def on_a_gpu(module: nn.Module, x: torch.Tensor, left_out: Collection[str]) -> Iterator[tuple[str, Call]]:
    """What takes turns on a GPU, each compiled and called once."""
    yield "torch", partial(module, x)
    for name, mode in COMPILED.items():
        if name not in left_out:
            torch._dynamo.reset()
            yield name, partial(torch.compile(module, dynamic=False, mode=mode), x)
    torch._dynamo.reset()
    rest = {"rest": "inductor"}
    yield "fuseplan", partial(torch.compile(module, dynamic=False, backend=compile_graph, options=rest), x)
    yield "fuseplan.torch", partial(fuseplan.torch.fuse(module, x), x)


def captured(call: Call) -> Callable[[], None]:
    """The call as a CUDA graph."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    replay: Callable[[], None] = graph.replay
    return replay


def launches(call: Callable[[], object]) -> int:
    """Kernels and copies of a call on the GPU, as torch's profiler counts them.

    Of a recorded call: while torch profiles, a fused module's plans are operators of torch's dispatcher, and
    what follows from weights alone is computed in each call.
    """
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    return sum(1 for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA)


def compiled(name: str, batch: int, given: argparse.Namespace) -> None:
    """Compiles a model for a GPU as each library does, and calls it once."""
    device, dtype = torch.device(given.device), getattr(torch, given.dtype)
    module, x = built(name, batch)
    module.to(device, dtype)
    with torch.no_grad():
        x = x.to(device, dtype) if x.is_floating_point() else x.to(device)
        for _, call in on_a_gpu(module, x, given.without):
            call()


def measured(name: str, batch: int, given: argparse.Namespace) -> dict[str, Any]:
    """A model's row: errors and seconds of each library."""
    threads, device, dtype = given.threads, torch.device(given.device), getattr(torch, given.dtype)
    module, x = built(name, batch)
    with torch.no_grad():
        module.to(device, torch.float64)
        x = x.to(device, torch.float64) if x.is_floating_point() else x.to(device)
        exact = module(x).cpu()
        module.to(dtype)
        x = x.to(dtype) if x.is_floating_point() else x
        on_gpu = device.type == "cuda"
        made = on_a_gpu(module, x, given.without) if on_gpu else on_a_cpu(module, x, threads)
        calls: dict[str, Call] = {}
        for peer, call in made:
            call()
            calls[peer] = call
        errors = {peer: error(call(), exact) for peer, call in calls.items()}
        row = {
            "model": name, "batch": batch, "threads": threads, "dtype": str(dtype).removeprefix("torch."),
            "ieee": given.ieee,
            "errors": errors,
            "right": {
                peer: each <= max(2 * errors["torch"], TOLERANCE)
                for peer, each in errors.items() if peer.startswith("fuseplan")
            },
        }  # fmt: skip
        if not on_gpu:
            return row | times(HostClock(PROTOCOL).interleave(calls))
        graphs = {peer: captured(call) for peer, call in calls.items()}
        clock = GpuClock(device.index or 0)
        return (
            row
            | times(clock.interleave(graphs))
            | {"host": {peer: each.median for peer, each in clock.wall(calls, HOST_CALLS).items()}}
            | {"launches": {peer: launches(call) for peer, call in graphs.items()}}
        )


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest difference from float64, over the largest element."""
    return float((got.cpu().double() - exact).abs().max() / exact.abs().max())


def times(found: Mapping[str, Timing]) -> dict[str, Any]:
    """Medians and least times."""
    return {
        "seconds": {peer: each.median for peer, each in found.items()},
        "least": {peer: each.minimum for peer, each in found.items()},
    }


def main() -> int:
    """Measures models and writes a record with a row of each; 1 where a result is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", choices=MODELS, default=EIGHT, help="the models")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument(
        "--ieee", action="store_true", help="no factor of f32 is rounded to TF32, by any library"
    )
    parser.add_argument("--batch", type=int, nargs="+", default=(1,))
    parser.add_argument("--threads", type=int, default=2, help="on a CPU")
    parser.add_argument("--results", type=Path, help="the folder of models_of_torch.jsonl")
    parser.add_argument("--commit", help="of the sources, where they are no checkout")
    parser.add_argument("--without", nargs="*", choices=COMPILED, default=(), help="peers to leave out")
    parser.add_argument("--compile", action="store_true", help="compile for a GPU, and measure nothing")
    parser.add_argument("--share", default="0/1", help="this process's number from 0, and how many there are")
    given = parser.parse_args()
    device = torch.device(given.device)
    if given.ieee:
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    if device.type == "cpu":
        torch.set_num_threads(given.threads)
    mine, processes = map(int, given.share.split("/"))
    pairs = list(product(given.only, given.batch))[mine::processes]
    if given.compile:
        for name, batch in pairs:
            compiled(name, batch, given)
        return 0
    rows = []
    for name, batch in pairs:
        rows.append(measured(name, batch, given))
        print(json.dumps(rows[-1]), flush=True)
    packages, index = ("torch", "transformers", *PEERS), 0 if device.type == "cuda" else None
    made = stamp("models_of_torch", *packages, device=index, named=given.commit or "")
    if given.results:
        append_json([made | {"rows": rows}], "models_of_torch", given.results)
    return 0 if all(all(row["right"].values()) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
