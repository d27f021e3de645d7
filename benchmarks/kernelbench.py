"""KernelBench's programs on this GPU: eager PyTorch, torch.compile and fuseplan take turns.

    python -m benchmarks.kernelbench --compile --share 0/8       fills the caches of both compilers
    python -m benchmarks.kernelbench --results benchmarks/results
    python -m benchmarks.kernelbench --share 0/2 --results benchmarks/results    every second program

Each program runs as KernelBench runs it: f32 in torch's default precision, in training mode, without
gradients, on inputs that are uniform in [0, 1). fuseplan chooses by measurement, which its first call of a
program takes. A program counts as right where its result is at most twice
as far from float64 as PyTorch's, eager or compiled, or within KernelBench's tolerance. Dropout draws other
numbers in each run: such a program is checked with its dropout off. A program whose result is the same for
other inputs is constant, and no part of the average.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from benchmarks.recorded import stamp
from fuseplan.bench.results import append_json
from fuseplan.measure.clock import GpuClock, HostClock
from fuseplan.stores import sites
from fuseplan.torch.dynamo import compile_graph

PROGRAMS = Path(__file__).with_name("kernelbench_l2.json")
TOLERANCE = 1e-4  # KernelBench's, absolute and relative
BACKENDS: tuple[tuple[str, Any, dict[str, str]], ...] = (
    ("torch.compile", "inductor", {}),
    ("fuseplan", compile_graph, {"rest": "inductor", "choose": "measured"}),
)
NAMED = ("from", "parameter", "shape", "step", "value")  # arguments that are no keywords of torch's


class Program(nn.Module):  # type: ignore[misc]
    """Layers and functions in a row; a function may read a parameter, a number or an earlier result."""

    def __init__(self, described: Mapping[str, Any]) -> None:
        super().__init__()
        self.number, self.title = described["number"], described["name"]
        self.shape, self.steps = described["input"], described["steps"]
        self.layers = nn.ModuleDict()
        self.values = nn.ParameterDict()
        for place, (name, arguments) in enumerate(self.steps):
            if name[0].isupper():
                self.layers[str(place)] = getattr(nn, name)(**arguments)
            elif "parameter" in arguments and arguments["parameter"] not in self.values:
                self.values[arguments["parameter"]] = nn.Parameter(torch.randn(arguments["shape"]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The last step's result."""
        results = [x]
        for place, (name, arguments) in enumerate(self.steps):
            if str(place) in self.layers:
                results.append(self.layers[str(place)](results[-1]))
            else:
                results.append(self._called(name, arguments, results))
        return results[-1]

    def _called(self, name: str, arguments: Mapping[str, Any], results: list[torch.Tensor]) -> torch.Tensor:
        further: list[Any] = [results[arguments["step"]]] if "step" in arguments else []
        further += [self.values[arguments["parameter"]]] if "parameter" in arguments else []
        number = arguments.get("value")
        further += [] if number is None else [number if name != "minimum" else results[-1].new_tensor(number)]
        first = results[arguments["from"]] if "from" in arguments else results[-1]
        further += [results[-1]] if "from" in arguments else []
        keywords = {key: value for key, value in arguments.items() if key not in NAMED}
        made: torch.Tensor = getattr(torch, name)(first, *further, **keywords)
        return made


def programs(only: str = "", share: str = "0/1") -> Iterator[Program]:
    """A share of the programs, of those whose number or name contains a text."""
    mine, processes = (int(number) for number in share.split("/"))
    listed = json.loads(PROGRAMS.read_text(encoding="utf-8"))["programs"]
    named = [each for each in listed if only in f"{each['number']} {each['name']}"]
    yield from map(Program, named[mine::processes])


def variants(program: Program, x: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """What takes turns: calls without arguments."""
    made: dict[str, Callable[[], Any]] = {"torch": partial(program.forward, x)}
    for peer, backend, options in BACKENDS:
        torch._dynamo.reset()
        compiled = torch.compile(program, backend=backend, options=options, dynamic=False)
        compiled(x)
        made[peer] = partial(compiled, x)
    return made


def errors(program: Program, x: torch.Tensor, made: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    """Each variant's largest difference from float64, over one plus the magnitude."""
    dropouts = {each: each.p for each in program.modules() if isinstance(each, nn.Dropout)}
    for each in dropouts:
        each.p = 0.0
    exact = program.double()(x.double())
    program.float()
    found = {name: difference(call().double(), exact) for name, call in made.items()}
    for each, probability in dropouts.items():
        each.p = probability
    return found


def difference(got: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest difference over one plus the magnitude; infinite for another shape or a NaN."""
    if got.shape != exact.shape:
        return math.inf
    found = float(((got - exact).abs() / (1 + exact.abs())).max())
    return math.inf if math.isnan(found) else found


def is_constant(program: Program, x: torch.Tensor) -> bool:
    """Whether another input gives the same result."""
    return difference(program(1 - x), program(x)) <= TOLERANCE


def measured(program: Program, device: torch.device) -> dict[str, Any]:
    """One program's row: errors and seconds a call of each variant."""
    torch.manual_seed(program.number)
    program.to(device)
    x = torch.rand(program.shape, device=device)
    clock = GpuClock(device.index or 0) if device.type == "cuda" else HostClock()
    with torch.no_grad():
        made = variants(program, x)
        constant = is_constant(program, x)
        found = errors(program, x, made)
        right = found["fuseplan"] <= max(2 * found["torch"], 2 * found["torch.compile"], TOLERANCE)
        times = {name: timing.median for name, timing in clock.interleave(made).items()}
    row = {"number": program.number, "name": program.title, "right": right, "constant": constant}
    return row | {"errors": found, "seconds": times}


def told(program: Program, device: torch.device) -> dict[str, Any]:
    """One program's row, or the error that it ends with."""
    try:
        return measured(program, device)
    except Exception as error:  # the others are measured all the same
        return {"number": program.number, "name": program.title, "right": False, "error": str(error)[:500]}


def gain(row: Mapping[str, Any]) -> float:
    """The faster of eager PyTorch and torch.compile over fuseplan."""
    seconds = row["seconds"]
    return float(min(seconds["torch"], seconds["torch.compile"]) / seconds["fuseplan"])


def main() -> int:
    """Measures the programs, or compiles a share of them; 1 where a result is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="", help="programs whose number or name contains this text")
    parser.add_argument("--share", default="0/1", help="this process's number from 0, and how many there are")
    parser.add_argument("--compile", action="store_true", help="call each program once, and measure nothing")
    parser.add_argument("--results", type=Path, help="the folder to append the rows to")
    parser.add_argument("--commit", help="of the sources, where they are no checkout")
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if given.compile:
        compile_share(given.only, given.share, device)
        return 0
    rows = []
    for program in programs(given.only, given.share):
        rows.append(told(program, device))
        print(json.dumps(rows[-1]), flush=True)
        torch.cuda.empty_cache()
    right, varying = sum(row["right"] for row in rows), [row for row in rows if not row.get("constant", True)]
    average = geometric_mean([gain(row) for row in varying])
    print(f"{len(rows)} programs, {right} right; {len(varying)} not constant, geomean {average:.2f}")
    if given.results:
        index = None if device.type == "cpu" else 0
        made = stamp("kernelbench", "torch", device=index, named=given.commit or "")
        append_json([made | {"rows": rows}], "kernelbench", given.results)
    return 0 if right == len(rows) else 1


def compile_share(only: str, share: str, device: torch.device) -> None:
    """Calls some of the programs once in each form; choices beside other processes' calls are not kept."""
    for program in programs(only, share):
        with torch.no_grad(), patch.object(sites.KEPT, "keep"):
            variants(program.to(device), torch.rand(program.shape, device=device))
        torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
