"""Whole models in docs/speed.md: inference, training steps and KernelBench, a column a machine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from benchmarks.recorded import device_of, last_of_models
from benchmarks.report.records import dtype_of, model_gain
from fuseplan.bench.markdown import table

Record = Mapping[str, Any]
Cells = dict[tuple[str, ...], dict[str, str]]
THREADS = 2  # of a CPU


def inference(folder: Path) -> str:
    """The fastest other library's time over ours, by model, batch, dtype and machine."""
    records = [*_records(folder, "models_of_torch"), *_records(folder, "models")]
    return _table(("model", "dtype", "batch"), records, lambda row: f"{model_gain(row):.2f}")


def training(folder: Path) -> str:
    """The time of torch.compile's step over ours, and the share of its memory that ours takes."""
    return _table(("model", "dtype", "tokens"), _records(folder, "training"), _step)


def kernelbench(folder: Path) -> str:
    """A sentence for each GPU: the geometric mean, and how many programs are right."""
    lines = [f"- {device_of(each['machine'])}: {_programs(each)}" for each in _records(folder, "kernelbench")]
    return "\n".join(lines)


def _step(row: Record) -> str:
    share = row["bytes"]["fuseplan"] / row["bytes"]["torch.compile"]
    return f"{model_gain(row):.2f}; {share:.2f} of the memory"


def _programs(record: Record) -> str:
    right = sum(row["right"] for row in record["rows"])
    gains = [model_gain(row) for row in record["rows"] if not row.get("constant", True)]
    slower = sum(gain < 1 for gain in gains)
    said = f"geometric mean {geometric_mean(gains):.2f}; {right} of {len(record['rows'])} programs right"
    return f"{said}, {slower} slower than the faster of the two."


def _records(folder: Path, name: str) -> list[dict[str, Any]]:
    lines = (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return last_of_models(map(json.loads, lines))


def _table(head: Sequence[str], records: Sequence[Record], told: Callable[[Record], str]) -> str:
    """A row a model, a column a machine, and the geometric means of its gains."""
    cells, gains = Cells(), dict[str, list[float]]()
    for machine, row in _rows(records):
        key = (row["model"], dtype_of(row), _size(row))
        cells.setdefault(key, {})[machine] = told(row)
        gains.setdefault(machine, []).append(model_gain(row))
    listed = [[*key, *(found.get(machine, "") for machine in gains)] for key, found in sorted(cells.items())]
    means = [f"{geometric_mean(each):.2f}" for each in gains.values()]
    return "\n".join(table([*head, *gains], [*listed, ["geometric mean", "", "", *means]]))


def _rows(records: Sequence[Record]) -> Iterator[tuple[str, Record]]:
    """The rows that count, with their machine: of a CPU those of two threads."""
    for record in records:
        on_gpu = "gpu" in record["machine"]
        device = device_of(record["machine"]).replace("(R)", "").replace(" Processor", "")
        for row in record["rows"]:
            if on_gpu or row["threads"] == THREADS:
                yield (device if on_gpu else f"{device}, {THREADS} threads"), row


def _size(row: Record) -> str:
    batch = str(row.get("batch", 1))
    return f"{batch} x {row['tokens']}" if "tokens" in row else batch
