"""What it costs to choose and to write a kernel: that depends on neither extents nor the padding."""

import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import pytest

from fuseplan.execution.stages import decide

SMALL, LARGE = 4_016, 401_600
MORE = 4  # times as many lines are executed at most: other candidates may be worth considering

FORMS = (
    "f32[1x3x{N}x1] -> conv2d(8, kernel=3, padding=1)",
    "f32[2x3x{N}x{N}, nhwc] -> conv2d(8, kernel=5, stride=2, padding=2) -> bias -> relu",
    "f32[{N}x3x9x9] -> conv2d(8, kernel=3, padding=1)",
    "f32[1x{N}x9x9] -> conv2d({N}, kernel=3, padding=1)",
    "f32[1x1x1x1] -> conv2d(1, kernel=1, padding=(0, {N}))",
    "f32[1x3x9x9] -> conv2d(8, kernel=(3, 1), dilation=({N}, 1), padding=({N}, 0))",
    "f32[2x16x{N}x9] -> conv2d(8, kernel=1) -> relu",
    "f32[1x16x{N}, nwc] -> conv1d(16, kernel=5, padding=2, groups=16)",
    "f32[1x16x9x9] -> conv2d(16, kernel=5, padding=(0, {N}), groups=16)",
    "f32[1x16x9x9, nhwc] -> conv2d(16, kernel=5, padding=(0, {N}), groups=16)",
    "f32[1x16x9x{N}] -> conv2d(16, kernel=3, dilation=(1, {N}), padding=(1, {N}), groups=16)",
    "f32[1x16x9x{N}, nhwc] -> conv2d(16, kernel=3, dilation=(1, {N}), padding=(1, {N}), groups=16)",
    "f32[1x16x{N}x{N}] -> conv2d(16, kernel=5, padding=2, groups=4)",
    "f32[1x4x9x{N}] -> conv2d(4, kernel=(1, {N}), groups=4)",
    "f32[1x{N}x1, bcs of bsc] -> matmul(2)",
    "f16[{N}x{N}] -> matmul({N}) -> bias -> relu",
    "f32[{N}x5x3x3] -> batch_norm_training -> relu",
    "f32[5x3x{N}x{N}, nhwc] -> batch_norm_training -> relu",
    "f32[5x3x5x{N}] -> batch_norm_training(per_activation)",
    "f32[{N}x3x5x5, nhwc] -> batch_norm_training(per_activation) -> relu",
    "f32[3x{N}x3x3] -> bias -> gelu",
)


class _TooManyError(Exception):
    pass


def lines_executed(work: Callable[[], Any], most: int) -> int:
    """How many lines of Python `work` executes; it ends there when they are more than `most`."""
    count = 0

    def each(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        count += event == "line"
        if count > most:
            raise _TooManyError
        return each

    before = sys.gettrace()
    sys.settrace(each)
    try:
        work()
    except _TooManyError:
        pass
    finally:
        sys.settrace(before)
    return count


def chosen_and_written(text: str, target: str) -> None:
    """Decides, and emits a candidate of each template."""
    records = decide(text, target, tuned=False)
    for each in {type(each): each for each in records.choice.candidates}.values():
        each.emit(records.kernel, records.target)


@pytest.mark.parametrize("target", ["cpu:avx2", "triton:sm_90"])
@pytest.mark.parametrize("form", FORMS)
def test_no_extent_makes_choosing_dearer(form: str, target: str) -> None:
    small, large = (partial(chosen_and_written, form.format(N=size), target) for size in (SMALL, LARGE))
    most = MORE * lines_executed(small, sys.maxsize)
    assert lines_executed(large, most) <= most


def test_the_largest_extents_are_chosen_for_at_once() -> None:
    for plan in (
        "f32[1x2147483647x1, bcs of bsc] -> matmul(2)",
        "f32[1x3x2147483647x1] -> conv2d(8, kernel=3, padding=1)",
        "f32[1x16x2147483647, nwc] -> conv1d(16, kernel=5, padding=2, groups=16)",
    ):
        assert lines_executed(partial(chosen_and_written, plan, "cpu:avx2"), 1_000_000) < 1_000_000


@pytest.mark.parametrize(
    "form",
    [
        "f32[1x8x14x14] -> conv2d(8, kernel=1) -> {}",
        "f32[1x8x14x14, nhwc] -> conv2d(8, kernel=3, padding=1) -> {}",
        "f32[1x8x14x14] -> {} -> conv2d(8, kernel=3, padding=1, groups=8)",
        "f32[4x8x14x14] -> batch_norm_training -> {}",
        "f32[4x8] -> {}",
    ],
)
def test_more_operators_add_each_its_own_length(form: str) -> None:
    """Long stages are written once: an operator more adds about as much text as it has by itself."""

    def length(count: int) -> int:
        return len(decide(form.format(" -> ".join(["gelu"] * count)), "cpu:avx512").source.text)

    alone = len(decide("f32[4x1] -> gelu", "cpu:avx512").source.text)
    assert length(60) - length(40) < 20 * alone
