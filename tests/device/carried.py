"""Kernels that one machine compiles and another runs, as files.

    PYTHONPATH=tests python -m device.carried build FOLDER [SUITE...]   # needs the compiler, and no GPU
    PYTHONPATH=tests python -m device.carried run FOLDER [--times]      # needs the GPU, and no compiler

`build` saves the plans of the device tests, or of suites. `run` checks each against float64 and prints a line
of JSON: the plan, its error, and with `--times` its time beside the kernel that this machine compiles.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import fuseplan
from benchmarks import suite
from device.plans import texts
from fuseplan.compile import compile as compile_plan
from fuseplan.errors import Unsupported
from fuseplan.execution.stages import decide
from fuseplan.loaded import LoadedPlan
from fuseplan.measure.ground import checks_of, ground_of


def build(folder: Path, target: str, plans: Sequence[str]) -> int:
    """Saves every plan that a template of the target takes; gives how many."""
    folder.mkdir(parents=True, exist_ok=True)
    count = 0
    for text in plans:
        try:
            compiled = compile_plan(text, target)
        except Unsupported as error:
            print(f"skipped: {error.what}", file=sys.stderr)
            continue
        compiled.save(folder / f"{count:04}.fpk")
        count += 1
    return count


def run(folder: Path, *, times: bool) -> Iterator[dict[str, Any]]:
    """What became of each file."""
    for place in sorted(folder.glob("*.fpk")):
        loaded = fuseplan.load(place)
        told = {"file": place.name, "plan": str(loaded.plan), "toolchain": loaded.toolchain}
        yield told | _ran(loaded, times=times)


def _ran(loaded: LoadedPlan, *, times: bool) -> dict[str, Any]:
    ground = ground_of(loaded.plan, loaded.target, seed=1)
    held = {**ground.tensors, **ground.results()}
    src, out = held.pop("src"), ground.out()
    bound = loaded.bind(**held)
    errors = ground.deviations(bound(src, out))
    records = decide(loaded.plan, str(loaded.target), template=loaded.template)
    checks = checks_of(records.kernel, records.choice.template, errors)
    told = {"right": all(each.is_right for each in checks), "checks": [each.to_json() for each in checks]}
    if not times:
        return told
    here = compile_plan(loaded.plan, "cuda" if loaded.target.processors else str(loaded.target)).bind(**held)
    calls = {"carried": lambda: bound(src, out), "here": lambda: here(src, out)}
    return told | {name: each.median for name, each in ground.times(calls).items()}


def main() -> int:
    """Builds or runs; the exit status is 1 where a kernel is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("build", "run"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("suites", nargs="*")
    parser.add_argument("--target", default="triton:sm_90")
    parser.add_argument("--times", action="store_true")
    given = parser.parse_intermixed_args()
    if given.what == "build":
        named = [case.plan for name in given.suites for case in suite.load(name).cases]
        print(build(given.folder, given.target, named or texts()), "plans saved")
        return 0
    wrong = 0
    for line in run(given.folder, times=given.times):
        print(json.dumps(line), flush=True)
        wrong += not line["right"]
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
