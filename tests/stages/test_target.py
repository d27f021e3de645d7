from __future__ import annotations

import builtins
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fuseplan.backends import BACKENDS
from fuseplan.errors import ArgumentError
from fuseplan.kernels import target as targets
from fuseplan.kernels.target import GPUS, KINDS, Target, any_of, cache_bytes, parse_target, width_of
from fuseplan.settings import parse_size
from fuseplan.system import tiles
from pretend_gpu import H100, torch_with

TURING = SimpleNamespace(name="Tesla T4", major=7, minor=5, multi_processor_count=40)


@pytest.mark.parametrize(
    ("text", "vector_bytes", "registers"),
    [("cpu:avx2", 32, 16), ("cpu:avx512", 64, 32), ("cpu:amx", 64, 32), ("cpu:neon", 16, 32)],
)
def test_kinds_of_machine_are_plain_data(
    text: str, vector_bytes: int, registers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = builtins.__import__

    def no_llvmlite(name: str, *rest: Any) -> Any:
        if name.startswith("llvmlite"):
            raise ImportError(name)
        return plain(name, *rest)

    monkeypatch.setattr(builtins, "__import__", no_llvmlite)
    target = parse_target(text)
    assert (target.vector_bytes, target.vector_registers) == (vector_bytes, registers)
    assert str(target) == text
    assert target.backend == "cpu"
    targets._host_processor.cache_clear()
    targets._host_kind.cache_clear()
    with pytest.raises(ArgumentError, match=r"llvmlite.*cpu:avx2"):
        parse_target("cpu")
    monkeypatch.undo()
    assert parse_target("cpu").cpu


def test_this_machine_has_what_its_features_say() -> None:
    host = parse_target("cpu")
    assert host.cpu
    assert (host.name, host.vector_bytes, host.vector_registers) == width_of(host.features)
    assert host.is_host
    assert not parse_target("cpu:neon").is_host
    assert not parse_target("reference").is_host
    assert parse_target(host) is host


def test_threads_are_the_settings_or_the_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEPLAN_THREADS", "3")
    assert parse_target("cpu").threads == parse_target("cpu:avx2").threads == 3
    monkeypatch.setenv("FUSEPLAN_THREADS", "")
    assert 1 <= parse_target("cpu").threads <= (os.cpu_count() or 1)


@pytest.mark.parametrize(
    ("text", "says"),
    [("cpu:avx", "mean `cpu:avx"), ("gpu", "`cuda`"), ("refrence", "`reference`"), ("", "Known here")],
)
def test_an_unknown_target_is_refused_with_the_nearest(text: str, says: str) -> None:
    with pytest.raises(ArgumentError) as refused:
        parse_target(text)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("features", "width"),
    [
        ("+amx-tile,+avx512bf16,+avx512vl", ("amx", 64, 32)),
        ("-amx-tile,+avx512bf16,+avx512vl", ("avx512bf16", 64, 32)),
        ("+avx2,+avx512f,+avx512vl", ("avx512", 64, 32)),
        ("+avx2,-avx512vl", ("avx2", 32, 16)),
        ("+avx2,+avx512f,-avx512vl", ("avx2", 32, 16)),
        ("+neon,+fp-armv8", ("neon", 16, 32)),
    ],
)
def test_the_widest_vectors_that_features_allow(features: str, width: tuple[str, int, int]) -> None:
    assert width_of(features) == width


@pytest.mark.parametrize(("permitted", "name"), [(True, "amx"), (False, "avx512bf16")])
def test_tiles_need_the_systems_permission(
    permitted: bool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "_host_processor", lambda: ("sapphirerapids", KINDS["cpu:amx"].features))
    monkeypatch.setattr(tiles, "permitted", lambda: permitted)
    targets._host_kind.cache_clear()
    host = parse_target("cpu")
    targets._host_kind.cache_clear()
    assert host.name == name
    assert ("+amx-bf16" in host.features) == permitted


def test_systems_without_tiles_permit_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for machine, value in (("platform", "darwin"), ("platform", "win32")):
        monkeypatch.setattr(sys, machine, value)
        assert not tiles.permitted.__wrapped__()


def test_caches_are_read_where_the_system_tells(tmp_path: Path) -> None:
    listed = [(1, "Data", "48K"), (1, "Instruction", "32K"), (2, "Unified", "2M"), (3, "Unified", "32M")]
    for index, (level, kind, size) in enumerate(listed):
        entry = tmp_path / f"index{index}"
        entry.mkdir()
        (entry / "level").write_text(f"{level}\n")
        (entry / "type").write_text(f"{kind}\n")
        (entry / "size").write_text(f"{size}\n")
    assert cache_bytes(tmp_path) == (48 << 10, 2 << 20, 32 << 20)
    (tmp_path / "index2" / "size").write_text("unknown")
    assert cache_bytes(tmp_path) == (48 << 10, Target.l2_bytes, 32 << 20)
    assert cache_bytes(tmp_path / "none") == (Target.l1_bytes, Target.l2_bytes, Target.l3_bytes)


def test_sizes() -> None:
    assert [parse_size(text) for text in ("512", "48K", "2M", "1G")] == [512, 48 << 10, 2 << 20, 1 << 30]
    for wrong in ("", "K", "4KB", "-1", "1.5M"):
        with pytest.raises(ValueError, match="not a size"):
            parse_size(wrong)


# ---- GPUs


@pytest.mark.parametrize("kind", GPUS, ids=str)
def test_a_kind_of_gpu_is_plain_data(kind: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    found = parse_target(str(kind))
    assert found is kind
    assert found.backend == "triton"
    assert found.device is None
    assert found.threads == 1
    assert not found.is_host
    assert found.warp == (64 if found.name in ("gfx942", "gfx950") else 32)
    assert 64 << 10 <= found.l1_bytes <= 227 << 10
    assert found.shape == f"{found.processors} processors"


def test_this_machines_gpu_is_what_its_driver_says(monkeypatch: pytest.MonkeyPatch) -> None:
    small = SimpleNamespace(**{**vars(H100), "multi_processor_count": 114, "name": "NVIDIA H100 PCIe"})
    monkeypatch.setattr(targets, "_torch_with_gpu", lambda: torch_with(H100, small, current=1))
    first, second, current = parse_target("cuda:0"), parse_target("cuda:1"), parse_target("cuda")
    assert (str(first), first.device, first.processors) == ("triton:sm_90", 0, 132)
    assert replace(first, device=None) == KINDS["triton:sm_90"]
    assert (current.device, current.processors, current.cpu) == (1, 114, "NVIDIA H100 PCIe")
    assert current == second
    assert current.is_host


def test_a_generation_without_an_entry_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    spark = SimpleNamespace(name="NVIDIA GB10", major=12, minor=1, multi_processor_count=48)
    monkeypatch.setattr(targets, "_torch_with_gpu", lambda: torch_with(spark))
    found = parse_target("cuda")
    assert (str(found), found.processors, found.l1_bytes) == ("triton:sm_121", 48, 99 << 10)


@pytest.mark.parametrize(
    ("torch", "target", "says"),
    [
        (None, "cuda", r"needs torch.*'\.\[triton\]'.*`pip install torch triton`.*triton:sm_90"),
        (torch_with(hip="6.4", cuda=None), "cuda", "for AMD GPUs.*triton:gfx942"),
        (torch_with(cuda=None), "cuda", "built without CUDA"),
        (torch_with(), "cuda:0", "finds no GPU.*nvidia-smi"),
        (torch_with(H100), "cuda:1", "no GPU 1; torch sees 1: cuda:0"),
        (torch_with(TURING), "cuda", r"cuda:0 \(Tesla T4\) is sm_75; kernels need sm_80.*'cpu'"),
    ],
    ids=["no torch", "rocm", "cpu build", "no gpu", "no such gpu", "too old"],
)
def test_what_keeps_a_gpu_from_being_a_target_is_said(
    torch: Any, target: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch)
    with pytest.raises(ArgumentError, match=says):
        parse_target(target)


def test_there_is_some_machine_of_every_backend() -> None:
    for backend in BACKENDS:
        assert any_of(backend.name).backend == backend.name
