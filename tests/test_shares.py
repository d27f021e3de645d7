"""Shares of the tests: each process runs every n-th one; parts of them keep each value."""

import subprocess
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import conftest

TESTS = Path(__file__).parent
SOME = "tests/stages/test_settings.py"


def ids(*arguments: str) -> list[str]:
    words = [sys.executable, "-m", "pytest", "-q", "--collect-only", SOME, *arguments]
    told = subprocess.run(words, cwd=TESTS.parent, capture_output=True, text=True, check=True).stdout
    return [line for line in told.splitlines() if "::" in line]


def test_shares_are_all_tests_once() -> None:
    every = ids()
    shares = [ids("--share", f"{place}/3") for place in (1, 2, 3)]
    assert [*map(len, shares)] == [len(every[place::3]) for place in range(3)]
    assert sorted(name for share in shares for name in share) == sorted(every)


def test_each_process_tells_its_share_and_a_failure_is_the_status() -> None:
    words = [sys.executable, str(TESTS / "device" / "shares.py"), "2", SOME]
    done = subprocess.run(words, cwd=TESTS.parent, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.count(" passed")) == (0, 2)
    assert "share 2/2, status 0" in done.stdout
    done = subprocess.run(
        [*words, "--no-such"], cwd=TESTS.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1


class Case:
    """A case of a test of three parameters, and of one that is its name."""

    def __init__(self, a: str, b: str, c: str) -> None:
        self.name = f"test[{a}{b}{c}]"
        self.callspec = SimpleNamespace(params={"a": a, "b": b, "c": c, "name": self.name})

    def get_closest_marker(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(args=(4,))


def test_a_part_of_the_cases_has_each_value_and_many_pairs() -> None:
    """Of the 68 pairs, as many cases by chance have 36."""
    cases: list[Any] = [Case(*each) for each in product("stuvwxyz", "ijkl", "abc")]
    kept = [vars(each)["callspec"].params for each in conftest._kept(cases)]
    assert len(kept) == 16
    assert [len({each[name] for each in kept}) for name in "abc"] == [8, 4, 3]
    pairs = {(one, each[one], two, each[two]) for each in kept for one, two in ("ab", "ac", "bc")}
    assert len(pairs) >= 44
