"""The store of object code on disk: one file an entry, safe with many processes at once.

An entry is a header (magic, format, key, SHA-256 and length of the payload) and the payload. It is written
beside its place and then renamed, so a reader sees all of it or nothing; whatever does not check out is
absent, and is built again. A folder that cannot be used, or that another user could write, costs compile time
and one warning, never a compile.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import os
import struct
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fuseplan.settings import VARIABLES, settings
from fuseplan.system import limits, private, stock
from fuseplan.system.locks import Lock, in_child
from fuseplan.system.reading import Record

if os.name == "nt":
    import msvcrt
else:
    import fcntl

MAGIC = b"fuseplan"
FORMAT = 1
HEADER = struct.Struct("<8sI32s32sQ")  # magic, format, key, SHA-256 of the payload, its length
LOCKS = 64  # lock files a folder: keys share them, so that they do not pile up
POLL_SECONDS = 0.005
# No kernel follows from these.
NO_KERNELS = ("backward", "bench", "cli", "compat", "graph", "measure", "miopen", "onnx", "tuning")
LOOKS = 16  # one write in so many looks at the folder's size


@dataclass(frozen=True)
class CacheInfo(Record):
    """The disk cache, and the hits and misses of this process.

    Attributes:
        path: its folder; None where the cache is turned off.
        hits, misses, corrupt: look-ups of this process; a corrupt entry is a miss as well.
        entries, nbytes: kernels on disk, and their bytes.
        problem: why the folder cannot be used; None where it can, as far as is known.
    """

    path: str | None
    hits: int
    misses: int
    corrupt: int
    entries: int
    nbytes: int
    problem: str | None


class _Tally:
    """Counts of this process, and the folders and files that it has warned of."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.hits = self.misses = self.corrupt = 0
        self.problems: dict[Path, str] = {}

    def count(self, name: str) -> None:
        with self.lock:
            setattr(self, name, getattr(self, name) + 1)


_tally = _Tally()


def folder() -> Path | None:
    """Where entries lie; None where the settings turn the cache off, or the user has no home directory."""
    now = settings()
    if now.disable_cache:
        return None
    try:
        return _with_home(now.cache_dir)
    except OSError as error:
        report_unusable(now.cache_dir, error)
        return None


def _with_home(where: Path) -> Path:
    if where.parts[:1] and where.parts[0].startswith("~"):  # as the settings leave an unknown one
        raise OSError(f"no home directory is known for {where.parts[0]}")
    return where


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
    """SHA-256 over the sources that kernels follow from. None where they cannot be read.

    Without it nothing is cached: code of another generator must not pass for this one's.
    """
    try:
        return fingerprint_of(Path(__file__).parents[1], NO_KERNELS)
    except OSError:
        return None


def fingerprint_of(package: Path, without: Sequence[str] = ()) -> str:
    """SHA-256 over the names and texts of the Python files under a folder, those of some folders left out.

    Raises:
        OSError: one cannot be read.
    """
    digest = hashlib.sha256()
    for name in sorted(_sources(str(package), without)):
        with open(name, "rb") as file:
            text = file.read()
        digest.update(f"{name[len(str(package)) :]} {len(text)}\n".encode())
        digest.update(text)
    return digest.hexdigest()


def _sources(top: str, without: Sequence[str] = ()) -> Iterator[str]:
    """Paths of Python files; os.scandir takes 0.1 ms for them, pathlib's walk 0.5 ms."""
    with os.scandir(top) as entries:
        for entry in entries:
            if entry.name.endswith(".py"):
                yield entry.path
            elif not entry.name.startswith((".", "_")) and entry.name not in without and entry.is_dir():
                yield from _sources(entry.path)


def read(key: bytes, *, counts_miss: bool = True) -> bytes | None:
    """The payload stored under a key; None where there is none, or none that checks out.

    A second look, after waiting for another process, is told not to count what it misses.
    """
    where = folder()
    if where is None:
        return None
    data = _bytes_at(where, _place(where, key))
    payload = None if data is None else _payload(key, data)
    if payload is not None:
        _tally.count("hits")
    elif counts_miss:
        _tally.count("misses")
        if data is not None:
            _tally.count("corrupt")
    return payload


def holds(key: bytes) -> bool:
    """Whether there is a file of a key; it may be damaged."""
    return (where := folder()) is not None and _place(where, key).exists()


def kept(
    make: Callable[[], bytes], *parts: str, is_current: Callable[[bytes], bool] = lambda _: True
) -> bytes:
    """What `make` makes, stored by `parts` beside the kernels and not counted; made again if not current."""
    where, generator = folder(), fingerprint()
    if where is None or generator is None:
        return make()
    key = key_of(generator, *parts)
    place = _place(where, key, stock.SUFFIX_OF_PARTS)
    data = _bytes_at(where, place)
    payload = None if data is None else _payload(key, data)
    if payload is None or not is_current(payload):
        payload = make()
        _store(where, place, key, payload)
    return payload


def _bytes_at(where: Path, place: Path) -> bytes | None:
    """A file's bytes; None where there is none. One that is not used has none, and is reported."""
    try:
        return private.read(place, limits.ENTRY_BYTES, marks_use=True)
    except FileNotFoundError:
        return None
    except OSError as error:
        if not is_usable(where, private.check):
            return None
        report(place, f"an entry of the cache cannot be used: {error}. Its kernel is compiled again")
        return b""


def is_usable(where: Path, look: Callable[[Path], None]) -> bool:
    """Whether a folder passes a look; one that is there and does not is reported."""
    try:
        look(where)
    except FileNotFoundError:
        return False
    except OSError as error:
        report_unusable(where, error)
        return False
    return True


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
    if where is not None:
        _store(where, _place(where, key), key, payload)


def _store(where: Path, place: Path, key: bytes, payload: bytes) -> None:
    header = HEADER.pack(MAGIC, FORMAT, key, hashlib.sha256(payload).digest(), len(payload))
    data, size = header + payload, settings().cache_size
    if len(data) > min(size, limits.ENTRY_BYTES) or not stored(place, data):
        return
    # Keys are random numbers: about one write in LOOKS looks, whichever process writes.
    if key[0] % LOOKS == 0 or len(data) > size // LOOKS**2:
        with contextlib.suppress(OSError):  # the next look may succeed
            stock.evict(where, size)


def stored(place: Path, data: bytes) -> bool:
    """Whether a file in the folder could be written; says so once where not."""
    try:
        private.write(place, data)
    except OSError as error:
        report_unusable(place.parent, error)
        return False
    return True


@contextlib.contextmanager
def lock(key: bytes) -> Iterator[None]:
    """Holds a key, so that of many processes one compiles and the others wait for its entry.

    Without a lock within `limits.LOCK_SECONDS`, or where there are none, goes on: the rename keeps entries
    whole.
    """
    where = folder()
    descriptor = None
    try:
        if where is not None:
            descriptor = _locked(where, where / f".lock-{key[0] % LOCKS:02d}")
        yield
    finally:
        if descriptor is not None and descriptor in _held:  # a forked child has let go of it
            _unlock(descriptor)


def _locked(where: Path, place: Path) -> int | None:
    try:
        private.make(where)
        descriptor = os.open(place, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        report_unusable(where, error)
        return None
    _held.add(descriptor)
    deadline = time.monotonic() + limits.LOCK_SECONDS
    while not _try_lock(descriptor):
        if time.monotonic() > deadline:
            _unlock(descriptor)
            return None
        time.sleep(POLL_SECONDS)
    return descriptor


def _try_lock(descriptor: int) -> bool:
    try:
        if os.name == "nt":
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined,unused-ignore]
        else:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # Where the file system has no locks there is nothing to wait for.
        return error.errno not in (errno.EAGAIN, errno.EACCES, errno.EDEADLK)
    return True


def _unlock(descriptor: int) -> None:
    """Lets go of a lock file, and says so: closed alone, it stays locked by a forked child's copy."""
    _held.discard(descriptor)
    if os.name != "nt":
        with contextlib.suppress(OSError):  # as above
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


_held: set[int] = set()  # descriptors of lock files


def _let_go() -> None:
    """In a forked child: if its parent dies, the child's copies must not keep the files locked."""
    while _held:
        os.close(_held.pop())


in_child(_let_go)


def report_unusable(where: Path, error: OSError) -> None:
    """Warns, once a folder and process, that nothing can be kept there."""
    variable = next(each.name for each in VARIABLES if each.field == "cache_dir")
    remedy = error.remedy if isinstance(error, private.NotPrivateError) else "make it writable"
    report(
        where,
        f"the cache folder {where} cannot be used ({error}): nothing is kept, and kernels are compiled "
        f"anew in each process. {remedy[0].upper()}{remedy[1:]}, or set {variable} to a folder of your own",
        problem=str(error),
    )


def report(place: Path, message: str, problem: str = "") -> None:
    """Warns of a file or folder, once a process."""
    with _tally.lock:
        if place in _tally.problems:
            return
        _tally.problems[place] = problem
    warnings.warn(message, RuntimeWarning, stacklevel=3)


def _place(where: Path, key: bytes, suffix: str = stock.SUFFIX) -> Path:
    return where / (key.hex() + suffix)


def entries() -> dict[str, int]:
    """Bytes on disk by key, in hexadecimal; none where the folder cannot be read."""
    where = folder()
    with contextlib.suppress(OSError):
        held = [] if where is None else stock.held(where)
        return {each.path.stem: each.nbytes for each in held if each.is_kernel}
    return {}


def cache_info() -> CacheInfo:
    """The cache's folder, its contents, and this process's hits and misses."""
    now = settings()
    where = None if now.disable_cache else now.cache_dir
    problem = None if where is None else _tally.problems.get(where) or _obstacle(where)
    path, sizes = None if where is None else str(where), entries()
    with _tally.lock:
        counts = (_tally.hits, _tally.misses, _tally.corrupt)
    return CacheInfo(path, *counts, len(sizes), sum(sizes.values()), problem)


def _obstacle(where: Path) -> str | None:
    """Why a folder is no cache, or cannot be written, as far as a look tells."""
    found = where
    try:
        try:
            private.check(_with_home(where))
        except FileNotFoundError:
            private.check_way(where)
            found = next(place for place in where.absolute().parents if os.path.lexists(place))
    except OSError as error:
        return str(error)
    return None if os.access(found, os.W_OK | os.X_OK) else f"{found} cannot be written"


def clear_cache() -> int:
    """Removes every kernel, and the files that were left unfinished, and returns how many kernels there were.

    Raises:
        OSError: one cannot be removed.
    """
    where = folder()
    every = [] if where is None else list(stock.held(where))
    for each in every:
        each.remove()
    return sum(each.is_kernel for each in every)
