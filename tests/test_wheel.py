"""A wheel, built from the sources without a network: its files, and its words about the tools it lacks."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "fuseplan"
LINES_OF_THE_WHEEL = 84_042
PLAN = "f32[1x8x6x6] -> conv2d(8, kernel=3) -> relu"
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The wheel, unpacked."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", folder / "src", ignore=ignored)
    built = subprocess.run(
        [sys.executable, "-c", BUILD, str(folder)], cwd=folder, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    (made,) = folder.glob("*.whl")
    zipfile.ZipFile(made).extractall(folder / "unpacked")
    yield folder / "unpacked"
    shutil.rmtree(folder)


def call(wheel: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(wheel), "FUSEPLAN_CACHE_DIR": str(wheel.parent / "cache")}
    return subprocess.run(
        [sys.executable, "-m", "fuseplan", *words],
        cwd=wheel, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_a_wheel_has_all_of_the_package_and_no_tools(wheel: Path) -> None:
    built = {place.relative_to(wheel): place for place in (wheel / "fuseplan").rglob("*") if place.is_file()}
    written = {place for place in PACKAGE.rglob("*") if place.is_file() and "__pycache__" not in place.parts}
    assert {place.relative_to(PACKAGE.parent): place.read_bytes() for place in written} == {
        name: place.read_bytes() for name, place in built.items()
    }
    assert not (wheel / "benchmarks").exists()
    assert not (wheel / "docs").exists()
    lines = sum(place.read_text().count("\n") for place in built.values() if place.suffix == ".py")
    assert lines <= LINES_OF_THE_WHEEL


def test_every_module_of_a_wheel_can_be_imported_without_tools(tmp_path: Path) -> None:
    """The wheel's modules are those of the checkout, byte for byte; these have their bytecode already."""
    places = (place.relative_to(PACKAGE.parent) for place in PACKAGE.rglob("*.py"))
    names = [".".join(place.with_suffix("").parts) for place in places if place.stem != "__main__"]
    program = """
import importlib, pathlib, sys
from fuseplan.system import checkout
checkout.CHECKOUT = pathlib.Path.cwd()
for name in sys.argv[1:]:
    importlib.import_module(name)
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, *names], cwd=tmp_path, capture_output=True, text=True,
        check=False, env={**os.environ, "PYTHONPATH": str(PACKAGE.parent)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_packages_that_are_optional_are_imported_when_they_are_needed(tmp_path: Path) -> None:
    """Modules other than those that compute with torch, triton or onnx are imported without them."""
    needing = (
        "fuseplan.torch", "fuseplan.onnx", "fuseplan.measure.torch_", "fuseplan.tensors.torch_tensors",
        "fuseplan.backends.triton.memory", "fuseplan.backends.triton.compiler", "fuseplan.graph.device",
    )  # fmt: skip
    places = (place.relative_to(PACKAGE.parent).with_suffix("") for place in PACKAGE.rglob("*.py"))
    every = (".".join(place.parts) for place in places if place.stem != "__main__")
    names = [*(each for each in every if not each.startswith(needing)), "benchmarks.peers"]
    program = """
import importlib, sys
sys.modules.update(dict.fromkeys(("torch", "triton", "onnx", "onnxruntime", "matplotlib", "ml_dtypes")))
for name in sys.argv[1:]:
    importlib.import_module(name)
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, *names], cwd=tmp_path, capture_output=True, text=True,
        check=False, env={**os.environ, "PYTHONPATH": f"{PACKAGE.parent}{os.pathsep}{ROOT}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("demo", "--threads", "1"),
        ("crossbuild", "gpu_matmul", "--json"),
        ("bench", "footprint"),
        ("bench", "quick"),
        ("tune", "quick"),
        ("bench", PLAN, "--compile-times"),
    ],
)
def test_a_tool_is_said_to_be_a_checkouts(wheel: Path, words: tuple[str, ...]) -> None:
    done = call(wheel, *words)
    assert done.returncode == 2
    assert "the installed package has no tools: run it in a checkout" in done.stderr
    assert done.stdout == ""


def test_a_plan_is_measured_beside_peers_from_a_wheel(wheel: Path) -> None:
    done = call(
        wheel, "bench", PLAN, "--peers", "torch,onnxruntime", "--rounds", "1", "--block-ms", "1", "--json"
    )
    assert done.returncode == 0, done.stderr
    rows = {row["peer"]: row for row in json.loads(done.stdout)}
    assert {"fuseplan", "torch", "torch:nhwc", "onnxruntime"} == rows.keys()
    assert all(rows[peer]["median"] > 0 for peer in ("fuseplan", "torch"))
    assert "Not in the installed package" in call(wheel, "--help").stdout
