"""Random plans of the whole language on a GPU, small ones and medium ones, beside float64.

python tests/device/shares.py 15 tests/device/test_random.py --cases 5000 --first 100000 --seconds 300

A case takes half a second in the mean, and up to two minutes: what takes long is a kernel's compilation.
"""

import random
import time

import numpy as np
import pytest

from fuseplan.kernels.target import parse_target
from random_checks import check
from random_plans import MOST_ELEMENTS, drawn

BEGUN = time.monotonic()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    first, cases = map(metafunc.config.getoption, ("first", "cases"))
    metafunc.parametrize("case", range(first, first + cases))


@pytest.mark.parametrize("most", [MOST_ELEMENTS, 32 * MOST_ELEMENTS])
def test_random_plans(case: int, most: int, request: pytest.FixtureRequest) -> None:
    if time.monotonic() - BEGUN > request.config.getoption("seconds"):
        pytest.skip("the time is over")
    with np.errstate(all="ignore"):
        check(drawn(case, most), parse_target("cuda"), random.Random(case), case)
