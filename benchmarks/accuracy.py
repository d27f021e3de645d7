"""How far results are from float64: ours beside each peer's, on several kinds of input and in a stack."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fuseplan.bench.markdown import table
from fuseplan.bench.peers.peer import Peer
from fuseplan.bench.results import OURS
from fuseplan.bench.runner import Process, processes
from fuseplan.measure.cases import Case, Cases
from fuseplan.measure.data import INPUTS, deviation, random_arrays, reference
from fuseplan.measure.torch_eager import of_gpu
from fuseplan.plans.plan import FusionPlan

LAYERS = 20
GAIN = 2.0**0.5  # of weights in the stack: half of each layer's variance is lost to its relu
DTYPES = ("f32", "bf16", "f16")
SEEDS = (1, 2, 3)  # of an operator's data: the largest of their deviations is told
# Of the transformer's operators, by name, in each of the dtypes; beside eager torch.
FAMILIES: Mapping[str, str] = {
    "linear, bias, gelu": "[64x768] -> linear(3072) -> bias -> gelu",
    "linear, bias, residual": "[64x3072] -> linear(768) -> bias -> add",
    "linear of one row": "[1x4096] -> linear(512) -> bias",
    "gated linear": "[64x768] -> linear(2048) -> glu(silu, gate=first)",
    "layer norm": "[64x1024] -> layer_norm",
    "layer norm of a sum, gelu": "[64x1024] -> add -> layer_norm -> gelu",
    "RMS norm": "[64x1024] -> rms_norm",
    "group norm, silu": "[4x64x14x14] -> group_norm(8) -> silu",
    "instance norm": "[4x32x14x14] -> instance_norm",
    "softmax": "[64x1000] -> softmax",
    "log softmax": "[64x1000] -> log_softmax",
    "cross-entropy": "[64x1000] -> cross_entropy",
    "attention": "[1x8x512x128, bhsd] -> attention",
    "causal attention": "[1x12x128x64, bhsd] -> attention(is_causal=True)",
    "rotary": "[1x12x128x64, bhsd] -> rotary",
    "gelu": "[64x1024] -> gelu",
    "gate": "[64x2048] -> glu(silu, gate=first)",
    "sum": "[64x1024] -> sum(1)",
    "gradient of layer norm": "[64x1024] -> layer_norm_backward",
    "gradient of RMS norm": "[64x1024] -> rms_norm_backward",
    "gradient of softmax": "[64x1000] -> softmax_backward",
}
STACK = "f32[1x64x56x56, nhwc] -> conv2d(64, kernel=3, padding=1) -> bias -> relu"


@dataclass(frozen=True)
class Deviation:
    """One result against float64.

    Attributes:
        case, plan: what was computed.
        inputs: what its input looked like, or `stack of 20`.
        layer: how many layers deep; 1 outside the stack.
        peer: who computed it.
        error: the largest deviation over the largest output; None where the peer refused.
        refused: why.
    """

    case: str
    plan: str
    inputs: str
    layer: int
    peer: str
    error: float | None
    refused: str | None = None

    def to_json(self) -> dict[str, object]:
        """The fields as JSON values."""
        return asdict(self)


def accuracy(
    suite: Cases,
    peers: Sequence[str],
    threads: int = 1,
    progress: Callable[[str], object] = lambda _: None,
) -> Iterator[Deviation]:
    """Every case of a suite on every kind of input, then the stack.

    Args:
        suite: what to compute.
        peers: names of peers, ourselves among them.
        threads: of each.
        progress: called with a line before each computation of all peers, `steps(suite)` times.
    """
    with processes(peers, threads) as (started, folder):
        for case in suite.cases:
            for inputs in INPUTS:
                progress(f"{case.name}: {inputs}")
                yield from _case(case, inputs, started, folder / "dst.npy")
        beside_torch = {name: started[name] for name in (OURS, "torch") if name in started}
        for name, dtype, inputs in product(FAMILIES, DTYPES, INPUTS):
            progress(f"{name}, {dtype}: {inputs}")
            case = Case(name, dtype + FAMILIES[name])
            drawn = [_case(case, inputs, beside_torch, folder / "dst.npy", seed) for seed in SEEDS]
            yield from _largest(drawn)
        yield from _stack(started, folder, progress)


def gpu_accuracy(
    peers: Sequence[Peer], progress: Callable[[str], object] = lambda _: None
) -> Iterator[Deviation]:
    """Every operator of `FAMILIES` in every dtype on every kind of input, on the current GPU.

    Args:
        peers: what computes it, ourselves among them.
        progress: called with a line before each computation of all peers, `gpu_steps()` times.
    """
    for name, dtype, inputs in product(FAMILIES, DTYPES, INPUTS):
        progress(f"{name}, {dtype}: {inputs}")
        case = Case(name, dtype + FAMILIES[name])
        yield from _largest([[_on_a_gpu(case, inputs, peer, seed) for peer in peers] for seed in SEEDS])


def gpu_steps() -> int:
    """How often `gpu_accuracy` calls `progress`."""
    return len(FAMILIES) * len(DTYPES) * len(INPUTS)


def steps(suite: Cases) -> int:
    """How often `progress` is called."""
    return (len(suite.cases) + len(FAMILIES) * len(DTYPES)) * len(INPUTS) + LAYERS


def _largest(drawn: Sequence[Iterable[Deviation]]) -> Iterator[Deviation]:
    """Of each peer, the largest deviation of several draws; a refusal where a draw was refused."""
    for each in zip(*drawn, strict=True):
        yield max(each, key=lambda one: math.inf if one.error is None else one.error)


def _on_a_gpu(case: Case, inputs: str, peer: Peer, seed: int) -> Deviation:
    """A peer's deviation. A library may fail in any way; that is its refusal, not ours."""
    plan = FusionPlan.parse(case.plan)
    tensors = random_arrays(plan, seed, inputs=inputs, device="cuda")
    told = (case.name, case.plan, inputs, 1, peer.name)
    try:
        with of_gpu(plan):
            got = peer.prepare(plan, [tensors]).result()
    except Exception as why:
        return Deviation(*told, None, f"{type(why).__name__}: {why}")
    return Deviation(*told, deviation(got[0] if isinstance(got, tuple) else got, reference(plan, tensors)))


def _case(
    case: Case, inputs: str, started: Mapping[str, Process], place: Path, seed: int = 1
) -> Iterator[Deviation]:
    plan = FusionPlan.parse(case.plan)
    data = {"seed": seed, "inputs": inputs}
    want = reference(plan, random_arrays(plan, seed=seed, inputs=inputs))
    for name, process in started.items():
        answer = _computed(process, case.plan, data, place)
        yield _deviation(case.name, case.plan, inputs, 1, name, answer, place, want)


def _stack(
    started: Mapping[str, Process], folder: Path, progress: Callable[[str], object]
) -> Iterator[Deviation]:
    """Twenty layers of one shape, each with weights of its own; a layer's result is the next one's input."""
    plan = FusionPlan.parse(STACK)
    live = dict(started)
    sources: dict[str, dict[str, str]] = {name: {} for name in live}
    want: NDArray[np.float64] | None = None
    for layer in range(1, LAYERS + 1):
        progress(f"stack: layer {layer}")
        data = {"seed": 100 + layer, "gain": GAIN}
        arrays = random_arrays(plan, seed=100 + layer, gain=GAIN)
        want = reference(plan, arrays if want is None else {**arrays, "src": want})
        for name, process in list(live.items()):
            place = folder / f"{name.replace(':', '-')}-{layer}.npy"
            answer = _computed(process, STACK, data, place, **sources[name])
            yield _deviation("stack", STACK, f"stack of {LAYERS}", layer, name, answer, place, want)
            sources[name] = {"src": str(place)}
            if "refused" in answer:
                del live[name]


def _computed(
    process: Process, plan: str, data: Mapping[str, Any], place: Path, **source: str
) -> dict[str, Any]:
    return process.ask(do="prepare", plan=plan, data=dict(data), copies=1, result=str(place), **source)


def _deviation(
    case: str,
    plan: str,
    inputs: str,
    layer: int,
    peer: str,
    answer: Mapping[str, Any],
    place: Path,
    want: NDArray[np.float64],
) -> Deviation:
    if "refused" in answer:
        return Deviation(case, plan, inputs, layer, peer, None, answer["refused"])
    return Deviation(case, plan, inputs, layer, peer, deviation(np.load(place), want))


def markdown(found: Sequence[Deviation], layers: Sequence[int] = (1, 5, 10, LAYERS)) -> str:
    """A row a case and kind of input, a column a peer; of the stack, the rows of some layers."""
    peers = list(dict.fromkeys(each.peer for each in found))
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for each in found:
        is_stack = each.inputs.startswith("stack")
        if is_stack and each.layer not in layers:
            continue
        row = (each.case, f"layer {each.layer}" if is_stack else each.inputs)
        cells.setdefault(row, {})[each.peer] = "" if each.error is None else f"{each.error:.1e}"
    head = ["shape", "inputs", *peers]
    rows = [[*row, *(told.get(peer, "") for peer in peers)] for row, told in cells.items()]
    return "\n".join(table(head, rows))


def of_families(found: Sequence[Deviation]) -> str:
    """A row an operator and dtype, a column a kind of input: our deviation, in brackets that over torch's."""
    cells: dict[tuple[str, str], dict[str, dict[str, float | None]]] = {}
    for each in found:
        row = each.case, each.plan.split("[")[0]
        cells.setdefault(row, {}).setdefault(each.inputs, {})[each.peer] = each.error
    kinds = list(dict.fromkeys(each.inputs for each in found))
    rows = [[*row, *(_beside_torch(told.get(kind, {})) for kind in kinds)] for row, told in cells.items()]
    return "\n".join(table(["operators", "dtype", *kinds], rows))


def _beside_torch(errors: Mapping[str, float | None]) -> str:
    ours, other = errors.get(OURS), errors.get("torch")
    if ours is None:
        return ""
    ratio = "" if other is None else "1.0" if ours == other else f"{ours / other:.1f}" if other else "inf"
    return f"{ours:.1e} ({ratio})"
