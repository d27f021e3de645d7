"""Private files and folders: whose they are, who else may write them, and what is read of them."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
import time
from pathlib import Path

import pytest

from fuseplan.system import private
from fuseplan.system.private import NotPrivateError

pytestmark = pytest.mark.skipif(os.name == "nt", reason="owners and modes are POSIX")
AS_ROOT = os.name != "nt" and os.geteuid() == 0
NOBODY = 65534


@pytest.fixture(autouse=True)
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private, "_checked", {})


@pytest.fixture
def where(tmp_path: Path) -> Path:
    """A private folder with a file in it."""
    made = tmp_path / "above" / "own"
    private.write(made / "file", b"text")
    return made


def become_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on the process's user is another, as far as the checks know."""
    user = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: user)


def test_folders_and_files_are_made_for_one_user(where: Path) -> None:
    assert [stat.S_IMODE(each.stat().st_mode) for each in (where.parent, where)] == [0o700, 0o700]
    assert stat.S_IMODE((where / "file").stat().st_mode) == 0o600
    assert private.read(where / "file", 4) == b"text"


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o702, 0o1772])
def test_a_folder_that_others_may_write_is_refused(where: Path, mode: int) -> None:
    where.chmod(mode)
    with pytest.raises(NotPrivateError, match=f"{where} is writable by others .mode {mode:o}") as raised:
        private.read(where / "file", 4)
    assert raised.value.remedy == f"run `chmod go-w {where}`"
    with pytest.raises(NotPrivateError):
        private.write(where / "new", b"")
    assert [each.name for each in where.iterdir()] == ["file"]


def test_a_folder_that_becomes_writable_is_looked_at_anew(where: Path) -> None:
    private.check(where)
    where.chmod(0o777)
    with pytest.raises(NotPrivateError):
        private.check(where)
    where.chmod(0o755)
    private.check(where)


def test_another_users_folder_is_refused(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if AS_ROOT:
        os.chown(where, NOBODY, NOBODY)  # root runs no code from a folder that a user owns
    else:
        become_another(monkeypatch)
    with pytest.raises(NotPrivateError, match=f"{where} belongs to .*, and this process runs as"):
        private.read(where / "file", 4)


@pytest.mark.skipif(not AS_ROOT, reason="gives a file away")
def test_another_users_file_in_an_own_folder_is_refused(where: Path) -> None:
    os.chown(where / "file", NOBODY, NOBODY)
    with pytest.raises(NotPrivateError, match="file belongs to"):
        private.read(where / "file", 4)


@pytest.mark.skipif(not AS_ROOT, reason="gives a folder away")
def test_root_makes_nothing_below_a_users_folder(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir(0o700)
    os.chown(home, NOBODY, NOBODY)
    with pytest.raises(NotPrivateError, match=f"{home}, a folder above it, belongs to"):
        private.write(home / ".cache" / "fuseplan" / "file", b"")
    assert list(home.iterdir()) == []


@pytest.mark.skipif(not AS_ROOT, reason="root's own is everybody's who is not root")
def test_what_root_made_is_trusted(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    become_another(monkeypatch)
    assert private.read(where / "file", 4) == b"text"


def test_a_file_that_others_may_write_is_refused(where: Path) -> None:
    (where / "file").chmod(0o666)
    with pytest.raises(NotPrivateError, match=r"file is writable by others .mode 666"):
        private.read(where / "file", 4)


def test_a_folder_on_the_way_that_others_may_write_is_refused_unless_it_is_sticky(where: Path) -> None:
    where.parent.chmod(0o777)
    private._checked.clear()  # a process looks at the way to a folder once
    with pytest.raises(NotPrivateError, match=f"{where.parent}, a folder above it, is writable by others"):
        private.read(where / "file", 4)
    where.parent.chmod(0o1777)  # as /tmp is: nobody can rename another user's folder there
    assert private.read(where / "file", 4) == b"text"


def test_the_way_through_a_link_is_looked_at(where: Path, tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open" / "link").symlink_to(where.parent)
    through = tmp_path / "open" / "link" / "own"
    assert private.read(through / "file", 4) == b"text"
    private._checked.clear()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(NotPrivateError, match=f"{tmp_path / 'open'}, a folder above it"):
        private.read(through / "file", 4)
    (tmp_path / "open").chmod(0o700)
    where.parent.chmod(0o777)
    with pytest.raises(NotPrivateError, match=f"{where.parent}, a folder above it"):
        private.read(through / "file", 4)


@pytest.mark.skipif(not AS_ROOT, reason="gives a link away")
def test_another_users_link_on_the_way_is_refused(where: Path, tmp_path: Path) -> None:
    (tmp_path / "sticky").mkdir()
    (tmp_path / "sticky").chmod(0o1777)
    link = tmp_path / "sticky" / "link"
    link.symlink_to(where)
    os.chown(link, NOBODY, NOBODY, follow_symlinks=False)
    with pytest.raises(NotPrivateError, match=f"{link}, a folder above it, belongs to"):
        private.read(link / "file", 4)


def test_a_group_of_one_person_is_nobody_else(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where.chmod(0o770)
    monkeypatch.setattr(private, "_is_one_person", lambda group, user: True)
    assert private.read(where / "file", 4) == b"text"
    monkeypatch.setattr(private, "_is_one_person", lambda group, user: False)
    private._checked.clear()
    with pytest.raises(NotPrivateError, match="mode 770"):
        private.read(where / "file", 4)


class _Named:
    def __init__(self, **values: object) -> None:
        self.__dict__ = values


@pytest.mark.parametrize(
    ("group", "members", "is_one"),
    [("me", [], True), ("me", ["me"], True), ("me", ["you"], False), ("users", [], False)],
)
def test_which_group_is_one_person(
    group: str, members: list[str], is_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pwd.getpwuid", lambda user: _Named(pw_name="me"))
    monkeypatch.setattr("grp.getgrgid", lambda number: _Named(gr_name=group, gr_mem=members))
    assert private._is_one_person.__wrapped__(1, 1) is is_one


@pytest.mark.skipif(not shutil.which("setfacl"), reason="needs setfacl")
def test_an_access_list_that_lets_another_write_is_refused(
    where: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private, "_is_one_person", lambda group, user: True)
    subprocess.run(["setfacl", "-m", "u:65534:rwx", str(where)], check=True)
    with pytest.raises(NotPrivateError, match="writable by others"):
        private.read(where / "file", 4)


def test_an_access_list_outweighs_a_group_of_one_person(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private, "_is_one_person", lambda group, user: True)
    monkeypatch.setattr(os, "listxattr", lambda place: ["system.posix_acl_access"], raising=False)
    where.chmod(0o770)  # the group's bits are the list's mask
    with pytest.raises(NotPrivateError, match="writable by others"):
        private.read(where / "file", 4)


@pytest.mark.parametrize(
    ("mapped", "is_outside"), [("0 0 4294967295", False), ("1000 1000 1", True), ("", True)]
)
def test_owners_outside_of_a_containers_name_space_are_the_systems(
    mapped: str, is_outside: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "map").write_text(mapped)
    monkeypatch.setattr(private, "ID_MAP", tmp_path / "map")
    if not Path("/proc/sys/kernel/overflowuid").exists():
        pytest.skip("name spaces of users are Linux's")
    overflow = int(Path("/proc/sys/kernel/overflowuid").read_text())
    assert private._is_outside.__wrapped__(overflow) is is_outside
    assert not private._is_outside.__wrapped__(1001)


def test_what_is_no_plain_file_is_refused_at_once(where: Path) -> None:
    os.mkfifo(where / "pipe")
    (where / "zero").symlink_to("/dev/zero")
    (where / "folder").mkdir()
    for name in ("pipe", "zero", "folder"):
        with pytest.raises(OSError, match=f"{name} is (not a regular file|a link)"):
            private.read(where / name, 1 << 40)
        with pytest.raises(OSError, match=name):
            private.append(where / name, "line", 1 << 40)


def test_a_file_that_is_too_large_is_refused_unread(where: Path) -> None:
    with (where / "large").open("wb") as file:
        file.truncate(20 << 30)  # a hole: no disk is used
    with pytest.raises(OSError, match="has 21474836480 bytes; at most 1000 are read"):
        private.read(where / "large", 1000)


def test_use_is_marked_once_a_day(where: Path) -> None:
    place = where / "file"
    long_ago = time.time() - 10 * private.DAY_SECONDS
    os.utime(place, (long_ago, long_ago))
    private.read(place, 4)
    assert place.stat().st_mtime == pytest.approx(long_ago)
    private.read(place, 4, marks_use=True)
    marked = place.stat().st_mtime_ns
    assert time.time() - marked / 1e9 < 100
    private.read(place, 4, marks_use=True)
    assert place.stat().st_mtime_ns == marked


def test_a_line_that_was_cut_off_costs_itself_alone(where: Path) -> None:
    (where / "lines").write_bytes(b"whole\ncut o")
    private.append(where / "lines", "next", 1000)
    private.append(where / "lines", "last", 1000)
    assert (where / "lines").read_bytes() == b"whole\ncut o\nnext\nlast\n"


def test_a_line_that_the_disk_does_not_take_leaves_no_piece(
    where: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private.append(where / "lines", "first", 1000)
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:3]))
    with pytest.raises(OSError, match="the disk is full"):
        private.append(where / "lines", "second", 1000)
    assert (where / "lines").read_bytes() == b"first\n"


def test_a_file_that_is_cleared_while_it_is_written_is_only_not_kept(
    where: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cleared(*_: object) -> None:
        raise FileNotFoundError(errno.ENOENT, "No such file")

    monkeypatch.setattr(os, "replace", cleared)
    private.write(where / "new", b"text")
    assert [each.name for each in where.iterdir()] == ["file"]


def test_a_working_directory_that_was_removed_matters_to_no_absolute_folder(
    where: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert private.read(where / "file", 4) == b"text"
    private.write(where / "below" / "new", b"text")
