"""Tunes plans in a process of its own, which a candidate may kill: `python -m fuseplan.tuning.worker`.

It reads one JSON object a line from its input and answers with lines that begin with `@`:

    {"plan": "...", "target": "cuda", "accuracy": "default", "threads": null, "seconds": 2, "most": 16,
     "skipped": {"template(...)": "why"}}
        -> {"trying": "template(...)"}   before a candidate's code is loaded and run
        -> {"found": {...}}              the choice, as `Tuned.to_json` tells it
        or {"refused": "why"}            an error of the plan; the process goes on
        or {"died": "why"}               anything else, such as a GPU that takes no more launches; it ends

A request {"warm": "cuda"} makes the target ready, and is answered with {}.
"""

from __future__ import annotations

import gc
import json
import sys
import traceback
from collections.abc import Mapping
from typing import Any, TextIO

from fuseplan.errors import FuseplanError
from fuseplan.kernels.target import parse_target
from fuseplan.system.child import teller
from fuseplan.tuning.tune import Search, measured, undecided


def serve(requests: TextIO, answers: TextIO) -> int:
    """Answers until the input ends, or the process is of no more use; the exit status."""
    write = teller(answers)

    def tell(**answer: Any) -> None:
        write(answer)

    for line in requests:
        try:
            answered(json.loads(line), tell)
        except (FuseplanError, MemoryError) as error:
            tell(refused=str(error) or type(error).__name__)
        except Exception as error:
            traceback.print_exc()
            tell(died=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
            return 1
    return 0


def answered(request: Mapping[str, Any], tell: Any) -> None:
    """Does what one request asks, and tells it.

    Raises:
        FuseplanError, MemoryError: the plan cannot be tuned.
    """
    if "warm" in request:
        parse_target(request["warm"])
        tell()
        return
    records = undecided(request["plan"], request["target"], request["accuracy"], request["threads"])
    how = Search(
        request["seconds"],
        most=request["most"],
        skipped=request["skipped"],
        begins=lambda text: tell(trying=text),
        progress=lambda _: tell(trying=""),
    )
    found = measured(records, how)
    gc.collect()  # the tensors, before the next plan's
    tell(found=found.to_json())


if __name__ == "__main__":
    sys.exit(serve(sys.stdin, sys.stdout))
