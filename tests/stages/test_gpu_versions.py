"""Versions of Triton: which are taken, and what a text and a choice are to each."""

import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.crossbuild import builds
from fuseplan.backends.triton import toolchain, versions
from fuseplan.cli.commands import fuseplan as command
from fuseplan.errors import ArgumentError, BuildError
from fuseplan.execution.stages import decide
from fuseplan.kernels.target import parse_target

Installed = Callable[[str | None], None]
CONV = "f16[16x64x28x28, nhwc] -> conv2d(64, kernel=3, padding=1) -> batch_norm -> add -> relu"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Installed]:
    """Makes as if the Triton of a version were installed, or none."""

    def set_to(text: str | None) -> None:
        folder = tmp_path / str(text) / "triton"
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(
            f'"""isort:skip_file"""\n__version__ = \'{text}\'\n' if text else ""
        )
        versions.version_of.cache_clear()
        toolchain._warn.cache_clear()
        monkeypatch.setattr(versions, "package", lambda: folder if text else None)

    yield set_to
    versions.version_of.cache_clear()
    toolchain._warn.cache_clear()


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (None, "needs triton 3.6.0 or later, which is not installed"),
        ("3.5.1", "this is 3.5.1: `pip install"),
    ],
)
def test_no_triton_and_an_older_one_are_refused(installed: Installed, found: str | None, said: str) -> None:
    installed(found)
    with pytest.raises(BuildError, match=said):
        toolchain.check_installed()


@pytest.mark.parametrize("found", ["3.6.0", "3.6.0+git1234abcd", "3.7.1", "3.9.0", "3.9.5"])
def test_what_is_tested_is_taken_without_a_word(installed: Installed, found: str) -> None:
    installed(found)
    toolchain.check_installed()


def test_a_newer_triton_is_tried_with_one_warning(installed: Installed) -> None:
    installed("3.10.0")
    with pytest.warns(RuntimeWarning, match=r"triton 3\.10\.0 is newer than 3\.9\.0"):
        toolchain.check_installed()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        toolchain.check_installed()


def test_versions_are_compared_by_their_numbers() -> None:
    assert versions.parsed("3.10.0rc1") > versions.parsed("3.9.0")
    assert versions.parsed("3.6.0+git12") == (3, 6, 0)
    with pytest.raises(ValueError, match="is not a version"):
        versions.parsed("unknown")


def test_the_table_says_all_that_is_replaced_in_a_text() -> None:
    text = decide(CONV, "triton:sm_90", template="hopper").source.text
    assert versions.spelled(text, versions.parsed(versions.NEWEST)) == text
    for since, name, before in versions.RENAMED:
        assert name in text
        assert before not in text
        was = versions.spelled(text, (*since[:-1], since[-1] - 1))
        assert before in was
        assert name not in was
    oldest = versions.spelled(text, versions.parsed(versions.OLDEST))
    for _, name, before in versions.RENAMED:
        text = text.replace(name, before)
    assert oldest == text


def test_choices_that_a_version_does_not_compile_are_no_candidates(installed: Installed) -> None:
    offered = {}
    for version in ("3.6.0", "3.7.1", "3.8.0", "3.9.0"):
        installed(version)
        records = decide(CONV, "triton:sm_90", tuned=False)
        offered[version] = {each.text for each in records.choice.candidates}
    assert offered["3.6.0"] == offered["3.7.1"]
    assert offered["3.8.0"] == offered["3.9.0"]
    gone = offered["3.6.0"] - offered["3.9.0"]
    assert gone
    assert all("reaching=True" in text for text in gone)
    assert offered["3.9.0"] == offered["3.6.0"] - gone
    assert not any("reaching=True" in text for text in offered["3.9.0"])


def test_a_folder_without_triton_is_told(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"no Triton in .*pip install --target"):
        list(builds([CONV], [parse_target("triton:sm_90")], triton=tmp_path))
    told = CliRunner().invoke(command, ["crossbuild", "gpu_conv", "--triton", str(tmp_path)])
    assert told.exit_code != 0


def test_the_version_is_part_of_the_fingerprint(
    installed: Installed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolchain, "assembler", lambda folder: "ptxas")
    for version in ("3.6.0", "3.9.0"):
        installed(version)
        assert toolchain.fingerprint() == f"triton {version}, ptxas"


def test_no_version_is_read_by_importing_triton() -> None:
    code = (
        "import sys; from fuseplan.backends.triton import toolchain; toolchain.check_installed(); "
        "assert toolchain.fingerprint() and 'triton' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
