"""What a plan on a GPU costs the host: calling it bound, beside torch.mm, and loading it in a new process."""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Mapping
from functools import partial
from typing import Any

from fuseplan.compile import compile as compile_plan
from fuseplan.errors import FuseplanError
from fuseplan.measure.cases import Case, Cases
from fuseplan.measure.clock import Call, GpuClock
from fuseplan.measure.data import random_arrays
from fuseplan.measure.spaces import empty
from fuseplan.measure.stats import Timing
from fuseplan.plans.plan import FusionPlan
from fuseplan.system import limits
from fuseplan.system.child import python, python_environment

SIDE = 64  # of the matrices of torch.mm
PROCESSES = 5

# Prints: seconds that `compile` took, where the code came from, whether a compiler was imported. What any
# program on a GPU pays (importing torch, the driver's context) comes before.
LOADING = """
import json, sys, time, torch, fuseplan
torch.zeros(1, device="cuda")
begin = time.perf_counter()
compiled = fuseplan.compile(sys.argv[1], "cuda")
seconds = time.perf_counter() - begin
print(json.dumps([seconds, compiled.program.origin, "triton" in sys.modules]))
"""


def host_costs(suite: Cases, clock: GpuClock) -> dict[str, Any]:
    """Seconds of the host a call, and of loading, for each plan of the suite.

    Returns:
        `calls`: one entry a variant: `what`, `median`, `least`; `loads`: one a plan: `plan`, `median`,
        `least`, `origin`, `imported_triton`; or `refused` in either.
    """
    variants: dict[str, Call] = _products(clock)
    refused = []
    for case in suite.cases:
        try:
            variants |= _calls(case, clock)
        except FuseplanError as error:
            refused.append({"what": case.name, "refused": str(error)})
    timed: Mapping[str, Timing] = clock.wall(variants)
    calls = [{"what": name, "median": each.median, "least": each.minimum} for name, each in timed.items()]
    return {"calls": [*calls, *refused], "loads": [_loading(case.plan) for case in suite.cases]}


def _products(clock: GpuClock) -> dict[str, Call]:
    """torch's own product of two small matrices, eager: the yardstick."""
    import torch

    left, right, out = (torch.randn(SIDE, SIDE, device=clock.device, dtype=torch.float16) for _ in range(3))
    return {
        "torch.mm": partial(torch.mm, left, right),
        "torch.mm with out": partial(torch.mm, left, right, out=out),
    }


def _calls(case: Case, clock: GpuClock) -> dict[str, Call]:
    """The bound plan, with and without an output to write to, with another src every time, and with none."""
    plan = FusionPlan.parse(case.plan)
    compiled = compile_plan(plan, f"cuda:{clock.device.index}")
    tensors = random_arrays(plan, 1, device=clock.device)
    src, out = tensors.pop("src"), empty(plan.output, clock.device)
    others = [src, src.clone()]
    bound = compiled.bind(**tensors)

    def alternating() -> None:
        others.reverse()
        bound(others[0], out)

    return {
        f"{case.name}": partial(bound, src),
        f"{case.name}, with out": partial(bound, src, out),
        f"{case.name}, with out, another src each time": alternating,
        f"{case.name}, on tensors that stay": bound.launcher(src, out),
    }


def _loading(plan: str) -> dict[str, Any]:
    """Loading a plan compiled before, in new processes; one more before them compiles where it was not."""
    command = python("-c", LOADING, plan)
    told = []
    for _ in range(PROCESSES + 1):
        ran = subprocess.run(
            command,
            env=python_environment(),
            capture_output=True,
            text=True,
            check=False,
            timeout=limits.COMPILER_SECONDS,
        )
        if ran.returncode:
            return {"plan": plan, "refused": ran.stderr.strip().splitlines()[-1]}
        told.append(json.loads(ran.stdout.strip().splitlines()[-1]))
    seconds = [each[0] for each in told[1:]]
    return {
        "plan": plan,
        "median": statistics.median(seconds),
        "least": min(seconds),
        "origin": told[-1][1],
        "imported_triton": any(each[2] for each in told[1:]),
    }
