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
from fuseplan.bench.gpu import subject_of
from fuseplan.bench.peers import OURS, known
from fuseplan.measure.cases import Case

COMPILERS = (OURS, "torch.compile", "torch.compile:default")


def fill(case: Case) -> list[str]:
    """Prepares a case in each peer that compiles; the refusals, a line each."""
    torch.set_grad_enabled(False)
    subject, said = subject_of(case), []
    peers = [known(True).by_name[name]() for name in COMPILERS]
    tensors = subject.tensors(1, "cuda")
    for peer in (each for each in peers if each.takes(subject.plan)):
        try:
            subject.prepared(peer, tensors).result()
        except Exception as why:  # of a library: the run tells it too
            said.append(f"{peer.name}: {case.plan}: {type(why).__name__}: {str(why)[:200]}")
    torch._dynamo.reset()
    return said


def filled(suites: Sequence[str], processes: int) -> Iterator[str]:
    """Refusals, as they come."""
    cases = {(case.plan, case.gradients): case for name in suites for case in load(name).cases}
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for said in pool.imap_unordered(fill, cases.values()):
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
