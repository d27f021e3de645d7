"""Recorded results: lines that `fuseplan.bench.results` wrote, read again, and findings that are no rows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fuseplan.bench.command import printed
from fuseplan.bench.options import Options, now
from fuseplan.bench.peers import known
from fuseplan.bench.results import Row, append_json
from fuseplan.errors import ArgumentError
from fuseplan.measure.machine import commit, gpu_machine, gpu_versions, machine, versions

KEYS_OF_MODELS = ("model", "number", "batch", "tokens", "dtype", "ieee", "threads")


def stamp(
    benchmark: str, *packages: str, device: int | None = None, run: str = "", named: str = ""
) -> dict[str, Any]:
    """The fields of every record: what was measured, when, on which machine, and with what.

    Args:
        benchmark: its name.
        *packages: whose versions count, on a CPU.
        device: the index of the GPU that was measured; None for the CPU.
        run: a name of the run; the time unless given.
        named: the commit; the checkout's unless given.
    """
    return {
        "benchmark": benchmark,
        "run": run or now(),
        "machine": (machine() if device is None else gpu_machine(device)).to_json(),
        "versions": versions(*packages) if device is None else gpu_versions(),
        "commit": named or commit(),
    }


def recorded(name: str, found: Mapping[str, Any], options: Options) -> dict[str, Any]:
    """A finding that is no row, with its stamp: appended to the results, and printed where JSON is."""
    device = options.device if options.is_on_gpu else None
    packages = (each for peer in known(False).by_name.values() for each in peer.packages)
    made = stamp(name, *packages, device=device, run=options.run, named=options.commit)
    stamped = {**found, **made}
    if options.results is not None:
        append_json([stamped], name, options.results)
    printed(stamped, options)
    return stamped


def read(place: Path) -> Iterator[Row]:
    """The lines of a file, oldest first.

    Raises:
        ArgumentError: a line is not a measurement; the message has its number.
    """
    for number, line in enumerate(place.read_text(encoding="utf-8").splitlines(), 1):
        try:
            yield Row(**json.loads(line))
        except (ValueError, TypeError) as error:
            raise ArgumentError(f"{place}:{number} is not a measurement: {error}") from error


def latest(rows: Iterable[Row]) -> list[Row]:
    """Of each case, on each processor, number of threads and copies, the lines of its last run.

    The peers of a case take turns in one run; two cases need not be of the same.
    """
    listed = list(rows)
    last: dict[tuple[str, ...], str] = {}
    for row in listed:
        last[_of(row)] = max(last.get(_of(row), ""), row.run)
    return [row for row in listed if row.run == last[_of(row)]]


def last_of_models(records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Records of whole models, one for each machine, with the last row of each model in each form.

    A row has its record's commit. The stamp is that of the last record.
    """
    found: dict[str, dict[str, Any]] = {}
    rows: dict[str, dict[tuple[str, ...], dict[str, Any]]] = {}
    for record in sorted(records, key=lambda record: str(record["run"])):
        machine = name_of(record["machine"])
        found[machine] = dict(record)
        known = rows.setdefault(machine, {})
        for row in record["rows"]:
            key = tuple(str(row.get(name) or "") for name in KEYS_OF_MODELS)  # older rows have no `ieee`
            known.pop(key, None)
            known[key] = {**row, "commit": record["commit"]}
    return [record | {"rows": [*rows[machine].values()]} for machine, record in found.items()]


def _of(row: Row) -> tuple[str, ...]:
    return row.suite, row.case, row.plan, str(row.threads), str(row.copies), device_of(row.machine)


def device_of(machine: Mapping[str, Any]) -> str:
    """The processor that a machine's stamp is about: its GPU where it names one."""
    return str(machine.get("gpu") or machine.get("cpu") or "")


def name_of(machine: Mapping[str, Any]) -> str:
    """What tells a machine from others: its GPU, whatever is beside it, or else its processor."""
    if "gpu" in machine:
        driver = f", driver {machine['driver']}" if machine["driver"] else ""
        return f"{machine['gpu']} ({machine['kind']}, {machine['processors']} multiprocessors{driver})"
    return f"{machine['cpu']}, {machine['cores']} cores ({machine['kind']}, {machine['system']})"


def commits(rows: Iterable[Row]) -> str:
    """What rows were measured at, the earliest run's first: `commit a`, or `commits a, b`."""
    found = dict.fromkeys(row.commit or "unknown" for row in sorted(rows, key=lambda row: row.run))
    return f"commit{'s' * (len(found) > 1)} {', '.join(found)}"
