from __future__ import annotations

from pathlib import Path

import pytest

from fuseplan.errors import ArgumentError
from fuseplan.settings import VARIABLES, Settings, settings


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)


def test_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert settings() == Settings(Path("/somewhere/fuseplan"), 1 << 30, disable_cache=False, threads=None)
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert settings().cache_dir == Path("~/.cache/fuseplan").expanduser()


def test_each_variable_is_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEPLAN_CACHE_DIR", "~/here")
    monkeypatch.setenv("FUSEPLAN_DISABLE_CACHE", "Yes")
    monkeypatch.setenv("FUSEPLAN_THREADS", "3")
    monkeypatch.setenv("FUSEPLAN_CACHE_SIZE", "3M")
    monkeypatch.setenv("FUSEPLAN_PTXAS", "/opt/ptxas")
    here, ptxas = Path("~/here").expanduser(), Path("/opt/ptxas")
    assert settings() == Settings(here, 3 << 20, disable_cache=True, threads=3, ptxas=ptxas)
    monkeypatch.setenv("FUSEPLAN_DISABLE_CACHE", "0")
    assert settings().disable_cache is False


def test_an_empty_variable_is_an_unset_one(monkeypatch: pytest.MonkeyPatch) -> None:
    before = settings()
    for variable in VARIABLES:
        monkeypatch.setenv(variable.name, "")
    assert settings() == before


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("FUSEPLAN_THREADS", "0"),
        ("FUSEPLAN_THREADS", "-1"),
        ("FUSEPLAN_THREADS", "2.5"),
        ("FUSEPLAN_THREADS", "²"),
        ("FUSEPLAN_THREADS", "9" * 5000),
        ("FUSEPLAN_THREADS", "1025"),
        ("FUSEPLAN_DISABLE_CACHE", "maybe"),
        ("FUSEPLAN_CACHE_SIZE", "0"),
        ("FUSEPLAN_CACHE_SIZE", "-1M"),
        ("FUSEPLAN_CACHE_SIZE", "1 GB"),
        ("FUSEPLAN_CACHE_SIZE", "9" * 5000),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(ArgumentError, match=f"{name}={text[:3]}"):
        settings()


def test_each_variable_sets_a_field_of_its_own_and_says_what_it_means() -> None:
    assert sorted(variable.field for variable in VARIABLES) == sorted(Settings.__dataclass_fields__)
    assert all(variable.name.startswith("FUSEPLAN_") and variable.meaning for variable in VARIABLES)


def test_a_user_without_a_home_directory_has_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.path.expanduser", lambda text: text)  # as without HOME and without an entry
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert settings().cache_dir == Path("~/.cache/fuseplan")
