"""The store of object code on disk: one file an entry, safe with many processes at once.

An entry is a header (magic, format, key, SHA-256 and length of the payload) and the payload. It is written
beside its place and then renamed, so a reader sees all of it or nothing; whatever does not check out is
absent, and is built again. A folder that cannot be used costs compile time and one warning, never a compile.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import struct
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from fuseplan.settings import VARIABLES, settings

if os.name == "nt":
    import msvcrt
else:
    import fcntl

MAGIC = b"fuseplan"
FORMAT = 1
HEADER = struct.Struct("<8sI32s32sQ")  # magic, format, key, SHA-256 of the payload, its length
SUFFIX = ".kernel"
LOCKS = 64  # lock files a folder: keys share them, so that they do not pile up
LOCK_SECONDS = 60.0  # a process that holds a lock longer is stuck; compiling twice is right, only slower
POLL_SECONDS = 0.005


@dataclass(frozen=True)
class CacheInfo:
    """The disk cache and what this process has met there.

    Attributes:
        path: its folder; None where the cache is turned off.
        hits, misses, corrupt: look-ups of this process; a corrupt entry is a miss as well.
        entries, nbytes: what is on disk.
        problem: why the folder cannot be used; None where it can, as far as is known.
    """

    path: str | None
    hits: int
    misses: int
    corrupt: int
    entries: int
    nbytes: int
    problem: str | None

    def to_json(self) -> dict[str, object]:
        """The fields as JSON values."""
        return asdict(self)


class _Tally:
    """Counts of this process, and the folders that it has warned of."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.hits = self.misses = self.corrupt = 0
        self.problems: dict[Path, str] = {}

    def count(self, name: str) -> None:
        with self.lock:
            setattr(self, name, getattr(self, name) + 1)


_tally = _Tally()


def folder() -> Path | None:
    """Where entries lie; None where the settings turn the cache off."""
    now = settings()
    return None if now.disable_cache else now.cache_dir


def key_of(*parts: str) -> bytes:
    """The key of an entry: SHA-256 over its parts and their lengths."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(struct.pack("<Q", len(data)))
        digest.update(data)
    return digest.digest()


@functools.cache
def fingerprint() -> str | None:
    """SHA-256 over fuseplan's own source files: what generates code. None where they cannot be read.

    Without it nothing is cached: code of another generator must not pass for this one's.
    """
    try:
        return fingerprint_of(Path(__file__).parent)
    except OSError:
        return None


def fingerprint_of(package: Path) -> str:
    """SHA-256 over the names and texts of the Python files under a folder.

    Raises:
        OSError: one cannot be read.
    """
    digest = hashlib.sha256()
    for name in sorted(_sources(str(package))):
        with open(name, "rb") as file:
            text = file.read()
        digest.update(f"{name[len(str(package)) :]} {len(text)}\n".encode())
        digest.update(text)
    return digest.hexdigest()


def _sources(top: str) -> Iterator[str]:
    """Paths of Python files; os.scandir, because pathlib's walk alone would take the 3 ms this may."""
    with os.scandir(top) as entries:
        for entry in entries:
            if entry.name.endswith(".py"):
                yield entry.path
            elif not entry.name.startswith((".", "_")) and entry.is_dir():
                yield from _sources(entry.path)


def read(key: bytes, *, counts_miss: bool = True) -> bytes | None:
    """The payload stored under a key; None where there is none, or none that checks out.

    A second look, after waiting for another process, is told not to count what it misses.
    """
    where = folder()
    if where is None:
        return None
    try:
        data = _place(where, key).read_bytes()
    except FileNotFoundError:
        data = None
    except OSError as error:
        _report(where, error)
        data = None
    payload = None if data is None else _payload(key, data)
    if payload is not None:
        _tally.count("hits")
    elif counts_miss:
        _tally.count("misses")
        if data is not None:
            _tally.count("corrupt")
    return payload


def reject(key: bytes) -> None:
    """Takes away an entry that checks out and cannot be used all the same; its hit becomes a miss."""
    with _tally.lock:
        _tally.hits -= 1
        _tally.misses += 1
        _tally.corrupt += 1
    where = folder()
    if where is not None:
        with contextlib.suppress(OSError):
            _place(where, key).unlink()


def _payload(key: bytes, data: bytes) -> bytes | None:
    if len(data) < HEADER.size:
        return None
    magic, number, stored_key, digest, length = HEADER.unpack_from(data)
    payload = data[HEADER.size :]
    known = (magic, number, stored_key, length) == (MAGIC, FORMAT, key, len(payload))
    return payload if known and hashlib.sha256(payload).digest() == digest else None


def write(key: bytes, payload: bytes) -> None:
    """Stores a payload; where it cannot, says so once and goes on."""
    where = folder()
    if where is None:
        return
    header = HEADER.pack(MAGIC, FORMAT, key, hashlib.sha256(payload).digest(), len(payload))
    beside = None
    try:
        where.mkdir(parents=True, exist_ok=True)
        descriptor, beside = tempfile.mkstemp(prefix=".writing-", dir=where)
        with os.fdopen(descriptor, "wb") as file:
            file.write(header + payload)
        os.replace(beside, _place(where, key))
    except OSError as error:
        _report(where, error)
        if beside is not None:
            with contextlib.suppress(OSError):
                os.unlink(beside)


@contextlib.contextmanager
def lock(key: bytes) -> Iterator[None]:
    """Holds a key, so that of many processes one compiles and the others wait for its entry.

    Where no lock can be had within LOCK_SECONDS, or none at all, goes on without: the rename keeps entries
    whole.
    """
    where = folder()
    descriptor = None
    try:
        if where is not None:
            descriptor = _locked(where, where / f".lock-{key[0] % LOCKS:02d}")
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)  # which releases it, as the process's death does


def _locked(where: Path, place: Path) -> int | None:
    try:
        where.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(place, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        _report(where, error)
        return None
    deadline = time.monotonic() + LOCK_SECONDS
    while not _try_lock(descriptor):
        if time.monotonic() > deadline:
            os.close(descriptor)
            return None
        time.sleep(POLL_SECONDS)
    return descriptor


def _try_lock(descriptor: int) -> bool:
    try:
        if os.name == "nt":
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined,unused-ignore]
        else:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _report(where: Path, error: OSError) -> None:
    """Warns, once a folder and process, that it cannot be used."""
    with _tally.lock:
        if where in _tally.problems:
            return
        _tally.problems[where] = str(error)
    variable = next(each.name for each in VARIABLES if each.field == "cache_dir")
    warnings.warn(
        f"the cache folder {where} cannot be used ({error}); kernels are compiled anew in each process. "
        f"Make it writable, or set {variable} to a folder that is",
        RuntimeWarning,
        stacklevel=2,
    )


def _place(where: Path, key: bytes) -> Path:
    return where / (key.hex() + SUFFIX)


def entries() -> dict[str, int]:
    """Bytes on disk by key, in hexadecimal."""
    where = folder()
    found: dict[str, int] = {}
    for place in [] if where is None else where.glob(f"*{SUFFIX}"):
        with contextlib.suppress(OSError):  # another process may have cleared it
            found[place.stem] = place.stat().st_size
    return found


def cache_info() -> CacheInfo:
    """Where the cache is, what it holds, and this process's hits and misses."""
    where = folder()
    sizes = entries()
    problem = None if where is None else _tally.problems.get(where)
    path = None if where is None else str(where)
    with _tally.lock:
        counts = (_tally.hits, _tally.misses, _tally.corrupt)
    return CacheInfo(path, *counts, len(sizes), sum(sizes.values()), problem)


def clear() -> int:
    """Removes all entries and returns how many there were.

    Raises:
        OSError: one cannot be removed.
    """
    where = folder()
    removed = 0
    for key in entries():
        assert where is not None  # entries of no folder are none
        with contextlib.suppress(FileNotFoundError):
            _place(where, bytes.fromhex(key)).unlink()
            removed += 1
    return removed
