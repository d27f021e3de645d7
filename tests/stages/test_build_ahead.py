"""Kernels of a model compiled ahead, many at once: `build` finds them on disk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from fuseplan.backends.cpu import CPU
from fuseplan.errors import BuildError
from fuseplan.execution import build as building
from fuseplan.execution.build import build, build_ahead
from fuseplan.execution.stages import Records, decide
from fuseplan.kernels.emit import Source
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.target import Target
from fuseplan.kernels.template import Template
from fuseplan.stores import cache

PLANS = ("f32[8x16] -> relu", "f32[8x16] -> gelu", "f32[8x16] -> layer_norm", "f32[8x16] -> matmul(8)")
Pairs = Sequence[tuple[Kernel, Template]]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and none of this process's programs."""
    monkeypatch.setenv("FUSEPLAN_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setattr(building, "_programs", {})
    monkeypatch.setattr(cache, "_tally", cache._Tally())
    return tmp_path / "kernels"


class Compiler:
    """A toolchain with processes of its own: what it was given at once, and what it fails at."""

    def __init__(self) -> None:
        self.given: list[list[str]] = []
        self.fails = ""

    def compile_all(
        self, pairs: Pairs, target: Target, *, workers: int, seconds: float
    ) -> Iterator[tuple[Source, bytes | BuildError]]:
        self.given.append([kernel.text for kernel, _ in pairs])
        assert 1 <= workers <= len(pairs)
        for kernel, template in pairs:
            source = template.emit(kernel, target)
            is_failing = kernel.text == self.fails
            yield (
                source,
                BuildError("it died") if is_failing else CPU.compile_object(source, kernel, template, target),
            )


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    made = Compiler()
    monkeypatch.setattr(CPU, "compiles_apart", True)
    monkeypatch.setattr(CPU, "compile_all", made.compile_all)
    return made


def records() -> list[Records]:
    return [decide(plan, "cpu") for plan in PLANS]


def origins(every: Sequence[Records]) -> list[str]:
    return [build(each.choice, each.kernel, each.target).origin for each in every]


def test_kernels_are_compiled_at_once_the_longest_first(compiler: Compiler) -> None:
    every = records()
    build_ahead([*every, *every])
    lengths = {each.kernel.text: len(each.source.text) for each in every}
    (given,) = compiler.given
    assert sorted(given) == sorted(lengths)
    assert [lengths[each] for each in given] == sorted(lengths.values(), reverse=True)
    assert origins(every) == ["disk"] * len(PLANS)


def test_what_is_on_disk_or_in_this_process_is_not_compiled(compiler: Compiler) -> None:
    every = records()
    build_ahead(every)
    build_ahead(every)
    origins(every)
    cache.clear_cache()
    build_ahead(every)
    assert len(compiler.given) == 1
    assert origins(every) == ["memory"] * len(PLANS)


def test_a_kernel_that_fails_is_left_to_build(compiler: Compiler) -> None:
    every = records()
    compiler.fails = every[1].kernel.text
    build_ahead(every)
    assert origins(every) == ["disk", "compiled", "disk", "disk"]


def test_few_kernels_are_left_to_build(compiler: Compiler) -> None:
    build_ahead(records()[: building.ALONE])
    build_ahead([])
    assert not compiler.given


def test_where_nothing_is_kept_nothing_is_compiled_ahead(
    compiler: Compiler, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("FUSEPLAN_DISABLE_CACHE", "1")
        build_ahead(records())
    folder.parent.joinpath("file").write_text("")
    monkeypatch.setenv("FUSEPLAN_CACHE_DIR", str(folder.parent / "file"))
    build_ahead(records())
    assert not compiler.given


def test_a_toolchain_without_processes_is_not_asked(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CPU, "compiles_apart", False)
    build_ahead(records())
    assert not compiler.given


@pytest.mark.parametrize("error", [BuildError("there is none"), OSError("no more processes")])
def test_without_compilers_build_compiles(
    compiler: Compiler, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object, **more: object) -> Iterator[tuple[Source, bytes]]:
        raise error

    monkeypatch.setattr(CPU, "compile_all", refuses)
    build_ahead(records())
    assert origins(records()) == ["compiled"] * len(PLANS)


def test_a_process_that_waited_compiles_nothing_again(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other process has compiled all, and lets go of the lock."""
    every = records()
    missing = building._missing(every)
    monkeypatch.setattr(building, "_missing", lambda _: missing)
    monkeypatch.setattr(cache, "holds", lambda key: key in missing)
    build_ahead(every)
    assert not compiler.given
