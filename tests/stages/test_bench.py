"""Suites, result lines and the tables made from them."""

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import recorded, special, standings, suite
from fuseplan.bench import results, table
from fuseplan.bench.options import Options
from fuseplan.bench.peers import known
from fuseplan.bench.results import Row
from fuseplan.cli.screen import display
from fuseplan.errors import ArgumentError, PlanError
from fuseplan.measure.cases import Case
from fuseplan.plans.plan import FusionPlan
from fuseplan.system import limits

LAST = "f32[1x64x56x56, nhwc] -> conv2d(64, kernel=3, padding=1) -> bias -> relu"
FIRST = "f32[1x64x56x56] -> conv2d(64, kernel=3, padding=1) -> bias -> relu"


def row(peer: str, median: float | None, plan: str = LAST, **more: object) -> Row:
    base = Row("2026-01-01", "s", "a", "3x3", "model", plan, peer, 2, median=median, machine={"cpu": "x"})
    return replace(base, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", suite.names())
def test_suites_are_canonical_and_without_doubles(name: str) -> None:
    found = suite.load(name)
    assert found.title
    assert len({case.plan for case in found.cases}) == len(found.cases)
    assert len({(case.name, case.group) for case in found.cases}) == len(found.cases)
    for case in found.cases:
        assert str(FusionPlan.parse(case.plan)) == case.plan


@pytest.mark.parametrize("name", ["gpu_rows", "gpu_chains", "gpu_gated", "gpu_row_gradients"])
def test_random_shapes_are_within_those_of_the_suite(name: str) -> None:
    whole, found = suite.load(name), suite.load(f"{name}:12:7")
    assert found == suite.load(f"{name}:12:7")
    assert found.cases != suite.load(f"{name}:12:8").cases
    assert len({case.plan for case in found.cases}) == 12
    for case in found.cases:
        src = FusionPlan.parse(case.plan).src
        group = [FusionPlan.parse(each.plan).src for each in whole.cases if each.group == case.group]
        shortest, longest = (pick(each.shape[-1] for each in group) for pick in (min, max))
        assert shortest - 32 <= src.shape[-1] <= longest + 32
        assert src.size <= 1.1 * max(each.size for each in group)
        assert case.plan.split("->", 1)[1] in {each.plan.split("->", 1)[1] for each in whole.cases}


def test_the_suites_that_the_documents_name_are_there() -> None:
    named = "conv_nhwc conv_nchw norm published_cpu published_cuda quick overhead matmul"
    assert {*named.split()} <= set(suite.names())


def test_both_layouts_have_the_same_shapes() -> None:
    last, first = suite.load("conv_nhwc"), suite.load("conv_nchw")
    assert [case.name for case in last.cases] == [case.name for case in first.cases]
    assert [case.plan.replace(", nhwc]", "]") for case in last.cases] == [case.plan for case in first.cases]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("title = ", "not a suite"),
        ("title = \udcff", "line 1: byte 0xff is not UTF-8 text"),
        ("a = " + "[" * 10_000, "nested too deep"),
        ("title = 3\ncase = []", "title is 3; want a text"),
        ('title = "t"\ncase = 3', "case is 3; want a list"),
        ('title = "t"\n[[case]]\nname = 3', "case[0].name is 3; want a text"),
        ('title = "t"\ncase = []\n[[target]]\ngroup = 1', "target[0].group is 1; want a text"),
        ('title = "t"', "'case'"),
        ('title = "t"\n[[case]]\nname = "a"', "plan"),
        (
            'title = "t"\n[[case]]\nname = "a"\nplan = "f32[1x1x1x1x1x2] -> relu"\ngroup = "g"\nmodel = "m"',
            "axes",
        ),
    ],
)
def test_a_file_that_is_no_suite_says_why(text: str, told: str, tmp_path: Path) -> None:
    place = tmp_path / "wrong.toml"
    place.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ArgumentError, match=r"wrong\.toml is not a suite") as raised:
        suite.load(str(place))
    assert told in str(raised.value)


def test_the_suite_of_the_guide_is_one_as_it_stands(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "guide" / "measuring.md").read_text()
    _, _, rest = page.partition("```toml\n")
    place = tmp_path / "mine.toml"
    place.write_text(rest.partition("```")[0])
    found = suite.load(str(place))
    assert (found.title, [case.plan for case in found.cases]) == ("mine", [LAST])
    place.write_text(f'[[case]]\nname = "a"\nplan = "{LAST}"\n')
    assert suite.load(str(place)).cases == (Case("a", LAST, "all", ""),)


@pytest.mark.parametrize(
    ("case", "told"),
    [
        (f'plan = "{LAST}"', "case[1] has no 'name'"),
        ('name = "b"', "case[1] has no 'plan'"),
        (
            f'name = "b"\nplan = "{LAST}"\nmodle = "m"',
            "case[1] has an unknown member 'modle'; want name, plan",
        ),
        (
            'name = "b"\nplan = "f32[1x4] -> relo"',
            "case[1], 'b', has no plan in 'plan': there is no operator",
        ),
    ],
)
def test_a_bad_case_is_told_with_its_file_its_number_and_its_key(
    case: str, told: str, tmp_path: Path
) -> None:
    place = tmp_path / "wrong.toml"
    place.write_text(f'[[case]]\nname = "a"\nplan = "{LAST}"\n[[case]]\n{case}\n')
    with pytest.raises(ArgumentError, match=r"wrong\.toml is not a suite") as raised:
        suite.load(str(place))
    assert told in str(raised.value)


def test_a_plan_is_a_suite_of_one_case() -> None:
    found = suite.load(LAST)
    assert [case.plan for case in found.cases] == [LAST]
    with pytest.raises(PlanError):
        suite.load("f32[1x4] -> relo")


def test_an_aim_for_no_group_is_refused(tmp_path: Path) -> None:
    place = tmp_path / "wrong.toml"
    case = f'[[case]]\nname = "a"\nplan = "{LAST}"\ngroup = "g"\nmodel = "m"\n'
    place.write_text(f'title = "t"\n{case}[[target]]\ngroup = "h"\nagainst = "all"\ngeomean = 1.0\n')
    with pytest.raises(ArgumentError, match="group 'h'"):
        suite.load(str(place))


def test_a_suite_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TOML_BYTES", 10)
    (tmp_path / "large.toml").write_text('title = "more than ten bytes"')
    with pytest.raises(ArgumentError, match="it has more than 10 bytes"):
        suite.load(str(tmp_path / "large.toml"))
    with pytest.raises(ArgumentError, match="no suite is named"):
        suite.load("x" * 5000 + ".toml")


def test_an_unknown_suite_names_the_nearest() -> None:
    with pytest.raises(ArgumentError, match="conv_nhwc"):
        suite.load("conv_nhcw")


def test_rows_go_to_the_file_and_back(tmp_path: Path) -> None:
    rows = [row("fuseplan", 1e-3, knobs={"tile": 6}), row("ncnn", None, refused="takes one image")]
    place = results.append(rows[:1], "s", tmp_path / "new")
    results.append(rows[1:], "s", tmp_path / "new")
    assert list(recorded.read(place)) == rows
    assert "median" not in json.loads(place.read_text().splitlines()[1])


def test_a_damaged_line_is_told_by_number(tmp_path: Path) -> None:
    place = results.append([row("fuseplan", 1e-3)], "s", tmp_path)
    with place.open("a") as file:
        file.write('{"run": 1')
    with pytest.raises(ArgumentError, match=r"s\.jsonl:2"):
        list(recorded.read(place))


def test_results_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArgumentError, match="cannot write results"):
        results.append([row("fuseplan", 1.0)], "s", tmp_path / "file")


def test_latest_keeps_the_last_run_of_each_case_machine_and_thread_count() -> None:
    old, new = row("fuseplan", 2.0, run="2026-01-01"), row("fuseplan", 1.0, run="2026-02-01")
    one, other = replace(old, threads=1), replace(old, machine={"cpu": "y"})
    case = replace(old, case="b")
    assert recorded.latest([old, one, new, other, case]) == [one, new, other, case]


def test_the_best_peer_is_the_fastest_that_did_the_same_job() -> None:
    rows = [row("fuseplan", 1.0), row("torch", 3.0), row("torch:nhwc", 2.0), row("ncnn", 1.5)]
    (line,) = table.lines(rows)
    assert line.ratio == 1.5
    assert standings.ratio(line, "ncnn") == 1.5
    assert standings.ratio(line, "others") == 2.0
    (line,) = table.lines([replace(each, plan=FIRST) for each in rows])
    assert standings.ratio(line, "others") == 3.0  # a peer that was given channels last did another job


def test_our_other_forms_and_refusals_are_no_peers() -> None:
    rows = [row("fuseplan", 1.0), row("fuseplan:unfused", 0.5), row("ncnn", None, refused="one image")]
    (line,) = table.lines(rows)
    assert line.ratio is None
    assert line.best is None
    assert [each.peer for each in line.refused] == ["ncnn"]


def test_standings_hold_the_mean_and_the_least() -> None:
    aims = (suite.Aim("3x3", "all", 1.4, 1.0), suite.Aim("3x3", "ncnn", 1.1))
    cases = tuple(Case(name, LAST, "3x3", "m") for name in "ab")
    made = suite.Suite("s", "t", cases, aims)
    rows = [
        row("fuseplan", 1.0),
        row("torch", 4.0),
        row("fuseplan", 1.0, case="b"),
        row("torch", 0.9, case="b"),
    ]
    (standing,) = standings.standings(made, table.lines(rows))
    assert standing.geomean == pytest.approx(3.6**0.5)
    assert standing.least == 0.9
    assert not standing.is_reached
    assert not replace(standing, least=1.0, geomean=1.39).is_reached
    assert replace(standing, least=1.0).is_reached


def test_the_table_shows_losses_and_refusals() -> None:
    made = suite.Suite("s", "t", (Case("a", LAST, "3x3", "m"),), (suite.Aim("3x3", "all", 1.4, 1.0),))
    rows = [
        row("fuseplan", 2e-3, template="direct", error=1e-6, floor=1e-3, spread=0.01),
        row("torch", 1e-3),
        row("ncnn", None, refused="takes one image"),
    ]
    told = standings.markdown(made, rows)
    assert "| a | direct | 2.000 | 1.000 | 0.50 (torch) | 2.00 | 1.0e-06 | 1% |" in told
    assert "| 3x3 | all | 1 | 0.50 | 1.40 | 0.50 | 1.00 | no |" in told
    assert "- ncnn did not run a: takes one image" in told


def test_peers_by_library() -> None:
    peers_of = known(False).named
    assert peers_of("torch, ncnn") == ["fuseplan", "torch", "torch:nhwc", "ncnn"]
    assert peers_of("torch:nhwc", is_twice=True) == ["fuseplan", "fuseplan:again", "torch:nhwc"]
    assert peers_of("") == ["fuseplan"]
    with pytest.raises(ArgumentError, match="Did you mean `onnxruntime`"):
        peers_of("onnxruntim")


def test_suites_are_toml_with_a_comment_that_says_what_they_are() -> None:
    for place in suite.FOLDER.glob("*.toml"):
        assert place.read_text().startswith("# "), place
        assert tomllib.loads(place.read_text())["title"]


def test_cases_are_chosen_by_name_and_group() -> None:
    found = suite.load("published_cuda")
    assert len(suite.chosen(found, "CBA, f16 nhwc").cases) == 13
    both = suite.chosen(found, "NA, f32 & 7-7").cases
    assert [(case.name, case.group) for case in both] == [
        ("512-7-7", "NA, f32 nchw"),
        ("2048-7-7", "NA, f32 nchw"),
    ]
    with pytest.raises(ArgumentError, match="no case"):
        suite.chosen(found, "NA & 3x3")
    assert {case.group for case in suite.chosen(suite.load("gpu_matmul"), "f16").cases} == {"f16"}


def test_overhead_is_of_the_cases_asked_for() -> None:
    with pytest.raises(ArgumentError, match="no case of the suite overhead has 'nothing'"):
        special.bench_overhead("overhead", Options(only="nothing"), display(False, is_quiet=True))


def test_commits_are_told_in_the_order_of_runs() -> None:
    made = [row("a", 1.0, run=f"2026-01-0{day}", commit=told) for day, told in ((2, "b"), (1, "a"), (3, "b"))]
    assert recorded.commits(made) == "commits a, b"
    assert recorded.commits(made[:1]) == "commit b"
    assert recorded.commits([row("a", 1.0, commit="")]) == "commit unknown"
