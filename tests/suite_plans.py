"""The plans of the suites, for tests of texts, which differ little where plans differ in numbers alone."""

import re
import tomllib
from collections.abc import Iterator

from benchmarks.suite import FOLDER
from fuseplan.system.gathering import gathered


def plans_of_suites() -> Iterator[str]:
    for suite in sorted(FOLDER.glob("*.toml")):
        yield from (case["plan"] for case in tomllib.loads(suite.read_text())["case"])


def one_of_each(turn: int, turns: int) -> list[str]:
    """Of plans that differ in numbers alone, one: another one each turn, from the first to the last."""
    alike = gathered((re.sub(r"\d+", "", plan), plan) for plan in dict.fromkeys(plans_of_suites()))
    return [plans[len(plans) * turn // turns] for plans in alike.values()]
