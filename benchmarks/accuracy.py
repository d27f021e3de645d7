"""How far results are from float64: ours beside each peer's, on several kinds of input and in a stack."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fuseplan.bench.processes import Process, processes, scratch
from fuseplan.measure.cases import Case, Cases
from fuseplan.measure.data import INPUTS, deviation, random_arrays, reference
from fuseplan.plans.plan import FusionPlan

LAYERS = 20
GAIN = 2.0**0.5  # of weights in the stack: half of each layer's variance is lost to its relu
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
    with scratch() as folder, processes(peers, threads, folder) as started:
        for case in suite.cases:
            for inputs in INPUTS:
                progress(f"{case.name}: {inputs}")
                yield from _case(case, inputs, started, folder / "dst.npy")
        yield from _stack(started, folder, progress)


def steps(suite: Cases) -> int:
    """How often `progress` is called."""
    return len(suite.cases) * len(INPUTS) + LAYERS


def _case(case: Case, inputs: str, started: Mapping[str, Process], place: Path) -> Iterator[Deviation]:
    plan = FusionPlan.parse(case.plan)
    data = {"seed": 1, "inputs": inputs}
    want = reference(plan, random_arrays(plan, seed=1, inputs=inputs))
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
    return "".join("| " + " | ".join(row) + " |\n" for row in [head, ["---"] * len(head), *rows])
