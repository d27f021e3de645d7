"""Shares of the tests: each process runs every n-th one."""

import subprocess
import sys
from pathlib import Path

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
