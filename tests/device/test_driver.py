"""Lines of the driver on a GPU: checked, timed by its own clock and the host's, and beside unfused runs."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from fuseplan.cli.commands import fuseplan

LINES = (
    "CBAInferfp16 -F cbna -n 4 -c 32 -H 14 -W 14 -k 32 -p 1 -q 1 -M spatial -I NHWC",
    "CBAInfer -F na -n 4 -c 32 -H 14 -W 14 -m elu -A 0.5",
    "CBAInferbfp16 -F na_train --run 1 -n 8 -c 32 -H 14 -W 14 -M spatial",
    "CBAInferfp16 -F na_backward -n 8 -c 32 -H 14 -W 14 -M spatial -I NHWC",
    "CBAInfer -F na_backward --save 0 -n 8 -c 32 -H 14 -W 14 -m abs",
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FUSEPLAN_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


def driven(*words: str) -> list[Any]:
    result = CliRunner().invoke(fuseplan, ["driver", "--target", "cuda", "--json", *words])
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_a_file_of_lines(folder: Path) -> None:
    (folder / "lines").write_text("\n".join(LINES))
    for found in driven("--sweep", str(folder / "lines"), "-t", "1", "-w", "1", "-i", "10"):
        assert found["right"] is True
        kernel, wall = found["kernel_seconds"], found["wall_seconds"]
        assert 0 < kernel["least"] <= kernel["mean"]
        assert kernel["least"] < wall["mean"], "the host waits for the kernel"


def test_unfused_beside_it() -> None:
    (found,) = driven(*LINES[0].split(), "--unfused")
    assert found["unfused"]["others"].keys() == {"one at a time", "torch"}
    assert found["unfused"]["kernels"] == 4
