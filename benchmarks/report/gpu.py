"""Sections of docs/measured.md about GPUs: suites, peaks, what the host pays, the tests that were run."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from benchmarks.standings import markdown
from benchmarks.suite import Suite
from docs.pages.docstrings import prose
from fuseplan.bench.markdown import table
from fuseplan.bench.results import Row
from fuseplan.bench.table import Line, lines

Record = Mapping[str, Any]
Lines = Iterator[str]

# What was tried where we lose, and why a test failed.
LOSSES = Path(__file__).resolve().parents[1] / "losses.toml"


def suite_section(found: Suite, rows: Sequence[Row], stamp: str) -> Lines:
    """A suite's tables, and what was tried on each shape that another library is faster at.

    Args:
        found: the suite.
        rows: its last rows on one GPU.
        stamp: when and with what they were measured.
    """
    yield from ("", f"### {found.title}", "")
    yield f"`fuseplan bench {found.name} --target cuda`; microseconds. {stamp}"
    yield ""
    yield markdown(found, rows).rstrip()
    yield from _wall(rows)
    lost = [line for line in lines(rows) if (line.ratio() or 1.0) < 1.0]
    if lost:
        yield from ("", "Slower than the fastest other:", "")
        tried = losses()
        yield from (f"- {_loss(line, tried)}" for line in lost)


def _wall(rows: Sequence[Row]) -> Lines:
    """Where it was measured: what a call takes the host, and the GPU in a CUDA graph."""
    timed = [row for row in rows if row.wall is not None]
    if not timed:
        return
    yield ""
    listed = [
        [row.case, row.peer, *(_us(each) for each in (row.wall, row.replay, row.median))] for row in timed
    ]
    heads = [
        "shape",
        "library",
        "a call, of the host",
        "in a CUDA graph, its tensors in the L2",
        "out of the L2",
    ]
    yield from table(heads, listed)


def _us(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e6:.1f}"


def _loss(line: Line, tried: Mapping[tuple[str, str, str], str]) -> str:
    best, ratio = line.best(), line.ratio()
    told = f"{line.group}, {line.case}: {ratio:.2f}" + (f" ({best.peer})" if best else "")
    what = tried.get((line.ours.suite, line.group, line.case)) or tried.get((line.ours.suite, line.group, ""))
    return f"{told}. {prose(what)}" if what else told


def losses(place: Path | None = None) -> dict[tuple[str, str, str], str]:
    """What was tried, by suite, group and case; an empty case stands for all of its group."""
    listed = _told(place).get("loss", [])
    return {(each["suite"], each["group"], each.get("case", "")): each["tried"] for each in listed}


def failures(place: Path | None = None) -> dict[str, str]:
    """What became of a test that failed on a GPU, by its name."""
    return {each["test"]: each["cause"] for each in _told(place).get("failure", [])}


def _told(place: Path | None) -> Record:
    """What is said of results by hand; nothing without the file."""
    where = place or LOSSES
    return tomllib.loads(where.read_text(encoding="utf-8")) if where.is_file() else {}


def _peaks(record: Record, stamp: str) -> Lines:
    yield from ("", "### Peaks of the GPU", "", f"`fuseplan bench peaks --target cuda`. {stamp}", "")
    rows = [
        [f"product of {name} matrices", f"{rate / 1e12:.0f} TFLOP/s"]
        for name, rate in record["flops"].items()
    ]
    copied = record["bytes_a_second"]["dram"]
    yield from table(["what", "is"], [*rows, ["copy, bytes read and written", f"{copied / 1e9:.0f} GB/s"]])


def _host(record: Record, stamp: str) -> Lines:
    yield from ("", "### What the host pays", "", f"`fuseplan bench overhead --target cuda`. {stamp}", "")
    calls = [[each["what"], *_times(each, 1e6)] for each in record["calls"]]
    yield from table(["a call, microseconds of the host", "median", "least"], calls)
    yield ""
    loads = [[f"`{each['plan']}`", *_times(each, 1e3), _origin(each)] for each in record["loads"]]
    yield from table(["a plan loaded in a new process, milliseconds", "median", "least", "from"], loads)


def _times(told: Record, scale: float) -> list[str]:
    if "refused" in told:
        return [str(told["refused"]).splitlines()[0], ""]
    return [f"{told[name] * scale:.2f}" for name in ("median", "least")]


def _origin(told: Record) -> str:
    if "refused" in told:
        return ""
    return f"{told['origin']}, {'with' if told['imported_triton'] else 'without'} triton imported"


def _device(record: Record, stamp: str) -> Lines:
    """The tests in tests/device: how many passed, and the largest error as a share of its bound."""
    yield from ("", "### Tests on the GPU", "", f"`pytest tests/device`. {stamp}", "")
    words = ("passed", "failed", "skipped")
    rows = [
        [name, *(str(counted.get(word, 0)) for word in words)] for name, counted in record["outcomes"].items()
    ]
    yield from table(["tests", *words], rows)
    shares = [[name, f"{share:.2f}"] for name, share in sorted(record["worst_share_of_bound"].items())]
    if shares:
        yield ""
        yield from table(["template", "largest error, as a share of its bound"], shares)
    if record["failed"]:
        known = failures()
        yield ""
        yield from (f"- failed: `{each}`. {known.get(each, '')}".rstrip() for each in record["failed"])


def _sanitize(record: Record, stamp: str) -> Lines:
    """compute-sanitizer over one case of each template."""
    yield from ("", "### compute-sanitizer", "", f"`python tests/device/sanitize.py`. {stamp}", "")
    tools = list(dict.fromkeys(each["tool"] for each in record["found"]))
    said = {(each["template"], each["tool"]): each for each in record["found"]}
    templates = list(dict.fromkeys(each["template"] for each in record["found"]))
    rows = [[name, *(_verdict(said.get((name, tool))) for tool in tools)] for name in templates]
    yield from table(["template", *tools], rows)


def _verdict(told: Record | None) -> str:
    if told is None:
        return ""
    if told["status"] == 0:
        return "clean"
    return "; ".join(str(line).strip("= ") for line in told["said"]) or f"status {told['status']}"


def _registers(record: Record, stamp: str) -> Lines:
    """Kernels whose code overwrites registers too early, for each assembler."""
    yield from (
        "",
        "### Registers that are overwritten too early",
        "",
        f"`python tests/registers.py`. {stamp}",
        "",
    )
    yield f"{record['looked_at']} kernels for sm_90; counted are those with a product's factor in registers."
    yield ""
    rows = [[str(value) for value in found.values()] for found in record["found"]]
    yield from table(list(record["found"][0]), rows)


def _carried(record: Record, stamp: str) -> Lines:
    """Kernels that another machine compiled with another Triton: right, and their speed beside this one's."""
    yield from ("", "### Kernels of another Triton", "", f"`python -m device.carried`. {stamp}", "")
    suites, tests = record["suites"], record["device tests' plans"]
    right = tests["right"] + sum(each["right"] for each in suites)
    shares = sorted((each["here_us"] / each["carried_us"], each["plan"]) for each in suites)
    mean = geometric_mean(share for share, _ in shares)
    yield f"Compiled with {record['toolchain']} for sm_90, elsewhere: {right} of "
    yield f"{right + tests['wrong'] + sum(not each['right'] for each in suites)} plans right. The time of the"
    yield f"kernel that this machine compiles over theirs, geometric mean of {len(shares)} plans: {mean:.2f}."
    yield f"{sum(share < 0.9 for share, _ in shares)} plans are below 0.90, the ten lowest of them here:"
    yield ""
    yield from table(
        ["plan", "time over theirs"], [[f"`{plan}`", f"{share:.2f}"] for share, plan in shares[:10]]
    )


def _kernelbench(record: Record, stamp: str) -> Lines:
    """Programs of KernelBench, the lowest gain first."""
    yield from ("", "### KernelBench, level 2", "", f"`python -m benchmarks.kernelbench`. {stamp}", "")
    rows = [row for row in record["rows"] if "seconds" in row]
    varying = [row for row in rows if not row["constant"]]
    right = sum(row["right"] for row in rows)
    yield f"The 50 programs of odd number, f32 in torch's default precision, as they stand: {len(rows)} run,"
    yield f"{right} right. The faster of eager PyTorch and torch.compile over fuseplan, with Inductor for"
    mean = f"geometric mean {record['geomean']:.2f} of {len(varying)}"
    yield f"what no plan computes: {mean} programs whose result depends"
    yield "on their input. Milliseconds; an error is the largest difference from float64 over one plus the"
    yield "magnitude."
    yield ""
    head = ["program", "torch", "torch.compile", "fuseplan", "gain", "error of torch.compile", "of fuseplan"]
    yield from table(head, [_program(row) for row in sorted(varying, key=_gain)])


def _gain(row: Record) -> float:
    seconds = row["seconds"]
    return float(min(seconds["torch"], seconds["torch.compile"]) / seconds["fuseplan"])


def _program(row: Record) -> list[str]:
    times = [f"{row['seconds'][name] * 1e3:.3f}" for name in ("torch", "torch.compile", "fuseplan")]
    errors = [f"{row['errors'][name]:.1e}" for name in ("torch.compile", "fuseplan")]
    return [f"{row['number']} {row['name']}", *times, f"{_gain(row):.2f}", *errors]


# Records of one line a run, by the benchmark's name: (record, stamp) -> lines of the page.
RECORDS: Mapping[str, Callable[[Record, str], Lines]] = {
    "gpu_peaks": _peaks,
    "gpu_overhead": _host,
    "device": _device,
    "sanitize": _sanitize,
    "registers": _registers,
    "carried": _carried,
    "kernelbench": _kernelbench,
}
