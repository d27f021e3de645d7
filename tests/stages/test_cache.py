from __future__ import annotations

import errno
import multiprocessing
import os
import stat
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

from fuseplan.compile import compile as compile_plan
from fuseplan.errors import ArgumentError
from fuseplan.stores import cache
from fuseplan.system import limits, stock

PLAN = "f32[1x4x5x5, nhwc] -> conv2d(3, kernel=3) -> bias -> relu"
KEY = cache.key_of("one")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and none of this process's programs."""
    monkeypatch.setenv("FUSEPLAN_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setattr("fuseplan.execution.build._programs", {})
    monkeypatch.setattr(cache, "_tally", cache._Tally())
    return tmp_path / "kernels"


def only_entry(folder: Path) -> Path:
    (found,) = folder.glob("*" + stock.SUFFIX)
    return found


def compiled_result(plan: str = PLAN) -> tuple[str, np.ndarray]:
    compiled = compile_plan(plan, "cpu", threads=1)
    rng = np.random.default_rng(3)
    spec = compiled.plan.src
    src = (
        rng.standard_normal(spec.shape).astype(np.float32).transpose(0, 2, 3, 1).copy().transpose(0, 3, 1, 2)
    )
    weight = rng.standard_normal((3, 4, 3, 3)).astype(np.float32)
    return compiled.program.origin, compiled(src, weight=weight, bias=np.ones(3, np.float32))


def test_what_is_written_is_read_and_counted(folder: Path) -> None:
    assert cache.read(KEY) is None
    cache.write(KEY, b"code")
    assert cache.read(KEY) == b"code"
    info = cache.cache_info()
    assert (info.hits, info.misses, info.corrupt, info.entries) == (1, 1, 0, 1)
    assert info.path == str(folder)
    assert info.nbytes == cache.HEADER.size + 4
    assert cache.clear_cache() == 1
    assert cache.cache_info().entries == 0
    assert cache.read(KEY) is None


def test_keys_tell_where_their_parts_end() -> None:
    assert cache.key_of("ab", "c") != cache.key_of("a", "bc")
    assert cache.key_of("ab", "c") == cache.key_of("ab", "c")


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda data: b"", id="empty"),
        pytest.param(lambda data: data[: cache.HEADER.size - 1], id="header cut off"),
        pytest.param(lambda data: data[:-1], id="payload cut off"),
        pytest.param(lambda data: data + b"\0", id="more than there should be"),
        pytest.param(lambda data: data[:-1] + bytes([data[-1] ^ 1]), id="a bit flipped"),
        pytest.param(lambda data: b"notours!" + data[8:], id="another program's file"),
        pytest.param(lambda data: data[:8] + b"\xff" + data[9:], id="another format"),
        pytest.param(lambda data: data[:12] + bytes(32) + data[44:], id="another key's entry"),
    ],
)
def test_a_damaged_entry_is_absent(folder: Path, damage) -> None:  # type: ignore[no-untyped-def]
    origin, want = compiled_result()
    assert origin == "compiled"
    place = only_entry(folder)
    place.write_bytes(damage(place.read_bytes()))
    forget()
    origin, got = compiled_result()
    assert origin == "compiled"
    assert cache.cache_info().corrupt == 1
    np.testing.assert_array_equal(got, want)
    forget()
    assert compiled_result()[0] == "disk", "the damaged entry was replaced"


def forget() -> None:
    from fuseplan.execution import build

    build._programs.clear()


def test_an_entry_that_checks_out_and_is_no_object_code_is_rebuilt(folder: Path) -> None:
    _, want = compiled_result()
    key = bytes.fromhex(only_entry(folder).stem)
    for payload in (b"", b"\x02\0\0\0{}", b"\xff\xff\xff\xff", b"\x04\0\0\0nope"):
        cache.write(key, payload)
        forget()
        origin, got = compiled_result()
        assert origin == "compiled"
        np.testing.assert_array_equal(got, want)


def test_a_second_compile_comes_from_memory_and_a_new_process_reads_the_disk(folder: Path) -> None:
    assert compiled_result()[0] == "compiled"
    assert compiled_result()[0] == "memory"
    forget()
    assert compiled_result()[0] == "disk"
    info = cache.cache_info()
    assert (info.hits, info.misses) == (1, 1)


def test_a_batch_of_another_size_is_another_kernel_compiled_once() -> None:
    for batch, origin in ((1, "compiled"), (3, "compiled"), (1, "memory"), (3, "memory")):
        compiled = compile_plan(f"f32[{batch}x8] -> relu", "cpu")
        assert compiled.program.origin == origin
        assert compiled(np.ones((batch, 8), np.float32)).shape == (batch, 8)


def test_parameter_values_are_not_in_the_key() -> None:
    for slope, origin in ((0.1, "compiled"), (0.2, "memory")):
        compiled = compile_plan(f"f32[1x8] -> leaky_relu({slope})", "cpu")
        assert compiled.program.origin == origin
        got = compiled(np.full((1, 8), -1, np.float32))
        np.testing.assert_allclose(got, -slope, rtol=1e-6)


def test_without_the_cache_nothing_is_stored(folder: Path) -> None:
    assert compile_plan(PLAN, "cpu", cache=False).program.origin == "compiled"
    assert not folder.exists()
    assert cache.cache_info().misses == 0


def test_the_setting_turns_the_disk_off(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEPLAN_DISABLE_CACHE", "1")
    assert compiled_result()[0] == "compiled"
    assert compiled_result()[0] == "memory"
    assert not folder.exists()
    assert cache.cache_info().path is None
    assert cache.clear_cache() == 0


def test_a_folder_that_cannot_be_made_costs_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("FUSEPLAN_CACHE_DIR", str(tmp_path / "file" / "below"))
    with pytest.warns(RuntimeWarning, match="FUSEPLAN_CACHE_DIR") as met:
        assert compiled_result()[0] == "compiled"
    assert len(met) == 1
    forget()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compiled_result()[0] == "compiled"
    assert "file" in str(cache.cache_info().problem)


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root and Windows write everywhere")
def test_a_read_only_folder_costs_one_warning(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        with pytest.warns(RuntimeWarning, match="cannot be used"):
            assert compiled_result()[0] == "compiled"
    finally:
        folder.chmod(stat.S_IRWXU)


def test_no_half_written_entry_is_left_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(RuntimeWarning, match="No space left"):
        cache.write(KEY, b"code")
    assert list(folder.iterdir()) == []


def _compile_in_child(results: multiprocessing.Queue[tuple[str, float]]) -> None:
    origin, value = compiled_result()
    results.put((origin, float(value.sum())))


def test_of_many_processes_one_compiles(folder: Path) -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    children = [context.Process(target=_compile_in_child, args=(results,)) for _ in range(4)]
    for child in children:
        child.start()
    found = [results.get(timeout=120) for _ in children]
    for child in children:
        child.join(timeout=60)
        assert child.exitcode == 0
    assert sorted(origin for origin, _ in found) == ["compiled", "disk", "disk", "disk"]
    assert len({value for _, value in found}) == 1


def test_a_lock_is_exclusive_and_is_given_up_on_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LOCK_SECONDS", 0.05)
    with cache.lock(KEY):
        begin = time.monotonic()
        with cache.lock(KEY):  # held by another: after the time, it goes on without
            assert 0.04 < time.monotonic() - begin < 5
        with cache.lock(cache.key_of("free")):
            pass
    begin = time.monotonic()
    with cache.lock(KEY):
        assert time.monotonic() - begin < 0.04


@pytest.mark.skipif(os.name == "nt", reason="flock is POSIX")
def test_a_file_system_without_locks_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", none)
    begin = time.monotonic()
    with cache.lock(KEY):
        assert time.monotonic() - begin < 5


def test_the_fingerprint_follows_the_sources(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "a.py").write_text("1")
    (tmp_path / "inner" / "b.py").write_text("2")
    first = cache.fingerprint_of(tmp_path)
    assert cache.fingerprint_of(tmp_path) == first
    (tmp_path / "inner" / "b.py").write_text("3")
    second = cache.fingerprint_of(tmp_path)
    (tmp_path / "inner" / "b.py").rename(tmp_path / "inner" / "c.py")
    assert len({first, second, cache.fingerprint_of(tmp_path)}) == 3


def test_without_a_fingerprint_nothing_is_cached(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "fingerprint", lambda: None)
    assert compiled_result()[0] == "compiled"
    assert compiled_result()[0] == "compiled"
    assert not folder.exists()


def test_parts_are_kept_and_not_counted(folder: Path) -> None:
    made: list[bytes] = []

    def make() -> bytes:
        made.append(b"part")
        return made[-1]

    assert [cache.kept(make, "a") for _ in range(2)] == [b"part", b"part"]
    assert len(made) == 1
    info = cache.cache_info()
    assert (info.hits, info.misses, info.entries) == (0, 0, 0)
    (place,) = folder.iterdir()
    place.write_bytes(place.read_bytes()[:-1] + b"x")
    assert cache.kept(make, "a") == b"part"
    assert len(made) == 2
    assert cache.clear_cache() == 0
    assert list(folder.iterdir()) == []


def test_a_setting_that_cannot_be_read_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEPLAN_DISABLE_CACHE", "perhaps")
    with pytest.raises(ArgumentError, match="FUSEPLAN_DISABLE_CACHE=perhaps"):
        cache.folder()


def test_the_cache_is_wanted_or_not() -> None:
    with pytest.raises(ArgumentError, match="`cache` must be True or False; got 'no'"):
        compile_plan(PLAN, "cpu", cache="no")  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["~nosuch-user/kernels", "~"])
def test_without_a_home_directory_plans_compile(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.path.expanduser", lambda text: text)
    monkeypatch.setenv("FUSEPLAN_CACHE_DIR", text)
    monkeypatch.chdir(tmp_path)
    with pytest.warns(RuntimeWarning, match=f"no home directory is known for {Path(text).parts[0]}"):
        assert compiled_result()[0] == "compiled"
    assert list(tmp_path.iterdir()) == [], "no folder of that name is made"
    info = cache.cache_info()
    assert (info.path, info.entries) == (text, 0)
    assert "no home directory" in str(info.problem)
    assert cache.clear_cache() == 0
    monkeypatch.setenv("FUSEPLAN_DISABLE_CACHE", "1")
    forget()
    assert compiled_result()[0] == "compiled"


NOT_PRIVATE = pytest.mark.skipif(os.name == "nt", reason="owners and modes are POSIX")


@NOT_PRIVATE
@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_nothing_is_run_from_a_folder_that_others_may_write(folder: Path, mode: int) -> None:
    assert compiled_result()[0] == "compiled"
    folder.chmod(mode)
    forget()
    with pytest.warns(RuntimeWarning, match=f"writable by others .mode {mode:o}.* Run `chmod go-w") as met:
        assert compiled_result()[0] == "compiled"
    assert len(met) == 1
    assert "set FUSEPLAN_CACHE_DIR to a folder of your own" in str(met[0].message)
    assert "writable by others" in str(cache.cache_info().problem)
    folder.chmod(0o700)
    forget()
    assert compiled_result()[0] == "disk"


@NOT_PRIVATE
def test_nothing_is_run_from_another_users_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compiled_result()[0] == "compiled"
    forget()
    if os.geteuid() == 0:
        os.chown(folder, 65534, 65534)
    else:
        user = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: user)
    with pytest.warns(RuntimeWarning, match="belongs to .*, and this process runs as") as met:
        assert compiled_result()[0] == "compiled"
    assert "writable" not in str(met[0].message), "another user's folder is not the one to repair"


@NOT_PRIVATE
def test_an_entry_that_is_no_plain_file_is_replaced(folder: Path, tmp_path: Path) -> None:
    _, want = compiled_result()
    place = only_entry(folder)
    target = tmp_path / "elsewhere"
    target.write_bytes(place.read_bytes())
    for link in (None, Path("/dev/zero"), target):
        place.unlink()
        os.mkfifo(place) if link is None else place.symlink_to(link)
        forget()
        cache._tally.problems.clear()
        with pytest.warns(RuntimeWarning, match=f"{place} is (not a regular file|a link)"):
            origin, got = compiled_result()
        assert origin == "compiled"
        np.testing.assert_array_equal(got, want)
        forget()
        assert compiled_result()[0] == "disk"


@NOT_PRIVATE
def test_an_entry_that_others_may_write_is_replaced(folder: Path) -> None:
    compiled_result()
    place = only_entry(folder)
    place.chmod(0o666)
    forget()
    with pytest.warns(RuntimeWarning, match="cannot be used: .*mode 666.* compiled again"):
        assert compiled_result()[0] == "compiled"
    assert stat.S_IMODE(place.stat().st_mode) == 0o600


def test_an_entry_that_is_too_large_is_neither_read_nor_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled_result()
    with only_entry(folder).open("r+b") as file:
        file.truncate(20 << 30)  # a hole: no disk is used
    forget()
    with pytest.warns(RuntimeWarning, match=f"at most {limits.ENTRY_BYTES} are read"):
        assert compiled_result()[0] == "compiled"
    monkeypatch.setattr(limits, "ENTRY_BYTES", 100)
    cache.write(KEY, b"x" * 200)
    monkeypatch.undo()
    assert cache.read(KEY) is None


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root and Windows search everywhere")
def test_a_folder_that_cannot_be_searched_is_told_and_no_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.mkdir()
    monkeypatch.setenv("FUSEPLAN_CACHE_DIR", str(folder / "below"))
    folder.chmod(0)
    try:
        info = cache.cache_info()
    finally:
        folder.chmod(stat.S_IRWXU)
    assert (info.path, info.entries) == (str(folder / "below"), 0)
    assert info.problem is not None


def test_a_folder_whose_files_cannot_be_listed_is_told_and_no_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(folder))

    monkeypatch.setattr(os, "stat", denied)
    monkeypatch.setattr(os, "scandir", denied)
    info = cache.cache_info()
    monkeypatch.undo()
    assert (info.path, info.entries) == (str(folder), 0)
    assert "Permission denied" in str(info.problem)
