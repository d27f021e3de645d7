"""Measurements beside other programs: noticed, told, and not kept."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import fuseplan
from fuseplan.cli.commands import fuseplan as command
from fuseplan.errors import ArgumentError
from fuseplan.measure import ground, machine, peaks, quiet
from fuseplan.measure.stats import Timing, summarize

PLAN = "f32[1x8x9x9, nhwc] -> conv2d(8, kernel=3) -> bias -> relu"
OTHERS = "other programs used 98% of the processors"


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FUSEPLAN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(ground, "HOST_BLOCK", 0.001)
    monkeypatch.setattr(quiet, "LOOK", 0.001)
    return tmp_path


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quiet.HostWatch, "disturbance", lambda self: OTHERS)


def call(*words: str) -> Result:
    return CliRunner().invoke(command, words)


def stat(place: Path, *rows: tuple[int, ...]) -> Path:
    """A /proc/stat: user, nice, system, idle, iowait, irq, softirq, steal, in hundredths of a second."""
    lines = [f"cpu{number} {' '.join(map(str, row))} 0 0" for number, row in enumerate(rows)]
    place.write_text("\n".join(["cpu  1 2 3 4 5 6 7 8 9 10", *lines, "intr 5"]) + "\n")
    return place


def test_processors_that_this_process_may_not_use_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "available_processors", lambda: [1, 2])
    told = stat(
        tmp_path / "stat", (900, 0, 0, 0, 0, 0, 0, 0), (10, 0, 5, 70, 10, 0, 0, 5), (0, 0, 0, 100, 0, 0, 0, 0)
    )
    assert machine.processor_seconds(told) == (0.2, 2.0), "stolen time is busy, waiting for a disk is not"
    assert machine.processor_seconds(tmp_path / "absent") == (0.0, 0.0)


@pytest.mark.parametrize(
    ("busy_seconds", "own", "ran", "want"),
    [
        (2.0, 1.0, 1.0, "other programs used 50% of the processors"),
        (1.1, 1.0, 1.0, None),
        (1.0, 1.0, 0.5, "the measuring thread ran for 50% of the time"),
    ],
)
def test_a_watch_sees_other_programs_and_lost_time(
    monkeypatch: pytest.MonkeyPatch, busy_seconds: float, own: float, ran: float, want: str | None
) -> None:
    """In a second on two processors."""
    readings = {
        "process_time": iter([0.0, own]), "thread_time": iter([0.0, ran]), "perf_counter": iter([0.0, 1.0]),
    }  # fmt: skip
    machines = iter([(0.0, 0.0), (busy_seconds, 2.0)])
    monkeypatch.setattr(quiet, "processor_seconds", lambda: next(machines))
    for name, values in readings.items():
        monkeypatch.setattr(time, name, lambda values=values: next(values))
    watch = quiet.HostWatch()
    told = watch.disturbance()
    monkeypatch.undo()
    assert told == want


def test_a_thread_that_sleeps_is_not_measured() -> None:
    watch = quiet.HostWatch()
    time.sleep(0.05)
    assert watch.disturbance() is not None


@pytest.mark.parametrize(
    ("blocks", "want"),
    [
        ([[1.0, 1.1], [1.0, 1.2], [1.1, 1.0]], None),
        ([[1.0], [1.1], [2.0], [2.2]], "the times of 'torch' vary by"),
        ([[1.0, 700.0, 720.0]] * 5, "'torch' takes 700.0 times its least time"),
    ],
)
def test_samples_that_are_far_apart_are_noticed(blocks: list[list[float]], want: str | None) -> None:
    told = quiet.unsteady({"fused": summarize([[1.0]]), "torch": summarize(blocks)})
    assert told is None if want is None else want in str(told)


def test_a_disturbed_measurement_is_repeated_while_patience_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quiet, "processor_seconds", lambda: (0.0, 0.0))
    told = iter([OTHERS, OTHERS, None])
    monkeypatch.setattr(quiet.HostWatch, "disturbance", lambda self: next(told))
    measured = iter([1, 2, 3])
    found, why = quiet.undisturbed(lambda: next(measured), quiet.HostWatch, 60.0)
    assert (found, why) == (3, None)
    monkeypatch.setattr(quiet.HostWatch, "disturbance", lambda self: OTHERS)
    assert quiet.undisturbed(lambda: 1, quiet.HostWatch, 0.0) == (1, OTHERS)


@pytest.mark.parametrize("patience", [-1.0, float("nan"), "long", True])
def test_patience_is_seconds(patience: Any) -> None:
    with pytest.raises(ArgumentError, match="patience="):
        quiet.Patience(patience)


@pytest.mark.usefixtures("busy")
def test_times_beside_other_programs_are_no_verdict(own_folder: Path) -> None:
    compiled = fuseplan.compile(PLAN, threads=1)
    verdict = compiled.verdict()
    assert (verdict.disturbance, verdict.speedup, verdict.pays) == (OTHERS, None, None)
    assert f"no verdict: {OTHERS}" in str(verdict)
    assert "x\n" not in str(verdict), "there is no ratio"
    assert not (own_folder / "verdicts.jsonl").exists()
    assert compiled.explain().to_json()["verdict"] is None
    result = call("verdict", PLAN, "--threads", "1", "--json")
    assert (result.exit_code, json.loads(result.stdout)["pays"]) == (4, None)


@pytest.mark.usefixtures("resting")
def test_a_verdict_of_a_machine_at_rest_is_kept() -> None:
    result = call("verdict", PLAN, "--threads", "1", "--patience", "1")
    assert result.exit_code == 0, result.output
    assert fuseplan.explain(PLAN, threads=1).to_json()["verdict"]["disturbance"] is None


@pytest.mark.usefixtures("resting")
def test_what_was_kept_without_a_look_at_the_machine_is_not_repeated(own_folder: Path) -> None:
    fuseplan.compile(PLAN, threads=1).verdict()
    place = own_folder / "verdicts.jsonl"
    told = json.loads(place.read_text())
    del told["disturbance"]
    place.write_text(json.dumps(told) + "\n")
    assert fuseplan.explain(PLAN, threads=1).to_json()["verdict"] is None
    place.write_text(json.dumps({**told, "disturbance": OTHERS}) + "\n")
    assert fuseplan.explain(PLAN, threads=1).to_json()["verdict"] is None


@pytest.mark.usefixtures("busy")
def test_the_driver_and_run_say_that_times_are_unreliable() -> None:
    driven = json.loads(call("driver", PLAN, "--unfused", "--threads", "1", "--json").stdout)
    assert (driven["right"], driven["unfused"]["disturbance"]) == (True, OTHERS)
    assert f"no verdict: {OTHERS}" in call("driver", PLAN, "--unfused", "--threads", "1").stdout
    ran = call("run", PLAN, "--threads", "1")
    assert (ran.exit_code, f"unreliable {OTHERS}" in ran.stdout) == (0, True)
    assert "times as fast" not in ran.stdout


@pytest.mark.usefixtures("resting")
def test_run_tells_percentiles() -> None:
    told = json.loads(call("run", PLAN, "--threads", "1", "--json").stdout)
    least, median, p90, p99 = (told["timing"][name] for name in ("minimum", "median", "p90", "p99"))
    assert least <= median <= p90 <= p99
    assert told["disturbance"] is None
    printed = call("run", PLAN, "--threads", "1").stdout
    assert all(word in printed for word in ("median", "least", "p90", "p99", "times as fast as unfused"))


MADE_UP = peaks.Peaks(
    "c", 1, 1e11, {level: {"read": 1e10} for level in ("l2", "l3", "dram")}, 1 << 20, 1 << 24
)


def test_peaks_of_a_busy_moment_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peaks, "measure_peaks", lambda target, threads: MADE_UP)
    monkeypatch.setattr(quiet.HostWatch, "disturbance", lambda self: OTHERS)
    assert peaks.measured_peaks(1) == (MADE_UP, OTHERS)
    assert peaks.peaks(1) is None
    told = call("explain", PLAN, "--threads", "1", "--measure")
    assert (told.exit_code, "the peaks are not kept" in told.stderr) == (0, True)
    assert "floor       not measured" in told.stdout
    monkeypatch.setattr(quiet.HostWatch, "disturbance", lambda self: None)
    assert call("explain", PLAN, "--threads", "1", "--measure").stderr == ""
    assert peaks.peaks(1) == MADE_UP
    monkeypatch.setattr(quiet.HostWatch, "disturbance", lambda self: OTHERS)
    assert peaks.measured_peaks(1) == (MADE_UP, None), "they can only be better"


def test_an_estimate_is_not_below_the_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = peaks.Peaks("c", 1, 1e6, MADE_UP.bytes_a_second, 1 << 20, 1 << 24)
    monkeypatch.setattr(peaks, "peaks", lambda threads: slow)
    told = fuseplan.explain(PLAN, threads=1)
    assert told.to_json()["estimated_seconds"] == told.to_json()["floor"]["seconds"]
    assert "estimates less" in str(told)


@pytest.mark.usefixtures("resting")
def test_a_floor_above_a_measured_time_is_said_to_be_too_high(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = peaks.Peaks("c", 1, 1e3, MADE_UP.bytes_a_second, 1 << 20, 1 << 24)
    monkeypatch.setattr(peaks, "peaks", lambda threads: slow)
    fuseplan.compile(PLAN, threads=1).verdict()
    assert "too high, since a launch took" in fuseplan.explain(PLAN, threads=1).text(1000)


def test_a_gpu_that_others_use(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["GPU-aa-1, 3", "GPU-aa-2, 64", "GPU-aa-3, [N/A]"]
    monkeypatch.setattr(quiet, "nvidia_smi", lambda *fields: lines)
    shares = [quiet.gpu_share(each) for each in ("aa-1", "GPU-aa-2", "aa-3", "aa-4", "")]
    assert shares == [0.03, 0.64, None, None, None]


def test_peaks_of_a_gpu_that_others_use_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    class Watch:
        def __init__(self, device: int) -> None:
            assert device == 3

        def disturbance(self) -> str | None:
            return told

    monkeypatch.setattr(peaks, "GpuWatch", Watch)
    made = [peaks.GpuPeaks("g", {"dram": rate}, {"f16": rate}) for rate in (2.0, 1.0)]
    monkeypatch.setattr(peaks, "measure_gpu_peaks", lambda gpu, device: made.pop())
    told: str | None = OTHERS
    assert peaks.measured_gpu_peaks("g", 3)[1] == OTHERS
    assert peaks.gpu_peaks("g") is None
    told = None
    assert peaks.measured_gpu_peaks("g", 3)[1] is None
    assert peaks.gpu_peaks("g") == peaks.GpuPeaks("g", {"dram": 2.0}, {"f16": 2.0})


def test_timings_hold_what_is_judged() -> None:
    timing = summarize([[float(number) for number in range(1, 101)]])
    assert (timing.minimum, timing.p90, timing.p99) == (1.0, 90.0, 99.0)
    assert isinstance(timing, Timing)
