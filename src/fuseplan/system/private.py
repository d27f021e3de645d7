"""Files that nobody else can write: code is run, and measured choices are followed, from these alone.

A folder is private where it belongs to the effective user or to root, nobody else may write it, and nobody
else can put another in its place: every folder above it, and every one that a link leads through, belongs to
the user or to root too, and is not writable by others unless it is sticky, as /tmp is. A private file is a
plain one in a private folder, and no link. Where a system has no such owners and modes (Windows), the access
list of the folder has to do that. Every function here raises OSError where it cannot do what it should.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from functools import cache, reduce
from operator import or_
from pathlib import Path

if os.name != "nt":
    import grp
    import pwd

ROOT = 0
WRITING = ".writing-"  # the name's beginning of a file that is not in its place yet
DAY_SECONDS = 86400.0
# Without O_NONBLOCK, opening a pipe waits for its other end. Some flags are unknown to some systems.
SAFELY = reduce(or_, (getattr(os, f"O_{name}", 0) for name in ("NOFOLLOW", "NONBLOCK", "CLOEXEC", "BINARY")))
ID_MAP = Path("/proc/self/uid_map")

_checked: dict[Path, tuple[int, ...]] = {}  # folders as they were when they were found private


class NotPrivateError(OSError):
    """Another user could write the file or folder; `remedy` begins a sentence on how to make it private."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem)
        self.remedy = remedy


def check(where: Path) -> None:
    """Checks that a folder is private; one that has not changed since then costs one look.

    Raises:
        FileNotFoundError: there is none.
        NotPrivateError: another user could write it, or put another in its place.
    """
    try:
        found = os.stat(where)
    except NotADirectoryError:
        file = next(place for place in where.parents if os.path.lexists(place))
        raise NotADirectoryError(f"{file} is not a folder") from None
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(f"{where} is not a folder")
    if not hasattr(os, "geteuid"):
        return
    user = os.geteuid()
    stamp = (user, found.st_dev, found.st_ino, found.st_mode, found.st_uid, found.st_gid)
    if _checked.get(where) == stamp:
        return
    _check_own(where, found)
    check_way(where)
    _checked[where] = stamp


def check_way(where: Path) -> None:
    """Checks that nobody else can put another folder in this one's place, which need not exist yet.

    Raises:
        NotPrivateError: another user could.
    """
    if not hasattr(os, "geteuid"):
        return
    user = os.geteuid()
    for place, found in _way(where):
        if found.st_uid not in (user, ROOT) and not _is_outside(found.st_uid):
            problem = f"{place}, a folder above it, belongs to {_name(found.st_uid)}, not to {_name(user)}"
            raise NotPrivateError(problem, "leave it to its owner")
        is_safe = stat.S_ISLNK(found.st_mode) or found.st_mode & stat.S_ISVTX
        if not is_safe and _others_write(place, found):
            problem = f"{place}, a folder above it, is writable by others (mode {_mode(found)})"
            raise NotPrivateError(problem, f"run `chmod go-w {place}`")


def make(where: Path) -> None:
    """Makes a folder that nobody else can even read, and those above it that are missing; checks it."""
    with contextlib.suppress(FileNotFoundError):
        check(where)
        return
    check_way(where)  # root leaves nothing behind in a user's folder
    missing = [place for place in (where, *where.parents) if not os.path.lexists(place)]
    for place in reversed(missing):
        with contextlib.suppress(FileExistsError):  # another process was faster
            os.mkdir(place, 0o700)
    check(where)


def read(place: Path, most: int, *, marks_use: bool = False) -> bytes:
    """The bytes of a private file of at most `most`.

    Args:
        marks_use: set the file's time, once a day, so that the files which nobody uses can be told.

    Raises:
        FileNotFoundError: there is no such file or folder.
        NotPrivateError: another user could have written it.
    """
    check(place.parent)
    descriptor = _opened(place, os.O_RDONLY)
    try:
        found = _checked_file(place, descriptor, most)
        data = _whole(descriptor, found.st_size)
    finally:
        os.close(descriptor)
    if marks_use and time.time() - found.st_mtime > DAY_SECONDS:
        with contextlib.suppress(OSError):  # a folder of root's is only read
            os.utime(place)
    return data


def write(place: Path, data: bytes) -> None:
    """Writes a private file beside its place and renames it, so that a reader sees all of it or nothing."""
    make(place.parent)
    descriptor, beside = tempfile.mkstemp(prefix=WRITING, dir=place.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        with contextlib.suppress(FileNotFoundError):  # another process has emptied the folder meanwhile
            os.replace(beside, place)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(beside)


def append(place: Path, line: str, most: int) -> None:
    """Appends a whole line to a private file of at most `most` bytes, or none; the caller holds a lock.

    A line before it that was cut off, by a full disk or a crash, is ended first.
    """
    make(place.parent)
    descriptor = _opened(place, os.O_RDWR | os.O_APPEND | os.O_CREAT)
    try:
        size = _checked_file(place, descriptor, most).st_size
        os.lseek(descriptor, max(0, size - 1), os.SEEK_SET)
        is_cut = os.read(descriptor, 1) not in (b"", b"\n")
        data = f"{chr(10) * is_cut}{line}\n".encode()
        if os.write(descriptor, data) < len(data):
            os.ftruncate(descriptor, size)
            raise OSError(f"{place} cannot take a line of {len(data)} bytes: the disk is full")
    finally:
        os.close(descriptor)


def _opened(place: Path, flags: int) -> int:
    if os.path.islink(place):  # where NOFOLLOW is unknown, and for a message that says so
        raise NotPrivateError(f"{place} is a link, not a file", f"remove {place}")
    return os.open(place, flags | SAFELY, 0o600)


def _whole(descriptor: int, size: int) -> bytes:
    data = os.read(descriptor, size)
    while len(data) < size and (more := os.read(descriptor, size - len(data))):  # some file systems give less
        data += more
    return data


def _checked_file(place: Path, descriptor: int, most: int) -> os.stat_result:
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise OSError(f"{place} is not a regular file")
    if found.st_size > most:
        raise OSError(f"{place} has {found.st_size} bytes; at most {most} are read")
    _check_own(place, found)
    return found


def _check_own(place: Path, found: os.stat_result) -> None:
    if not hasattr(os, "geteuid"):
        return
    user = os.geteuid()
    if found.st_uid not in (user, ROOT):
        problem = f"{place} belongs to {_name(found.st_uid)}, and this process runs as {_name(user)}"
        raise NotPrivateError(problem, "leave it to its owner")
    if _others_write(place, found):
        problem = f"{place} is writable by others (mode {_mode(found)})"
        raise NotPrivateError(problem, f"run `chmod go-w {place}`")


def _way(where: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """A folder, those above it, and where one is a link, the folders that it leads through."""
    waiting, seen = [where.absolute()], set[Path]()
    while waiting:
        end = waiting.pop()
        for place in {end, *end.parents} - seen:
            seen.add(place)
            found = _as_it_is(place)
            if found is not None:
                yield place, found
            if found is not None and stat.S_ISLNK(found.st_mode):
                waiting.append(place.parent / os.readlink(place))


def _as_it_is(place: Path) -> os.stat_result | None:
    """What a path is, a link too; None where there is nothing."""
    try:
        return os.lstat(place)
    except FileNotFoundError:
        return None


def _others_write(place: Path, found: os.stat_result) -> bool:
    """Whether somebody but the owner may write; the owner alone in a group of the same name is nobody else.

    With an access list, the group's bits say what the list allows at most.
    """
    if not found.st_mode & stat.S_IWGRP or found.st_mode & stat.S_IWOTH:
        return bool(found.st_mode & stat.S_IWOTH)
    return _has_list(place) or not _is_one_person(found.st_gid, found.st_uid)


def _has_list(place: Path) -> bool:
    if not hasattr(os, "listxattr"):
        return False
    try:
        return "system.posix_acl_access" in os.listxattr(place)
    except OSError:
        return False


@cache
def _is_one_person(group: int, user: int) -> bool:
    """Whether a group is that of one user, as many systems make with each user."""
    try:
        name, found = pwd.getpwuid(user).pw_name, grp.getgrgid(group)
    except KeyError:
        return False
    return found.gr_name == name and set(found.gr_mem) <= {name}


@cache
def _is_outside(user: int) -> bool:
    """Whether this number stands for every user that this process's name space does not know.

    In a container started by a user, folders of the system outside, `/` for one, have such an owner.
    """
    try:
        overflow = int(Path("/proc/sys/kernel/overflowuid").read_text())
        ranges = [tuple(map(int, line.split())) for line in ID_MAP.read_text().splitlines()]
    except (OSError, ValueError):
        return False
    return user == overflow and not any(begin <= user < begin + count for begin, _, count in ranges)


def _mode(found: os.stat_result) -> str:
    return f"{stat.S_IMODE(found.st_mode):o}"


def _name(user: int) -> str:
    try:
        return f"{pwd.getpwuid(user).pw_name} ({user})"
    except KeyError:
        return f"user {user}"
