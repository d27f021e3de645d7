"""The store of measured choices: keys, files, which choice wins, and what compile makes of it."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

import fuseplan
from fuseplan.backends import backend_of
from fuseplan.errors import ArgumentError
from fuseplan.execution.select import select
from fuseplan.execution.stages import decide
from fuseplan.stores import cache, tuned
from fuseplan.stores.tuned import Tuned
from fuseplan.system import limits

PLAN = "f32[1x64x14x14, nhwc] -> conv2d(64, kernel=3, padding=1) -> relu"


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FUSEPLAN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuned.OWN, "unsaved", {})
    monkeypatch.setattr(cache, "_tally", cache._Tally())
    return tmp_path


def choice_for(plan: str, place: int, date: str = "2026-01-01", **key: str) -> Tuned:
    """A stored choice for the candidate at `place` of the cost model's order."""
    records = decide(plan, "cpu")
    toolchain = backend_of("cpu").fingerprint()
    assert toolchain is not None
    made = tuned.key_of(records.kernel, records.target, "default", toolchain)
    made = tuned.Key(**{**vars(made), **key})
    template = records.choice.candidates[place].text
    return Tuned(made, plan, template, 1e-5, records.choice.template.text, 2e-5, 3, (("x()", "wrong"),), date)


def test_a_stored_choice_goes_before_the_cost_models() -> None:
    before = decide(PLAN, "cpu")
    assert before.choice.tuned is None
    chosen = choice_for(PLAN, 1)
    tuned.keep(chosen)
    after = decide(PLAN, "cpu")
    assert after.choice.template.text == chosen.template != before.choice.template.text
    assert after.choice.tuned == chosen
    assert set(after.choice.considered) == set(before.choice.considered)
    assert after.choice.to_json()["tuned"]["template"] == chosen.template  # type: ignore[index]
    assert decide(PLAN, "cpu", tuned=False).choice == before.choice
    compiled = fuseplan.compile(PLAN)
    assert compiled.choice.template.text == chosen.template


def test_extents_of_an_open_axis_have_choices_of_their_own() -> None:
    plan = "f32[*x64] -> matmul(256)"
    chosen, records = choice_for(plan, 1), decide(plan, "cpu")
    tuned.keep(chosen)
    assert decide(plan, "cpu").choice.tuned == chosen
    other = records.kernel.with_extent(1)
    assert other.text == records.kernel.text
    assert select(other, records.target).tuned is None


@pytest.mark.parametrize("field", ["processor", "accuracy", "target", "kernel"])
def test_a_choice_of_another_machine_does_not_count(field: str) -> None:
    tuned.keep(choice_for(PLAN, 1, **{field: "another"}))
    assert decide(PLAN, "cpu").choice.tuned is None


def test_the_last_choice_of_other_versions_is_a_preference() -> None:
    earlier = choice_for(PLAN, 2, "2026-01-01", toolchain="LLVM 1")
    later = choice_for(PLAN, 1, "2026-02-01", toolchain="LLVM 2")
    tuned.keep(later)
    tuned.keep(earlier)
    choice = decide(PLAN, "cpu").choice
    assert choice.tuned == later
    assert choice.template.text == later.template
    assert not choice.is_current
    assert "with LLVM 2; not yet with the versions here" in str(fuseplan.explain(PLAN))
    own = choice_for(PLAN, 3, "2025-01-01")
    tuned.keep(own)
    assert decide(PLAN, "cpu").choice.tuned == own
    assert decide(PLAN, "cpu").choice.is_current
    assert "not yet with the versions here" not in str(fuseplan.explain(PLAN))


def test_a_choice_of_other_versions_is_measured_anew() -> None:
    text = "f32[1x4x4x4] -> relu"
    tuned.keep(choice_for(text, 0, toolchain="LLVM 1"))
    assert fuseplan.compile(text, tune=0.1).choice.is_current


def test_a_choice_that_is_no_candidate_any_more_does_not_count() -> None:
    chosen = choice_for(PLAN, 1)
    tuned.keep(Tuned(**{**vars(chosen), "template": "direct(rows=999)"}))
    assert decide(PLAN, "cpu").choice.tuned is None


def test_a_template_that_the_caller_names_wins() -> None:
    tuned.keep(choice_for(PLAN, 1))
    wanted = decide(PLAN, "cpu", tuned=False).choice.candidates[2].text
    assert decide(PLAN, "cpu", template=wanted).choice.template.text == wanted


def test_of_two_files_the_later_measurement_stays(own_folder: Path) -> None:
    early, late = choice_for(PLAN, 1, "2026-01-01"), choice_for(PLAN, 2, "2026-02-01")
    other = choice_for(PLAN, 1, processor="another")
    first, second, both = (own_folder / name for name in ("a.jsonl", "b.jsonl", "both.jsonl"))
    tuned.write(first, [late, other])
    tuned.write(second, [early])
    tuned.write(both, tuned.merged([first, second]))
    assert list(tuned.read(both)) == [late, other] or list(tuned.read(both)) == [other, late]


def test_a_line_that_is_no_choice_is_an_error_that_says_where(own_folder: Path) -> None:
    place = own_folder / "broken.jsonl"
    place.write_text(json.dumps(choice_for(PLAN, 1).to_json()) + "\n{}\n")
    with pytest.raises(ArgumentError, match=r"broken\.jsonl, line 2"):
        tuned.merged([place])
    with pytest.raises(ArgumentError, match="cannot be read"):
        tuned.merged([own_folder / "absent.jsonl"])


BROKEN = (
    b"{}",
    b"\xff",
    b"[" * 100_000,
    b'{"kernel": 3}',
    b"3",
    b'{"plan',
)


def broken_kinds() -> list[dict[str, object]]:
    """A choice's members, each of another type once."""
    told = choice_for(PLAN, 1).to_json()
    wrongs: tuple[object, ...] = ({"a": []}, True)
    return [{**told, name: wrong} for name in told for wrong in wrongs if (name, wrong) != ("is_near", True)]


def test_broken_lines_cost_themselves_and_one_warning(own_folder: Path) -> None:
    good = choice_for(PLAN, 1)
    lines = [*BROKEN, *(json.dumps(each).encode() for each in broken_kinds())]
    place = own_folder / tuned.OWN_FILE
    place.write_bytes(b"\n".join([*lines, json.dumps(good.to_json()).encode(), b'{"kernel": "cut o']))
    told = f"{len(lines) + 1} lines skipped; the first is line 1: it has no"
    with pytest.warns(RuntimeWarning, match=told) as met:
        assert decide(PLAN, "cpu").choice.tuned == good
    assert len(met) == 1
    better = choice_for(PLAN, 2, "2026-03-01")
    tuned.keep(better)
    tuned.OWN.unsaved.clear()
    assert decide(PLAN, "cpu").choice.tuned == better, "a line behind one that was cut off counts"


@pytest.mark.skipif(os.name == "nt", reason="pipes and devices are POSIX")
@pytest.mark.parametrize("make", [os.mkfifo, lambda place: os.symlink("/dev/zero", place), os.mkdir])
def test_a_file_that_is_none_costs_a_warning_and_no_compile(
    make: Callable[[Path], None], own_folder: Path
) -> None:
    make(own_folder / tuned.OWN_FILE)
    with pytest.warns(RuntimeWarning, match=r"tuned\.jsonl is not used: .* is (not a regular file|a link)"):
        assert decide(PLAN, "cpu").choice.tuned is None


@pytest.mark.skipif(os.name == "nt", reason="modes are POSIX")
def test_choices_that_others_may_write_are_not_followed(own_folder: Path) -> None:
    tuned.keep(choice_for(PLAN, 1))
    tuned.OWN.unsaved.clear()
    (own_folder / tuned.OWN_FILE).chmod(0o666)
    with pytest.warns(RuntimeWarning, match="writable by others"):
        assert decide(PLAN, "cpu").choice.tuned is None


@pytest.mark.parametrize("line", BROKEN)
def test_a_broken_line_in_a_file_to_merge_is_refused_by_its_number(line: bytes, own_folder: Path) -> None:
    place = own_folder / "theirs.jsonl"
    place.write_bytes(json.dumps(choice_for(PLAN, 1).to_json()).encode() + b"\n\n" + line)
    with pytest.raises(ArgumentError, match=r"theirs\.jsonl, line 3: not a tuned choice"):
        tuned.merged([place])


def test_a_file_to_merge_that_never_ends_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LINES_BYTES", 1 << 20)
    with pytest.raises(ArgumentError, match="/dev/zero cannot be read: it has more than 1048576 bytes"):
        tuned.merged([Path("/dev/zero")])


def test_without_a_cache_folder_choices_last_as_long_as_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEPLAN_DISABLE_CACHE", "1")
    chosen = choice_for(PLAN, 1)
    tuned.keep(chosen)
    assert decide(PLAN, "cpu").choice.tuned == chosen


@pytest.mark.parametrize("place", sorted(tuned.SHIPPED.glob("*.jsonl")), ids=lambda place: place.name)
def test_shipped_choices_are_of_kernels_and_candidates_that_there_are(place: Path) -> None:
    every = list(tuned.read(place))
    stale = [choice for choice in every if not is_live(choice)]
    listed = "\n".join(f"{choice.plan}: {choice.template}" for choice in stale)
    assert len(stale) <= len(every) // 5, f"tune anew: of {len(every)} choices these count no more\n{listed}"


def is_live(choice: Tuned) -> bool:
    """Whether compile can still take the choice: the plan is lowered and cut as when it was measured."""
    records = decide(choice.plan, choice.key.target, tuned=False)
    known = tuned.key_of(records.kernel, records.target, choice.key.accuracy, "").kernel
    return known == choice.key.kernel and any(
        each.text == choice.template for each in records.choice.candidates
    )
