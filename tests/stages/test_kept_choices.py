"""Choices on disk: the same as those made anew, and made anew where a file is not to be trusted."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

import fuseplan
from fuseplan.backends.cpu import CPU
from fuseplan.backends.cpu.templates.pointwise import Pointwise
from fuseplan.backends.triton import TRITON
from fuseplan.errors import UnsoundCodeError, Unsupported
from fuseplan.execution import kept as kept_choices
from fuseplan.execution import select
from fuseplan.execution.build import build_sound
from fuseplan.execution.stages import Records, decide
from fuseplan.kernels.emit import Source
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.target import Target
from fuseplan.kernels.template import Accuracy, Template
from fuseplan.stores import cache, tuned
from fuseplan.system import stock

PLAN = "f32[8x64x14x14] -> conv2d(64, kernel=3, padding=1) -> bias -> relu"
PLANS = (
    PLAN,
    "f32[4x64x56x56, nhwc] -> conv2d(64, kernel=3, padding=1, groups=64) -> bias",
    "f32[128x256] -> matmul(512) -> bias -> gelu",
    "f16[128x256] -> layer_norm",
    "f16[2x4x64x64] -> attention",
    "bf16[64x256] -> softmax -> mul",
    "f32[64x1000] -> relu -> add",
    "f32[64x512] -> cumsum",
)
TARGETS = ("cpu:avx2", "cpu:avx512", "triton:sm_90", "triton:sm_80")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, a toolchain of Triton's, and none of this process's programs."""
    monkeypatch.setenv("FUSEPLAN_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setattr("fuseplan.execution.build._programs", {})
    monkeypatch.setattr(cache, "_tally", cache._Tally())
    monkeypatch.setattr(tuned.OWN, "unsaved", {})
    monkeypatch.setattr(TRITON, "fingerprint", lambda: "triton 3.9.0")
    return tmp_path / "kernels"


def kept(plan: str = PLAN, target: str = "cpu", accuracy: Accuracy = "default") -> Records:
    return decide(plan, target, accuracy=accuracy, use_cache=True)


def parts_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*" + stock.SUFFIX_OF_PARTS))


@pytest.fixture
def estimates(monkeypatch: pytest.MonkeyPatch) -> list[Kernel]:
    """The kernels whose candidates are estimated."""
    seen: list[Kernel] = []
    known = select._best

    def best(kernel: Kernel, *others: object) -> select.Choice:
        seen.append(kernel)
        return known(kernel, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(select, "_best", best)
    return seen


@pytest.mark.parametrize("target", ["cpu", "triton:sm_90"])
def test_a_kept_choice_imports_its_own_template_alone(target: str) -> None:
    program = f"""
import sys
from fuseplan.backends.triton import TRITON
from fuseplan.execution.stages import decide
TRITON.fingerprint = lambda: "triton 3.9.0"
decide("f32[64x512] -> cumsum", {target!r}, use_cache=True)
print(*(name for name in sys.modules if ".templates." in name))
"""
    command = [sys.executable, "-c", program]
    runs = [subprocess.run(command, capture_output=True, text=True, check=False) for _ in "ab"]
    loaded = [{name.split(".templates.")[1] for name in run.stdout.split()} for run in runs]
    assert {"order", "scan", "pointwise"} <= loaded[0], runs[0].stderr
    assert "scan" in loaded[1], runs[1].stderr
    assert not loaded[1] & {"order", "pointwise"}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("plan", PLANS)
def test_a_kept_choice_is_the_one_made_anew(plan: str, target: str, estimates: list[Kernel]) -> None:
    anew, first = decide(plan, target), kept(plan, target)
    estimates.clear()
    second = kept(plan, target)
    assert not estimates, "nothing is estimated"
    assert repr(second.choice.template) == repr(first.choice.template) == repr(anew.choice.template)
    assert type(second.choice.template) is type(anew.choice.template)
    assert second.choice == anew.choice
    assert second.source == anew.source
    assert not estimates, "the source needs no other candidate"
    assert second.choice.considered == anew.choice.considered
    assert second.choice.candidates == anew.choice.candidates
    assert second.choice.to_json() == anew.choice.to_json()
    assert len(estimates) == 1, "who asks has it weighed again, once"


def test_every_kind_of_template_is_told_and_read(folder: Path) -> None:
    def candidates() -> Iterator[tuple[Template, Target]]:
        for plan in PLANS:
            for target in TARGETS:
                records = decide(plan, target)
                yield from ((each, records.target) for each in records.choice.candidates)

    for each, target in candidates():
        told = kept_choices._told(select.ranked(each, (select.Considered(each.text, 1.5),)))
        backend = CPU if target.backend == "cpu" else TRITON
        found = kept_choices._read(told, lambda: pytest.fail("nothing is chosen"), backend)
        assert repr(found.template) == repr(each)
        assert found.seconds == 1.5


def test_the_accuracy_and_the_threads_have_choices_of_their_own(estimates: list[Kernel]) -> None:
    for _ in range(2):
        strict = kept("f32[1x64x56x56] -> conv2d(64, kernel=3)", accuracy="strict")
        assert strict.choice.template == decide(strict.plan, "cpu", accuracy="strict").choice.template
        for threads in (1, 7):
            one = decide(PLAN, "cpu", threads=threads, use_cache=True)
            assert one.choice.template == decide(PLAN, "cpu", threads=threads).choice.template


def broken(told: list[object]) -> Iterator[bytes]:
    """What an entry with a right checksum may hold: of another program, or of nobody."""
    module, name, knobs, seconds, faults = told
    assert isinstance(knobs, dict)
    yield b""
    yield b"{}"
    yield b"\xff"
    yield json.dumps(told[:-1]).encode()
    for each in (
        ["os", "system", {}, seconds, faults],
        ["fuseplan.backends.triton.templates.product", "Product", {}, seconds, faults],
        ["fuseplan.backends.cpu.templates.gone", name, knobs, seconds, faults],
        [module, "Gone", knobs, seconds, faults],
        [module, "annotations", knobs, seconds, faults],
        [module, name, {**knobs, "more": 1}, seconds, faults],
        [module, name, dict.fromkeys(knobs, "many"), seconds, faults],
        [module, name, {}, seconds, faults],
        [module, name, knobs, "soon", faults],
        [module, name, knobs, None, faults],
        [module, name, knobs, seconds, 3],
    ):
        yield json.dumps(each).encode()


def test_what_is_no_choice_is_made_again(
    folder: Path, estimates: list[Kernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    anew, known = decide(PLAN, "cpu").choice, kept().choice
    (place,) = parts_of(folder)
    whole = place.read_bytes()
    for payload in broken(json.loads(kept_choices._told(anew))):
        with monkeypatch.context() as patch:
            patch.setattr(kept_choices, "_told", lambda _: payload)  # noqa: B023
            assert known.keep is not None
            known.keep(known)
        estimates.clear()
        assert kept().choice == anew, payload
        assert len(estimates) == 1, payload
        assert place.read_bytes() == whole, "and is kept in its place"


def test_extents_of_an_open_axis_have_choices_of_their_own() -> None:
    records = decide("f32[*x64] -> matmul(256)", "cpu:avx2")
    kernels = [records.kernel.with_extent(extent) for extent in (1, 4096)]
    assert kernels[0].text == kernels[1].text
    found = [kept_choices.selected(each, records.target).template for each in kernels]
    assert found == [select.select(each, records.target).template for each in kernels]
    assert found[0] != found[1]


@pytest.mark.parametrize(
    "damage",
    [lambda data: b"", lambda data: data[:-1], lambda data: data + b" ", lambda data: b"x" + data[1:]],
)
def test_a_damaged_file_is_made_again(folder: Path, estimates: list[Kernel], damage) -> None:  # type: ignore[no-untyped-def]
    anew = kept().choice
    (place,) = parts_of(folder)
    whole = place.read_bytes()
    place.write_bytes(damage(whole))
    estimates.clear()
    assert kept().choice == anew
    assert len(estimates) == 1
    assert place.read_bytes() == whole


def test_other_code_or_another_toolchain_chooses_anew(
    folder: Path, estimates: list[Kernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept()
    monkeypatch.setattr(cache, "fingerprint", lambda: "other sources")
    kept()
    monkeypatch.setattr(CPU, "fingerprint", lambda: "another llvmlite")
    kept()
    assert len(estimates) == len(parts_of(folder)) == 3
    monkeypatch.setattr(CPU, "fingerprint", lambda: None)
    kept()
    monkeypatch.setattr(cache, "fingerprint", lambda: None)
    kept()
    assert len(estimates) == 5
    assert len(parts_of(folder)) == 3, "where they cannot be told, nothing is kept"


def test_without_the_cache_nothing_is_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decide(PLAN, "cpu")
    fuseplan.explain(PLAN)
    fuseplan.compile(PLAN, cache=False)
    fuseplan.compile(PLAN, template="direct")
    assert not parts_of(folder)
    monkeypatch.setenv("FUSEPLAN_DISABLE_CACHE", "1")
    assert kept().choice == decide(PLAN, "cpu").choice
    assert not parts_of(folder)


def test_a_plan_that_is_refused_is_refused_again(folder: Path) -> None:
    for _ in range(2):
        with pytest.raises(Unsupported):
            kept("f16[2x4x8x8x8] -> conv3d(8, kernel=3)", "cpu", accuracy=1e-30)
    assert not parts_of(folder)


def test_a_measured_choice_goes_before_a_kept_one() -> None:
    first = kept()
    other = first.choice.candidates[1].text
    toolchain = str(CPU.fingerprint())
    key = tuned.key_of(first.kernel, first.target, "default", toolchain)
    tuned.keep(tuned.Tuned(key, PLAN, other, 1e-5, first.choice.template.text, 2e-5, 3, (), "2026-01-01"))
    for _ in range(2):
        found = kept().choice
        assert found.template.text == other
        assert found.is_current
        assert found.considered == decide(PLAN, "cpu").choice.considered
    assert decide(PLAN, "cpu", tuned=False, use_cache=True).choice == first.choice


@dataclass(frozen=True)
class Plugged(Pointwise):
    """A template from outside, which is faster than all others."""

    name: ClassVar[str] = "plugged"

    @classmethod
    def candidates(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Template]:
        for known in Pointwise.candidates(kernel, target, accuracy):
            yield cls(**known.knobs)

    def seconds(self, kernel: Kernel, target: Target) -> float:
        return 0.0


@pytest.mark.usefixtures("registries")
def test_a_template_from_outside_is_considered() -> None:
    plan = "f32[64x1000] -> relu"
    assert kept(plan).choice.template.name != "plugged"
    fuseplan.register_template(Plugged)
    assert kept(plan).choice.template.name == "plugged"


def test_a_compiled_plan_explains_itself_from_a_kept_choice() -> None:
    told = fuseplan.explain(PLAN).to_json()["choice"]
    for _ in range(2):
        compiled = fuseplan.compile(PLAN)
        assert compiled.explain().to_json()["choice"] == told


def test_candidates_whose_code_has_faults_are_not_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    known, made = CPU.compile_object, list[Template]()

    def compiled(source: Source, kernel: Kernel, template: Template, target: Target) -> bytes:
        made.append(template)
        if len(made) < 3:
            raise UnsoundCodeError(f"check {len(made)} fails")
        return known(source, kernel, template, target)

    monkeypatch.setattr(CPU, "compile_object", compiled)
    first, _ = build_sound(kept())
    assert len(made) == 3
    monkeypatch.setattr("fuseplan.execution.build._programs", {})
    second, program = build_sound(kept())
    assert program.origin == "disk"
    assert len(made) == 3
    assert second.choice == first.choice
    assert second.choice.considered == first.choice.considered
    assert [each.fault for each in second.choice.considered[-2:]] == ["check 1 fails", "check 2 fails"]


def _keep_in_child(results: multiprocessing.Queue[list[str]]) -> None:
    results.put([kept(plan).choice.template.text for plan in PLANS])


def test_many_processes_keep_at_once(folder: Path) -> None:
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.Queue[list[str]] = context.Queue()
    children = [context.Process(target=_keep_in_child, args=(results,)) for _ in range(4)]
    for child in children:
        child.start()
    found = [results.get(timeout=60) for _ in children]
    for child in children:
        child.join()
    want = [decide(plan, "cpu").choice.template.text for plan in PLANS]
    assert found == [want] * 4
    assert len(parts_of(folder)) == len(PLANS)
    assert [kept(plan).choice.template.text for plan in PLANS] == want
