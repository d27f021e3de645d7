from __future__ import annotations

import builtins
import os
from pathlib import Path
from typing import Any

import pytest

from fuseplan import target as targets
from fuseplan.errors import ArgumentError
from fuseplan.target import Target, cache_bytes, parse_size, parse_target, width_of


@pytest.mark.parametrize(
    ("text", "vector_bytes", "registers"),
    [("cpu:avx2", 32, 16), ("cpu:avx512", 64, 32), ("cpu:neon", 16, 32)],
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
    [("cpu:avx", "Did you mean `cpu:avx"), ("gpu", "`cpu`"), ("refrence", "`reference`"), ("", "Known here")],
)
def test_an_unknown_target_is_refused_with_the_nearest(text: str, says: str) -> None:
    with pytest.raises(ArgumentError) as refused:
        parse_target(text)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("features", "width"),
    [
        ("+avx2,+avx512f,+avx512vl", ("avx512", 64, 32)),
        ("+avx2,-avx512vl", ("avx2", 32, 16)),
        ("+avx2,+avx512f,-avx512vl", ("avx2", 32, 16)),
        ("+neon,+fp-armv8", ("neon", 16, 32)),
    ],
)
def test_the_widest_vectors_that_features_allow(features: str, width: tuple[str, int, int]) -> None:
    assert width_of(features) == width


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
