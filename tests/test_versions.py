"""docs/versions.md and the project's classifiers say what recorded runs have shown."""

import json
import re
import tomllib
from pathlib import Path

from click.testing import CliRunner

from benchmarks.report.versions import page, records
from fuseplan.backends.triton import versions as triton
from fuseplan.cli.commands import fuseplan

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
RECORDS = records(RESULTS)


def shown(benchmark: str, name: str) -> set[str]:
    """Versions of a package in runs that failed nowhere, by two numbers each."""
    kept = [each for each in RECORDS if each["benchmark"] == benchmark]
    sound = [each for each in kept if not each.get("failed") and not each.get("unsound")]
    return {".".join(each["versions"][name].split(".")[:2]) for each in sound}


def test_the_page_is_current() -> None:
    assert (ROOT / "docs" / "versions.md").read_text() == page(RESULTS), "run `make docs`"


def test_the_classifiers_name_the_versions_of_python_that_runs_have_shown() -> None:
    told = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    named = {found[1] for each in told if (found := re.fullmatch(r".* :: Python :: (3\.\d+)", each))}
    assert named == shown("versions", "python")


def test_every_minor_version_of_triton_has_compiled() -> None:
    oldest, newest = (triton.parsed(text)[:2] for text in (triton.OLDEST, triton.NEWEST))
    assert oldest[0] == newest[0]
    wanted = {f"{oldest[0]}.{minor}" for minor in range(oldest[1], newest[1] + 1)}
    assert shown("crossbuild", "triton") == wanted


def test_the_readme_names_the_versions_that_runs_have_shown() -> None:
    told = (ROOT / "README.md").read_text()
    for name, text in {"python": "Python", "numpy": "NumPy", "torch": "torch", "triton": "Triton"}.items():
        found = sorted(shown("versions", name), key=lambda each: tuple(map(int, each.split("."))))
        assert re.search(rf"{text}\s{found[0]} to\s{found[-1]}", told), (name, found)


def test_the_guide_names_the_versions_of_torch_that_runs_have_shown() -> None:
    minors = sorted(int(each.partition(".")[2]) for each in shown("versions", "torch"))
    assert minors == list(range(minors[0], minors[-1] + 1))
    assert f"torch 2.{minors[0]} to 2.{minors[-1]}" in (ROOT / "docs" / "guide" / "gpus.md").read_text()


def test_a_crossbuild_is_recorded(tmp_path: Path) -> None:
    suite, kept = tmp_path / "one.toml", tmp_path / "kept.jsonl"
    case = '[[case]]\nname = "a"\ngroup = "b"\nmodel = "c"\nplan = "f16[8x64] -> relu"\n'
    suite.write_text(f'title = "one"\n{case}')
    asked = ["crossbuild", str(suite), "--target", "triton:sm_90", "--jobs", "1", "--record", str(kept)]
    assert CliRunner().invoke(fuseplan, asked).exit_code == 0
    (told,) = map(json.loads, kept.read_text().splitlines())
    assert (told["kernels"], told["unsound"], told["targets"]) == (1, [], ["sm_90"])
    assert triton.parsed(told["versions"]["triton"]) == triton.version_of()
