"""The clock's protocol, the statistics, and the floor that measured peaks set."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from fuseplan.kernels.target import host_target
from fuseplan.measure import clock, machine, peaks
from fuseplan.measure.stats import percentile, summarize


def test_turns_give_each_name_once_a_round_and_rotate() -> None:
    taken = list(clock.turns(["a", "b", "c"], 4))
    assert [name for _, name in taken] == list("abcbcacababc")
    assert [number for number, _ in taken] == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3


def test_interleave_times_every_variant() -> None:
    calls = {"short": 0, "long": 0}

    def short() -> None:
        calls["short"] += 1

    def long() -> None:
        calls["long"] += 1
        sum(range(20_000))

    protocol = clock.Protocol(rounds=3, block_seconds=0.002)
    timed = clock.HostClock(protocol).interleave({"short": short, "long": long})
    assert timed["short"].blocks == timed["long"].blocks == 3
    assert 0 < timed["short"].minimum <= timed["short"].median <= timed["short"].p90
    assert timed["long"].median > 10 * timed["short"].median
    assert calls["short"] > timed["short"].n > calls["long"] / 10


def test_a_short_call_is_timed_in_groups() -> None:
    assert clock.calls_a_sample(lambda: None) > 10
    assert clock.calls_a_sample(lambda: sum(range(100_000))) == 1


def test_rotating_goes_through_all_copies() -> None:
    seen: list[int] = []
    call = clock.rotating([lambda: seen.append(0), lambda: seen.append(1), lambda: seen.append(2)])
    for _ in range(4):
        call()
    assert seen == [0, 1, 2, 0]


@pytest.mark.parametrize(("cache", "nbytes"), [(1 << 20, 1000), (1 << 20, 1 << 22), (100, 0)])
def test_copies_go_past_the_cache(cache: int, nbytes: int) -> None:
    copies = clock.copies_past(cache, nbytes, most=10**9)
    assert (copies - 1) * max(1, nbytes) >= 2 * cache


def test_summary_is_of_blocks_not_of_samples() -> None:
    # One disturbed block with many samples does not move the median.
    timing = summarize([[1.0, 1.0, 1.0], [1.1, 1.1, 1.1], [9.0] * 50])
    assert timing.median == 1.1
    assert timing.minimum == 1.0
    assert timing.p90 == 9.0
    assert timing.n == 56
    assert timing.blocks == 3


def test_summary_needs_a_sample() -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        summarize([[], []])


def test_percentile_is_a_sample() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.9) == 3.0
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([5.0], 0.0) == 5.0


MADE_UP = peaks.Peaks(
    "a processor",
    2,
    100e9,
    {"l2": {"read": 200e9}, "l3": {"read": 50e9, "copy": 60e9}, "dram": {"read": 20e9, "stream": 30e9}},
    1 << 20,
    16 << 20,
)


def test_floor_is_the_longer_of_computing_and_moving(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MADE_UP.floor(10**9, 1000) == peaks.Floor(0.01, "compute")
    assert MADE_UP.floor(10**9, 1000, dtype="f64") == peaks.Floor(0.02, "compute")
    tiled = replace(MADE_UP, tiles=1e12)
    kinds = {"": 1.0, "+avx2": 1.5, "+avx2,+avxvnni": 4.0}
    for features, speed in kinds.items():
        made = replace(host_target(), features=features, vector_bytes=32)
        monkeypatch.setattr(peaks, "host_target", lambda made=made: made)
        assert MADE_UP.floor(10**9, 1000, dtype="i8") == peaks.Floor(0.01 / speed, "compute")
    seconds = [tiled.floor(10**9, 1000, dtype=dtype).seconds for dtype in ("bf16", "i8", "f32", "f64")]
    assert seconds == [0.001, 0.0005, 0.01, 0.02]
    assert MADE_UP.floor(0, 1 << 20) == peaks.Floor((1 << 20) / 200e9, "l2")
    assert MADE_UP.floor(0, 6 << 20).bound == "l3"
    assert MADE_UP.floor(0, 60_000_000) == peaks.Floor(2e-3, "dram")
    assert MADE_UP.floor(0, 1 << 20, footprint=64 << 20).bound == "dram"


@pytest.mark.usefixtures("resting")
def test_peaks_are_stored_by_processor_and_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEPLAN_CACHE_DIR", str(tmp_path / "new"))
    measured = []

    def measure(target: object, threads: int) -> peaks.Peaks:
        measured.append(threads)
        return MADE_UP

    monkeypatch.setattr(peaks, "measure_peaks", measure)
    assert peaks.peaks(2) is None
    assert measured == []
    assert peaks.measured_peaks(2) == (MADE_UP, None)
    assert peaks.peaks(2) == MADE_UP
    assert measured == [2]
    assert peaks.peaks(1) is None


@pytest.mark.usefixtures("resting")
def test_peaks_without_a_place_to_store_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FUSEPLAN_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(peaks, "measure_peaks", lambda target, threads: MADE_UP)
    with pytest.warns(RuntimeWarning, match="nothing is kept"):
        assert peaks.measured_peaks(1) == (MADE_UP, None)
    assert peaks.peaks(1) == MADE_UP


@pytest.mark.usefixtures("resting")
@pytest.mark.parametrize("damage", ["", "{", "[]", '{"format": 1}', "null", '{"format": 99}'])
def test_damaged_peaks_count_as_absent(damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEPLAN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(peaks, "measure_peaks", lambda target, threads: MADE_UP)
    peaks.measured_peaks(1)
    (place,) = tmp_path.glob("peaks-*.json")
    place.write_text(damage)
    assert peaks.peaks(1) is None
    assert peaks.measured_peaks(1) == (MADE_UP, None)
    assert json.loads(place.read_text())["cpu"] == "a processor"


def test_measured_peaks_are_plausible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEPLAN_CACHE_DIR", str(tmp_path))
    found, _ = peaks.measured_peaks(1)
    assert 1e9 < found.flops < 1e12
    rates = [rate for level in found.bytes_a_second.values() for rate in level.values()]
    assert all(1e8 < rate < 1e13 and math.isfinite(rate) for rate in rates)
    assert found.bytes_a_second["l2"]["read"] > found.bytes_a_second["dram"]["read"]


def test_cpu_model_of_several_kinds_of_machine(tmp_path: Path) -> None:
    told = tmp_path / "cpuinfo"
    told.write_text("processor\t: 0\nmodel name\t: Some CPU @ 2.0GHz\nflags\t\t: fpu\n")
    assert machine.cpu_model(told) == "Some CPU @ 2.0GHz"
    told.write_text("processor\t: 0\nHardware\t: Some board\n")
    assert machine.cpu_model(told) == "Some board"
    assert machine.cpu_model(tmp_path / "absent")


def test_share_of_others() -> None:
    assert machine.others((10.0, 100.0), (12.0, 104.0), own=1.0) == pytest.approx(0.25)
    assert machine.others((10.0, 100.0), (12.0, 104.0), own=9.0) == 0.0
    assert machine.others((0.0, 0.0), (0.0, 0.0), own=0.0) == 0.0


@pytest.mark.usefixtures("resting")
def test_improved_peaks_only_rise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEPLAN_CACHE_DIR", str(tmp_path))
    slow = replace(
        MADE_UP, flops=1e9, bytes_a_second={level: {"read": 300e9} for level in ("l2", "l3", "dram")}
    )
    taken = iter([MADE_UP, slow])
    monkeypatch.setattr(peaks, "measure_peaks", lambda target, threads: next(taken))
    assert peaks.measured_peaks(2) == (MADE_UP, None)
    found, _ = peaks.measured_peaks(2)
    assert found.flops == MADE_UP.flops
    assert found.bytes_a_second == {level: {"read": 300e9} for level in ("l2", "l3", "dram")}
    assert peaks.peaks(2) == found
