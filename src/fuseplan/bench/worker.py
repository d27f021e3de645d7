"""One peer in a process of its own: `python -m fuseplan.bench.worker NAME THREADS`.

It reads one JSON object a line from its input and answers each with one line, which begins with `@`: lines
that libraries print are no answers.

    {"do": "prepare", "plan": "...", "data": {"seed": 1}, "copies": 1, "result": "/path.npy"}
        -> {"setup": seconds, "facts": {...}, "outputs": 1}   and the output, logical order, in that file,
           further results in files beside it, see `part`;
           "data" is what `random_arrays` takes, or "arrays": "/path.npz" holds what it gave; "src":
           "/path.npy" gives the input itself
    {"do": "block", "seconds": 0.04}
        -> {"samples": [seconds a call, ...], "busy": seconds of processor time the block took}
    {"do": "release"}  -> {}

Where it cannot, the answer is {"refused": why}.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from fuseplan.bench.peers import known
from fuseplan.bench.peers.peer import Array, Peer, Prepared
from fuseplan.errors import FuseplanError
from fuseplan.language.dtypes import HELD, dtype_of
from fuseplan.measure.clock import Protocol, block, calls_a_sample
from fuseplan.measure.data import laid_out, random_arrays, stored
from fuseplan.measure.layers import CannotRunError
from fuseplan.measure.spaces import Tensor
from fuseplan.plans.plan import FusionPlan
from fuseplan.system.child import teller

SHOWN = 300  # characters of a library's own message


def part(place: Path, number: int) -> Path:
    """The file of one result: the first is the output, in the place itself."""
    return place.with_suffix(f".{number}{place.suffix}") if number else place


def _arrays(plan: FusionPlan, request: Mapping[str, Any]) -> dict[str, Tensor]:
    if "arrays" not in request:
        return random_arrays(plan, **request["data"])
    with np.load(request["arrays"]) as found:
        return laid_out(plan, found)


def _bits(array: Array) -> Array:
    """An array that files hold: of bf16 and fp8, for which they have no name, the bits."""
    name = HELD.get(array.dtype.name)
    return array if name is None else array.view(dtype_of(name).array)


class Worker:
    """Answers requests for one peer; holds one prepared plan at a time."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._prepared: Prepared | None = None
        self._calls = 1

    def prepare(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Makes a plan ready, runs it once, stores its output."""
        self.release({})
        plan = FusionPlan.parse(request["plan"])
        copies = [_arrays(plan, request) for _ in range(request["copies"])]
        if "src" in request:
            copies = [{**arrays, "src": stored(plan.src, np.load(request["src"]))} for arrays in copies]
        begin = time.perf_counter()
        prepared = self._peer.prepare(plan, copies)
        output = prepared.result()
        setup = time.perf_counter() - begin
        outputs = output if isinstance(output, tuple) else (output,)
        for number, each in enumerate(outputs):
            np.save(part(Path(request["result"]), number), _bits(each))
        self._prepared, self._calls = prepared, calls_a_sample(prepared.call)
        return {"setup": setup, "facts": dict(prepared.facts), "outputs": len(outputs)}

    def block(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """One block of samples."""
        if self._prepared is None:
            raise CannotRunError("nothing is prepared")
        begin = time.process_time()
        samples = block(self._prepared.call, self._calls, Protocol(block_seconds=request["seconds"]))
        return {"samples": samples, "busy": time.process_time() - begin}

    def release(self, _: Mapping[str, Any]) -> dict[str, Any]:
        """Lets go of the plan, so that memory does not add up over a suite."""
        self._prepared = None
        return {}

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to one request. A library may fail in any way; that is its refusal, not ours."""
        known: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
            "prepare": self.prepare,
            "block": self.block,
            "release": self.release,
        }
        try:
            return known[request["do"]](request)
        except (CannotRunError, FuseplanError) as error:
            return {"refused": str(error)}
        except Exception as error:
            return {"refused": f"{type(error).__name__}: {str(error)[:SHOWN]}"}


def serve(name: str, threads: int, requests: TextIO, answers: TextIO) -> None:
    """Answers until the input ends."""
    tell = teller(answers)
    try:
        worker = Worker(known(False).by_name[name](threads))
    except ImportError as error:
        tell({"refused": f"not installed: {error}"})
        return
    tell({})
    for line in requests:
        tell(worker.answer(json.loads(line)))


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), sys.stdin, sys.stdout)
