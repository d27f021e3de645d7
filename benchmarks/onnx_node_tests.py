"""Runs every test of a single operator that the onnx package has through fuseplan.onnx, and counts outcomes.

    PYTHONPATH=tests python benchmarks/onnx_node_tests.py [module ...]

Prints a line for each test that is not right, and then how many are right, of these how many with a plan, and
how many of their nodes a plan computes, NumPy, ONNX Runtime or ONNX's reference evaluator.
"""

from __future__ import annotations

import collections
import sys
import warnings
from collections.abc import Sequence

from onnx_cases import cases, outcome


def main(modules: Sequence[str]) -> int:
    """Runs the tests of these modules of the package, or of all, and prints the outcome."""
    counted: collections.Counter[str] = collections.Counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the cases compute infinities on the way
        listed: Sequence[str | None] = modules or [None]
        for case in (each for module in listed for each in cases(module)):
            wrong, model = outcome(case)
            counted["tests"] += 1
            counted["wrong" if wrong else "right"] += 1
            if wrong:
                print(f"{case.name}: {wrong}", flush=True)
            elif model is not None and any(each.session.cut.sites for each in model._prepared.values()):
                counted["right with a plan"] += 1
    print(", ".join(f"{count} {what}" for what, count in counted.items()))
    return min(1, counted["wrong"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
