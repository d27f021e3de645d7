"""Fills the caches of the compilers for suites on a GPU, in many processes, so that a run measures at once.

    python -m benchmarks.filled gpu_rows gpu_chains --processes 15

A process prepares each of its cases in every peer that compiles. Nothing is timed.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Iterator, Sequence

import torch

from benchmarks.suite import load
from fuseplan.bench.peers import OURS, known
from fuseplan.measure.data import random_arrays
from fuseplan.plans.plan import FusionPlan

COMPILERS = (OURS, "torch.compile", "torch.compile:default")


def fill(text: str) -> list[str]:
    """Prepares a plan in each peer that compiles; the refusals, a line each."""
    torch.set_grad_enabled(False)
    plan, said = FusionPlan.parse(text), []
    peers = [known(True).by_name[name]() for name in COMPILERS]
    tensors = random_arrays(plan, 1, device="cuda")
    for peer in (each for each in peers if each.takes(plan)):
        try:
            peer.prepare(plan, [tensors]).result()
        except Exception as why:  # of a library: the run tells it too
            said.append(f"{peer.name}: {text}: {type(why).__name__}: {str(why)[:200]}")
    torch._dynamo.reset()
    return said


def filled(suites: Sequence[str], processes: int) -> Iterator[str]:
    """Refusals, as they come."""
    plans = list(dict.fromkeys(case.plan for name in suites for case in load(name).cases))
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for said in pool.imap_unordered(fill, plans):
            yield from said


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suites", nargs="+", help="names of suites, or files")
    parser.add_argument("--processes", type=int, default=8)
    given = parser.parse_args()
    for line in filled(given.suites, given.processes):
        print(line)


if __name__ == "__main__":
    main()
