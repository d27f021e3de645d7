"""Choosing by measurement: which sites stay, why others go, and what is kept of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fuseplan.backends.cpu import CPU
from fuseplan.errors import ArgumentError, BuildError, UnsoundCodeError
from fuseplan.execution.stages import Records, decide
from fuseplan.graph import alternatives, choose, trial
from fuseplan.graph.choose import checked_mode, chosen
from fuseplan.graph.cut import Cut, Site
from fuseplan.graph.find import find
from fuseplan.graph.graph import Graph
from fuseplan.graph.session import Session
from fuseplan.kernels.emit import Source
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.target import Target
from fuseplan.kernels.template import Accuracy, Template
from fuseplan.measure import quiet
from fuseplan.plans.plan import FusionPlan
from fuseplan.stores import sites
from graphs import graph_of, random_inputs

SLOW = 2e-3  # seconds: a hundred times what a kernel here takes
TEXT = """
input x: f32[1x6x8x8]
constant w: f32[8x6x3x3]
constant mean: f32[8]
constant variance: f32[8]
constant scale: f32[8]
constant shift: f32[8]
constant v: f32[8x8x3x3]
a = conv2d(8, kernel=3, padding=1)(x, w)
b = batch_norm(a, mean, variance, scale, shift)
c = relu(b)
y = conv2d(8, kernel=3, padding=1)(c, v)
output y
"""


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resting: None) -> Path:
    monkeypatch.setenv("FUSEPLAN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(sites.KEPT, "unsaved", {})
    return tmp_path


@dataclass
class Exact:
    """A framework that computes float64's results, in no time unless it is told to wait."""

    graph: Graph
    name: str = "exact 1"
    wait: float = 0.0
    away: float = 0.0
    calls: list[str] = field(default_factory=list)
    inputs: Mapping[str, Any] = field(default_factory=dict)

    def example(self, names: Collection[str]) -> Mapping[str, Any]:
        return {name: self.inputs[name] for name in names if name in self.inputs}

    def own(self, site: Site, values: Mapping[str, Any]) -> Callable[[], Any]:
        made = trial.meaning(self.graph, site, values) * (1 + self.away)
        return lambda: _later(made, self.wait)

    def fused(self, site: Site, values: Mapping[str, Any]) -> Callable[[], Any]:
        self.calls.append(str(site.plan))
        return trial.launch(site, values)


@dataclass
class Spoilt(Exact):
    """One whose plans of a kind are spoilt by a function of their results."""

    kind: str = "relu"
    spoil: Callable[[Any], Any] = lambda made: made

    def fused(self, site: Site, values: Mapping[str, Any]) -> Callable[[], Any]:
        call = super().fused(site, values)
        return (lambda: self.spoil(call())) if self.kind in str(site.plan) else call


def _cut() -> Cut:
    return find(graph_of(TEXT), threads=1)


def _check(cut: Cut) -> None:
    inputs = random_inputs(cut.graph)
    want = cut.graph.evaluate(inputs)["y"]
    np.testing.assert_allclose(Session(cut)(inputs)["y"], want, rtol=1e-4, atol=1e-5)


def _raise(*_: Any) -> Any:
    raise BuildError("the toolchain is on holiday\nand more")


def _later(made: Any, seconds: float = SLOW) -> Any:
    if seconds:
        time.sleep(seconds)
    return made


def _codes(cut: Cut) -> dict[str, str]:
    return {str(node.outputs[0]): cut.left[id(node)].code for node in cut.graph.nodes if id(node) in cut.left}


def test_a_site_stays_where_the_framework_is_slower() -> None:
    cut = _cut()
    made = chosen(cut, Exact(cut.graph, wait=SLOW), "measured")
    assert [site.nodes for site in made.sites] == [site.nodes for site in cut.sites]
    for site in made.sites:
        found = site.measured
        assert found is not None
        assert (found.plan, found.code) == (str(site.plan), "")
        assert found.gain is not None
        assert found.gain > 1
        assert found.error is not None
        assert found.error < found.allowed
    _check(made)


def test_sites_on_a_gpu_have_the_fastest_of_their_near_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    sites = find(graph_of(TEXT), "triton:sm_90").sites
    ahead, asked = list[Records](), list[FusionPlan]()

    def second(plan: FusionPlan, target: Target, seconds: object, accuracy: Accuracy) -> Records:
        asked.append(plan)
        if len(asked) > 1:
            raise MemoryError("no room for the tensors")
        decided = decide(plan, target, accuracy=accuracy)
        return replace(decided, choice=replace(decided.choice, template=decided.choice.candidates[1]))

    monkeypatch.setattr(choose, "build_ahead", ahead.extend)
    monkeypatch.setattr(choose, "tuned_records", second)
    first, other, known = choose._nearest([*sites, sites[0]], [False, False, True])
    assert asked == [site.plan for site in sites]
    assert first.records.choice.template == sites[0].records.choice.candidates[1]
    assert (other, known) == (sites[1], sites[0]), "not measured, and as they were"
    built = {each.choice.template.text for each in ahead}
    assert {site.records.choice.template.text for site in sites} <= built
    assert len(ahead) > len(sites)


def test_a_site_that_loses_is_left_to_the_framework() -> None:
    cut = _cut()
    made = chosen(cut, Exact(cut.graph), "measured")
    assert not made.sites
    assert _codes(made) == dict.fromkeys("abcy", "slower")
    assert [site.plan for site in made.reverted] == [site.plan for site in cut.sites]
    assert all(site.measured and site.measured.code == "slower" for site in made.reverted)


def test_times_beside_other_programs_decide_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A site stays as predicted, and the next start measures it; one that is wrong goes all the same."""
    monkeypatch.setattr(quiet.HostWatch, "disturbance", lambda self: "others ran")
    cut = _cut()
    made = chosen(cut, Exact(cut.graph), "measured")
    assert [str(site.plan) for site in made.sites] == [str(site.plan) for site in cut.sites]
    assert {site.measured and site.measured.disturbance for site in made.sites} == {"others ran"}
    assert not sites.KEPT.records()
    left = _codes(chosen(cut, Exact(cut.graph, away=0.5), "measured"))
    assert left == dict.fromkeys("abcy", "disagrees")
    assert sites.KEPT.records()


@pytest.mark.parametrize(
    ("framework", "codes"),
    [
        (Spoilt(None, wait=SLOW, spoil=lambda made: made * 1.01), {"a": "inaccurate"}),  # type: ignore[arg-type]
        (Spoilt(None, wait=SLOW, spoil=lambda made: made * np.nan), {"a": "inaccurate"}),  # type: ignore[arg-type]
        (Spoilt(None, wait=SLOW, spoil=_raise), {"a": "failed"}),  # type: ignore[arg-type]
        (Exact(None, wait=SLOW, away=0.5), {"a": "disagrees", "y": "disagrees"}),  # type: ignore[arg-type]
    ],
    ids=["wrong", "not a number", "an exception", "another meaning"],
)
def test_a_site_that_is_wrong_or_fails_is_left_to_the_framework(
    framework: Exact, codes: dict[str, str]
) -> None:
    cut = _cut()
    made = chosen(cut, replace(framework, graph=cut.graph), "measured")
    assert _codes(made) == codes | ({"b": codes["a"], "c": codes["a"]})
    assert len(made.sites) == 2 - len(codes)


def test_twice_the_framework_s_error_is_allowed() -> None:
    cut = _cut()
    framework = Spoilt(cut.graph, wait=SLOW, away=0.008, spoil=lambda made: made * 1.01)
    assert len(chosen(cut, framework, "measured").sites) == 2


def test_plans_are_tried_on_the_example_s_values() -> None:
    """The framework's results are right anywhere, those of the plan on small values alone."""
    cut = _cut()
    framework = Spoilt(cut.graph, wait=SLOW, spoil=lambda made: np.where(abs(made) > 1e3, 0, made))
    assert len(chosen(cut, framework, "measured").sites) == 2
    inputs = {name: 1e4 * each for name, each in random_inputs(cut.graph).items()}
    made = chosen(cut, replace(framework, name="exact 2", inputs=inputs), "measured")
    assert _codes(made) == dict.fromkeys("abc", "inaccurate")


def test_a_site_that_cannot_be_compared_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    cut = _cut()
    monkeypatch.setattr(Exact, "own", _raise)
    made = chosen(cut, Exact(cut.graph), "measured")
    assert [site.measured.said for site in made.sites if site.measured] == [
        "exact 1 was not run: the toolchain is on holiday"
    ] * 2
    monkeypatch.setattr(trial, "meaning", _raise)
    made = chosen(cut, Exact(cut.graph, "exact 2"), "measured")
    assert {site.measured and site.measured.said for site in made.sites} == {
        "not measured: the toolchain is on holiday"
    }


def test_the_faster_of_folding_and_epilogue_is_taken() -> None:
    cut = _cut()
    assert str(cut.sites[0].plan).endswith("bias -> relu")
    framework = Spoilt(cut.graph, wait=2 * SLOW, kind="bias", spoil=_later)
    made = chosen(cut, framework, "measured")
    assert str(made.sites[0].plan).endswith("batch_norm -> relu")
    assert str(chosen(cut, framework, "predicted").sites[0].plan) == str(made.sites[0].plan)
    _check(made)


@pytest.mark.parametrize(("away", "rounded"), [(0.0, False), (2e-3, True)])
def test_factors_are_rounded_where_the_framework_rounds_them(
    away: float, rounded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch may round by its settings, and its kernel for a convolution of three channels does not."""
    monkeypatch.setattr(alternatives, "AS_FAST", 0.0)
    cut = find(graph_of(TEXT.replace("padding=1", "padding=1, precision=tf32")), threads=1)
    assert all("tf32" in str(site.plan) for site in cut.sites)
    framework = Spoilt(cut.graph, wait=SLOW, away=away, kind="tf32", spoil=lambda made: made * (1 + 2e-3))
    made = chosen(cut, framework, "measured")
    assert [("tf32" in str(site.plan)) for site in made.sites] == [rounded] * 2
    assert str(chosen(cut, framework, "predicted").sites[0].plan) == str(made.sites[0].plan)
    _check(made)


def test_choices_are_kept_and_equal_sites_measured_once(own_folder: Path) -> None:
    cut, framework = _cut(), Exact(graph_of(TEXT), wait=SLOW)
    twice = replace(cut, sites=(*cut.sites, *cut.sites))
    first = chosen(twice, framework, "measured")
    assert len(first.sites) == 4
    assert len(framework.calls) == 3  # of the first site, both forms
    sites.KEPT.unsaved.clear()  # what another process begins with
    for mode in ("measured", "predicted"):
        again = chosen(cut, framework, checked_mode(mode))
        assert [site.measured for site in again.sites] == [site.measured for site in first.sites[:2]]
    assert len(framework.calls) == 3
    assert len((own_folder / sites.FILE).read_text().splitlines()) == 2
    chosen(cut, replace(framework, name="exact 2"), "measured")
    assert len(framework.calls) == 6


def test_failures_are_not_kept(own_folder: Path) -> None:
    cut = _cut()
    chosen(cut, Spoilt(cut.graph, wait=SLOW, spoil=_raise), "measured")
    assert len((own_folder / sites.FILE).read_text().splitlines()) == 1


def test_a_kernel_that_is_not_built_never_fails_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    cut = _cut()
    monkeypatch.setattr("fuseplan.graph.cut.build_sound", _raise)
    made = chosen(cut, Exact(cut.graph), "predicted")
    assert not made.sites
    assert {reason.code for reason in made.left.values()} == {"failed"}
    assert {reason.got for reason in made.left.values()} == {"the toolchain is on holiday"}
    assert chosen(cut, Exact(cut.graph), "predicted", is_built=False).sites == cut.sites


def test_a_site_has_the_kernel_whose_code_passes_the_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    cut, known = _cut(), CPU.compile_object
    first = [site.records.choice for site in cut.sites]

    def compiled(source: Source, kernel: Kernel, template: Template, target: Target) -> bytes:
        if any(template == each.template for each in first):
            raise UnsoundCodeError("a check fails")
        return known(source, kernel, template, target)

    monkeypatch.setattr(CPU, "compile_object", compiled)
    monkeypatch.setattr("fuseplan.execution.build._programs", {})
    made = chosen(cut, Exact(cut.graph), "predicted")
    for site, before in zip(made.sites, first, strict=True):
        after = site.records.choice
        assert after.template in before.candidates
        assert before.template not in after.candidates
        assert "a check fails" in {each.fault for each in after.considered}
    _check(made)


def test_measuring_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    cut, framework = _cut(), Exact(graph_of(TEXT))
    monkeypatch.setattr(choose, "SECONDS", -1.0)
    made = chosen(cut, framework, "measured")
    assert [site.measured for site in made.sites] == [None, None]
    assert not framework.calls


def test_other_words_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"choose='fastest'; want 'predicted' or 'measured'"):
        checked_mode("fastest")
