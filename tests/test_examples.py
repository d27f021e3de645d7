"""Runs each example: a file of examples/ whose main() is called."""

import importlib.util
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).resolve().parent.parent / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FUSEPLAN_CACHE_DIR", str(tmp_path / "cache"))
    specification = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    assert module.__doc__, "an example says what it shows"
    module.main()
    assert capsys.readouterr().out.strip(), "an example prints what it shows"
