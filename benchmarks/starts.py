"""How long a model's start takes: fused with an empty cache, and again from the filled cache.

    python -m benchmarks.starts --results benchmarks/results
    python -m benchmarks.starts --device cuda --dtype float16

Each start is a process of its own, which has imported torch, built the model and run it once. `fuse` is the
time of `fuseplan.torch.fuse`: reading the graph, finding sites, choosing, compiling, and in the first process
measuring. `call` is the first call's, which binds weights and allocates.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import fuseplan.torch
from benchmarks.recorded import stamp
from benchmarks.zoo import MODELS, built
from fuseplan.bench.results import append_json
from fuseplan.system.checkout import CHECKOUT
from fuseplan.system.child import python, python_environment

STARTS = ("cold", "second")
DEFAULT = ("resnet50", "llama_4x2048")


def started(name: str, device: str, dtype: str) -> dict[str, float]:
    """Seconds of `fuse` and of the first call, in this process."""
    module, x = built(name)
    module.to(device, getattr(torch, dtype))
    x = x.to(device, getattr(torch, dtype)) if x.is_floating_point() else x.to(device)
    with torch.no_grad():
        module(x)
        _finish(device)
        begin = time.perf_counter()
        fused = fuseplan.torch.fuse(module, x)
        _finish(device)
        middle = time.perf_counter()
        fused(x)
        _finish(device)
    return {"fuse": middle - begin, "call": time.perf_counter() - middle}


def _finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measured(name: str, device: str, dtype: str) -> dict[str, object]:
    """A model's row: both starts, each in a process of its own."""
    row: dict[str, object] = {"model": name, "device": device, "dtype": dtype}
    with tempfile.TemporaryDirectory(prefix="fuseplan-starts-") as folder:
        for start in STARTS:
            row[start] = _in_a_process([name, "--device", device, "--dtype", dtype], folder)
    return row


def _in_a_process(arguments: list[str], folder: str) -> dict[str, float]:
    printed = subprocess.run(
        python("-m", __spec__.name if __spec__ else __name__, "--only", *arguments, "--once"),
        env=python_environment(str(CHECKOUT), FUSEPLAN_CACHE_DIR=folder, FUSEPLAN_DISABLE_CACHE="0"),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    seconds: dict[str, float] = json.loads(printed.stdout.splitlines()[-1])
    return seconds


def main() -> int:
    """Measures the starts that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=list(MODELS), default=list(DEFAULT), metavar="MODEL")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument(
        "--results", type=Path, metavar="FOLDER", help="append the result to FOLDER/starts.jsonl"
    )
    parser.add_argument("--commit", help="the commit to record, where the checkout has no .git")
    parser.add_argument("--once", action="store_true", help="one start in this process")
    given = parser.parse_args()
    if given.once:
        print(json.dumps(started(given.only[0], given.device, given.dtype)))
        return 0
    on_gpu = given.device == "cuda"
    rows = []
    for name in given.only:
        rows.append(measured(name, given.device, given.dtype))
        print(json.dumps(rows[-1]), flush=True)
    made = stamp("starts", "torch", "transformers", device=0 if on_gpu else None, named=given.commit or "")
    if given.results:
        append_json([made | {"rows": rows}], "starts", given.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
