"""Records of one line a run, as tables: what `fuseplan bench` shows of them, and docs/measured.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean, mean, median
from typing import Any

from benchmarks.accuracy import FAMILIES, Deviation, of_families
from benchmarks.accuracy import markdown as accuracy_table
from benchmarks.report import gpu
from fuseplan.bench.markdown import table
from fuseplan.measure.peaks import KINDS_OF_TRAFFIC

Record = Mapping[str, Any]
Lines = Iterator[str]
# A row for each model or program, from several runs.
OF_MODELS = ("models", "quantized_models", "models_of_torch", "training", "kernelbench", "starts")
COMPILE = "compile-"  # records of compile times are named apart, by their suites


@dataclass(frozen=True)
class Section:
    """A record's part of the page: the heading, the command with its units, and the tables."""

    title: str
    lead: str
    tables: Callable[[Record], Lines]


def tables(record: Record) -> str:
    """A record's tables, and sentences below them."""
    return "\n".join(_section(record).tables(record))


def section(record: Record, stamp: str) -> Lines:
    """A record's part of the page; `stamp` tells when and with what it was measured."""
    found, suite = _section(record), record["benchmark"].removeprefix(COMPILE)
    yield from ("", f"### {found.title.format(suite)}", "", f"{found.lead.format(suite)} {stamp}", "")
    yield from found.tables(record)


def _section(record: Record) -> Section:
    name = record["benchmark"]
    return SECTIONS[COMPILE if name.startswith(COMPILE) else name]


def peaks(records: Sequence[Record]) -> Lines:
    """The peaks of a CPU, a record for each number of threads."""
    head = ["threads", "GFLOP/s", "where", *(f"{kind}, GB/s" for kind in KINDS_OF_TRAFFIC)]
    rows = [
        [
            str(each["threads"]),
            f"{each['flops'] / 1e9:.1f}",
            level,
            *(f"{rates[kind] / 1e9:.1f}" for kind in KINDS_OF_TRAFFIC if kind in rates),
        ]
        for each in sorted(records, key=lambda each: int(each["threads"]))
        for level, rates in each["bytes_a_second"].items()
    ]
    yield from table(head, rows)


def _accuracy(record: Record) -> Lines:
    found = [Deviation(**row) for row in record["rows"]]
    families = [each for each in found if each.case in FAMILIES]
    if others := [each for each in found if each.case not in FAMILIES]:
        yield accuracy_table(others)
    if others and families:
        yield ""
    if families:
        yield from (
            "Of operators, fuseplan's largest deviation of three draws; in brackets, over eager PyTorch's.",
            "",
        )
        yield of_families(families)


def _footprint(record: Record) -> Lines:
    rows = [
        ["`import numpy`", f"{record['numpy_import'] * 1e3:.0f} ms"],
        ["`import fuseplan` after it", f"{record['own_import'] * 1e3:.0f} ms"],
        ["heavy packages that it imports", ", ".join(record.get("brought", ())) or "none"],
        *([f"{name} on disk", f"{nbytes / 1e6:.1f} MB"] for name, nbytes in record["installed"].items()),
        ["together", f"{record['total'] / 1e6:.1f} MB"],
    ]
    yield from table(["what", "is"], rows)


def _models(record: Record) -> Lines:
    libraries = list(record["rows"][0]["cpu"])
    rows = []
    for row in record["rows"]:
        times = [f"{row['least'][name] * 1e3:.1f} ({row['cpu'][name] * 1e3:.1f})" for name in libraries]
        rows.append([row["model"], str(row["threads"]), *times, f"{row['sum'] * 1e3:.1f}"])
    yield from table(["model", "threads", *libraries, "plans alone"], rows)


def _quantized_models(record: Record) -> Lines:
    """Gain: ONNX Runtime's CPU time over ours; `f32 / ours`: what quantizing pays."""
    libraries, rows = list(record["rows"][0]["least"]), []
    for row in record["rows"]:
        cpu, errors = row["cpu"], row["errors"]
        times = [f"{row['least'][name] * 1e3:.1f} ({cpu[name] * 1e3:.1f})" for name in libraries]
        gains = [f"{cpu[each] / cpu['fuseplan']:.2f}" for each in ("onnxruntime", "fuseplan f32")]
        shown = [f"{errors[each]:.1e}" for each in ("fuseplan", "onnxruntime", "f32")]
        rows.append([row["model"], str(row["threads"]), *times, *gains, *shown])
    head = ["model", "threads", *libraries, "gain", "f32 / ours"]
    yield from table([*head, *(f"error of {each}" for each in ("fuseplan", "onnxruntime", "f32"))], rows)


def _compile(record: Record) -> Lines:
    rows = []
    for row in [*record["rows"], {"case": "median", **record}]:
        times = [row.get("cold"), row.get("cached")]
        rows.append([row["case"], *("" if time is None else f"{time * 1e3:.1f}" for time in times)])
    yield from table(["shape", "empty cache", "from the cache"], rows)
    if "first" in record:
        yield from ("", f"The first compile of a process takes {record['first'] * 1e3:.1f} ms more.")


def _gpu_peaks(record: Record) -> Lines:
    rows = [
        [f"product of {name} matrices", f"{rate / 1e12:.0f} TFLOP/s"]
        for name, rate in record["flops"].items()
    ]
    copied = record["bytes_a_second"]["dram"]
    yield from table(["what", "is"], [*rows, ["copy, bytes read and written", f"{copied / 1e9:.0f} GB/s"]])
    if record.get("disturbance"):
        yield from ("", f"These figures are not kept: {record['disturbance']}.")


def _host(record: Record) -> Lines:
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


def _device(record: Record) -> Lines:
    """The tests in tests/device: how many passed, and the largest error as a share of its bound."""
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
        known = gpu.failures()
        yield ""
        yield from (f"- failed: `{each}`. {known.get(each, '')}".rstrip() for each in record["failed"])


def _sanitize(record: Record) -> Lines:
    """compute-sanitizer over cases of each template."""
    tools = list(dict.fromkeys(each["tool"] for each in record["found"]))
    said = {(each["template"], each["plan"], each["tool"]): each for each in record["found"]}
    rows = [
        [name, f"`{plan}`", *(_verdict(said.get((name, plan, tool))) for tool in tools)]
        for name, plan in dict.fromkeys((name, plan) for name, plan, _ in said)
    ]
    yield from table(["template", "plan", *tools], rows)


def _verdict(told: Record | None) -> str:
    if told is None:
        return ""
    if told["status"] == 0:
        return "clean"
    return "; ".join(str(line).strip("= ") for line in told["said"]) or f"status {told['status']}"


def _registers(record: Record) -> Lines:
    """Kernels whose code overwrites registers too early, for each assembler."""
    yield f"{record['looked_at']} kernels for sm_90; counted are those with a product's factor in registers."
    yield ""
    rows = [[str(value) for value in found.values()] for found in record["found"]]
    yield from table(list(record["found"][0]), rows)


def _carried(record: Record) -> Lines:
    """Kernels that another machine compiled with another Triton: right, and their speed beside this one's."""
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


def _kernelbench(record: Record) -> Lines:
    """Programs of KernelBench, the lowest gain first."""
    rows = [row for row in record["rows"] if "seconds" in row]
    varying = [row for row in rows if not row["constant"]]
    right = sum(row["right"] for row in rows)
    yield f"The 50 programs of odd number, f32 in torch's default precision, as they stand: {len(rows)} run,"
    yield f"{right} right. The faster of eager PyTorch and torch.compile over fuseplan, with Inductor for"
    mean = f"geometric mean {geometric_mean(map(_gain, varying)):.2f} of {len(varying)}"
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


def _models_of_torch(record: Record) -> Lines:
    """Models of the transformers library; on a GPU, each library's call captured in a CUDA graph."""
    rows = record["rows"]
    used = [peer for peer in PEERS_OF_MODELS if any(peer in row["seconds"] for row in rows)]
    counted = ["launches"] if any("launches" in row for row in rows) else []
    head = ["model", "dtype", "batch", *used, "gain", *counted, "error of torch", "error", "commit"]
    yield from table(head, [
        [row["model"], dtype_of(row), str(row["batch"]),
         *(f"{row['seconds'][peer] * 1e3:.3f}" if peer in row["seconds"] else "" for peer in used),
         f"{model_gain(row):.2f}",
         *(_fewer(row) for _ in counted),
         f"{row['errors']['torch']:.1e}",
         f"{max(error for peer, error in row['errors'].items() if peer.startswith('fuseplan')):.1e}",
         row["commit"][:7]]
        for row in rows
    ])  # fmt: skip


def dtype_of(row: Record) -> str:
    """A row's dtype, and whether factors may be rounded to TF32."""
    return f"{row.get('dtype', 'float32')}{', no TF32' * bool(row.get('ieee'))}"


def _fewer(row: Record) -> str:
    """Launches of torch.compile, and the fewer of ours."""
    counts = row.get("launches", {})
    ours = [count for peer, count in counts.items() if peer.startswith("fuseplan")]
    return f"{counts['torch.compile']} to {min(ours)}" if counts else ""


def model_gain(row: Record) -> float:
    """The fastest of the others over the faster of fuseplan's two."""
    ours = [time for peer, time in row["seconds"].items() if peer.startswith("fuseplan")]
    others = [time for peer, time in row["seconds"].items() if not peer.startswith("fuseplan")]
    return float(min(others) / min(ours))


def _training(record: Record) -> Lines:
    """Training steps of models of the transformers library, each captured in a CUDA graph."""
    rows = record["rows"]
    used = [peer for peer in PEERS_OF_MODELS if any(peer in row["seconds"] for row in rows)]
    head = ["model", "tokens", *used, "gain", "GB", "launches", "error of torch", "error", "commit"]
    yield from table(head, [
        [row["model"], f"{row['batch']} x {row['tokens']}",
         *(f"{row['seconds'][peer] * 1e3:.2f}" if peer in row["seconds"] else "" for peer in used),
         f"{model_gain(row):.2f}",
         f"{row['bytes']['torch.compile'] / 1e9:.2f} to {row['bytes']['fuseplan'] / 1e9:.2f}",
         _fewer(row),
         f"{row['errors']['torch']:.1e}", f"{row['errors']['fuseplan']:.1e}", row["commit"][:7]]
        for row in rows
    ])  # fmt: skip


def _starts(record: Record) -> Lines:
    """Seconds that models take to start."""
    head = ["model", "dtype", "fuse, empty cache", "first call", "fuse again", "first call", "commit"]
    yield from table(head, [
        [row["model"], row["dtype"],
         *(f"{row[start][part]:.2f}" for start in ("cold", "second") for part in ("fuse", "call")),
         row["commit"][:7]]
        for row in record["rows"]
    ])  # fmt: skip


PEERS_OF_MODELS = (
    "torch", "torch:nhwc", "torch.compile", "max-autotune", "onnxruntime", "openvino",
    "fuseplan", "fuseplan:torch", "fuseplan.torch", "fuseplan.onnx",
)  # fmt: skip
MODELS_OF_TORCH = (
    "`python -m benchmarks.models_of_torch --device cuda --dtype bfloat16 --batch 1 32`: random weights, "
    "calls in CUDA graphs, milliseconds. `fuseplan` leaves what no plan computes to Inductor, and "
    "`fuseplan.torch` to eager torch. Gain: the fastest of the others over the fastest of ours. On a CPU, "
    "without `--device`: f32, one image or 128 tokens, two threads, beside the runtimes of ONNX; medians."
)
TRAINING = (
    "`python -m benchmarks.training`: forward pass, loss and backward pass, random weights in bf16 without "
    "dropout, each step in a CUDA graph, milliseconds. `fuseplan` leaves what no plan computes to Inductor, "
    "`fuseplan:torch` to eager torch. Gain: the fastest of the others over the faster of ours. GB: the most "
    "memory of a step without a graph, and launches, torch.compile's and ours. Errors: the norm of the worst "
    "gradient's difference from float64, over that gradient's norm."
)
STARTS = (
    "`python -m benchmarks.starts`: seconds of `fuseplan.torch.fuse` and of the first call, in a process "
    "that has imported torch and run the model once. First with an empty cache, then in another process "
    "from the filled cache."
)
QUANTIZED_MODELS = (
    "`fuseplan bench quantized_models --threads 1,2`: random weights, quantized by ONNX Runtime's tool, "
    "values static in u8 or i8, or dynamic; one image of 224 x 224, or 128 tokens through 4 layers of BERT. "
    "Milliseconds: the least time, and CPU time. Gain: ONNX Runtime's CPU time over ours. Errors: distances "
    "from the quantized model in f32 with its roundings, over its norm; `f32`: the model before."
)
MODELS = (
    "`fuseplan bench models --threads 1,2`: networks with random weights, one f32 image of 224 x 224. "
    "Milliseconds: the least time of a call, and the least CPU time of all threads; the plans of a model "
    "alone, added up."
)


def _choices(record: Record) -> Lines:
    """Of each suite, the choices' times over the best candidates'; then those furthest from them."""
    rows, far = [], []
    for suite, plans in record["suites"].items():
        ratios = [ratio for plan in plans if (ratio := over_best(plan)) is not None]
        near = sum(ratio <= NEAR for ratio in ratios)
        rows.append([
            suite, str(len(plans)), str(sum(len(plan["candidates"]) for plan in plans)),
            *(f"{each:.2f}" for each in (mean(ratios), median(ratios), max(ratios))),
            f"{near} of {len(ratios)}", str(len(plans) - len(ratios)),
        ])  # fmt: skip
        far += [(ratio, plan) for plan in plans if (ratio := over_best(plan)) is not None and ratio > NEAR]
    head = ["suite", "plans", "candidates", "mean", "median", "worst", f"at most {NEAR}", "not timed"]
    yield from table(head, rows)
    if not far:
        return
    yield ""
    told = [
        [f"`{plan['plan']}`", f"{ratio:.2f}", f"{plan['candidates'][plan['choice']][1] * 1e6:.1f}"]
        for ratio, plan in sorted(far, key=lambda each: -each[0])
    ]
    yield from table([f"choices beyond {NEAR}", "over the best", "us"], told)


def over_best(plan: Mapping[str, Any]) -> float | None:
    """The choice's time over that of the fastest candidate; None where the choice was not timed."""
    times = {text: float(seconds) for text, (_, seconds, _) in plan["candidates"].items()}
    return times[plan["choice"]] / min(times.values()) if plan["choice"] in times else None


NEAR = 1.1  # of the best candidate's time: repeated measurements differ by as much in places
CHOICES = (
    "`python -m benchmarks.choices SUITES`: random plans; nothing was tuned on them. The time of the "
    "cost model's choice over the time of the fastest candidate. Code that spills registers is not timed."
)

# By the benchmark's name.
SECTIONS: Mapping[str, Section] = {
    COMPILE: Section("Compile times of {}", "`fuseplan bench {} --compile-times`; milliseconds.", _compile),
    "footprint": Section("Footprint", "`fuseplan bench footprint`.", _footprint),
    "accuracy": Section("Deviation from float64", "`fuseplan bench accuracy`.", _accuracy),
    "gpu_accuracy": Section(
        "Deviation from float64 on a GPU", "`fuseplan bench accuracy --target cuda`.", _accuracy
    ),
    "models": Section("Whole models", MODELS, _models),
    "quantized_models": Section("Quantized models", QUANTIZED_MODELS, _quantized_models),
    "gpu_peaks": Section("Peaks of the GPU", "`fuseplan bench peaks --target cuda`.", _gpu_peaks),
    "choices": Section("Choices beside all candidates", CHOICES, _choices),
    "gpu_overhead": Section("What the host pays", "`fuseplan bench overhead --target cuda`.", _host),
    "device": Section("Tests on the GPU", "`pytest tests/device`.", _device),
    "sanitize": Section("compute-sanitizer", "`python tests/device/sanitize.py`.", _sanitize),
    "registers": Section(
        "Registers that are overwritten too early", "`python tests/registers.py`.", _registers
    ),
    "carried": Section("Kernels of another Triton", "`python -m device.carried`.", _carried),
    "models_of_torch": Section("Models of torch", MODELS_OF_TORCH, _models_of_torch),
    "training": Section("Training steps", TRAINING, _training),
    "starts": Section("Starts", STARTS, _starts),
    "kernelbench": Section("KernelBench, level 2", "`python -m benchmarks.kernelbench`.", _kernelbench),
}
