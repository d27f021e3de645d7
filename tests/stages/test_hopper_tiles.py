"""Boxes, tensor maps and shared memory of the kernel for Hopper: pure functions of a kernel and a choice."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest

from fuseplan.backends.triton.templates.hopper import SHARED_BYTES, Hopper, choices
from fuseplan.backends.triton.templates.hopper_schedule import Knobs, Schedule
from fuseplan.backends.triton.templates.hopper_tiles import Geometry
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import match
from fuseplan.kernels.target import parse_target
from fuseplan.plans.plan import FusionPlan

TARGET = parse_target("triton:sm_90")


def lowered(text: str) -> Kernel:
    return lower(match(FusionPlan.parse(text)))


@pytest.mark.parametrize(
    ("size", "rows", "box"),
    [(28, 128, (8, 4, 4)), (14, 128, (32, 2, 2)), (7, 64, (64, 1, 1)), (56, 128, (2, 8, 8))],
)
def test_boxes_cover_dst_with_few(size: int, rows: int, box: tuple[int, ...]) -> None:
    kernel = lowered(f"f16[64x64x{size}x{size}, nhwc] -> conv2d(64, kernel=3, padding=1)")
    geometry = Geometry(kernel)
    best = geometry.boxes(rows)[0]
    assert prod(best) == rows
    assert prod(geometry.counts(best)) == prod(geometry.counts(box)) == 64 * size * size // rows


@pytest.mark.parametrize("text", ["f16[7x1x3x8] -> matmul(33, batched=True)", "bf16[40x64] -> matmul(300)"])
def test_each_group_of_a_shared_tile_has_rows(text: str) -> None:
    """Products of a group without any are dropped, and the code fails its check."""
    found = list(Hopper.candidates(lowered(text), TARGET, "default"))
    assert found
    assert not any(each.together and not each.swapped for each in found if isinstance(each, Hopper))


def test_positions_that_lie_evenly_are_one_axis() -> None:
    even = Geometry(lowered("f16[2x16x6x6, strides=1152:1:192:32] -> conv2d(16, kernel=1)"))
    assert even.src_map((64,), 16).strides == (32, 1)
    assert even.src_map((64,), 16).shape == (72, 16)
    odd = Geometry(lowered("f16[2x16x6x6, strides=1160:1:192:32] -> conv2d(16, kernel=1)"))
    assert [axis.letter for axis in odd.axes] == ["n", "y", "x"]
    one_image = Geometry(lowered("f16[1x16x6x6, nhwc] -> conv2d(16, kernel=1)"))
    assert one_image.src_map((64,), 16).strides == (16, 1)


def test_a_stride_steps_over_positions() -> None:
    geometry = Geometry(lowered("f16[2x16x9x9, nhwc] -> conv2d(16, kernel=3, stride=(1, 2))"))
    found = geometry.src_map((1, 8, 8), 16)
    assert (found.shape, found.steps, found.box) == ((2, 9, 9, 16), (1, 1, 2, 1), (1, 8, 8, 16))
    assert geometry.dst_map((1, 8, 8), 16).steps == (1, 1, 1, 1)


def test_reaching_puts_lines_first() -> None:
    kernel = lowered("f16[2x16x9x9, nhwc] -> conv2d(16, kernel=3, padding=1, dilation=2)")
    geometry = Geometry(kernel, reaching=True)
    assert [axis.letter for axis in geometry.axes] == ["y", "n", "x"]
    schedule = Schedule(Knobs((8, 1, 8), 32, 16, 2, reaching=True), geometry)
    assert (schedule.lines, schedule.reach, schedule.more, schedule.span) == (3, 4, 4, 12)
    assert schedule.blocks == 3
    assert schedule.src_bytes == 12 * 8 * 16 * 2
    assert not Geometry(lowered("f16[2x16x9x9, nhwc] -> conv2d(16, kernel=3, stride=2)")).can_reach


def test_groups_share_a_tile() -> None:
    geometry = Geometry(lowered("f16[64x64x28x28, nhwc] -> conv2d(256, kernel=3, padding=1)"))
    rows = Schedule(Knobs((16, 4, 4), 64, 64, 2, together=True), geometry)
    assert (rows.own, rows.sum_shape) == ((8, 4, 4), (128, 64))
    assert list(map(str, rows.first)) == ["n + group * 8", "y", "x", "feature"]
    features = Schedule(Knobs((16, 4, 2), 256, 64, 2, together=True, swapped=True), geometry)
    assert features.sum_shape == (128, 128)
    assert list(map(str, features.first)) == ["n", "y", "x", "group * 128"]
    assert features.part == (8, 4, 2)
    assert [part[0] for part in features.parts] == [0, 8]


def test_a_tile_is_made_of_powers_of_two() -> None:
    geometry = Geometry(lowered("bf16[924x3456] -> matmul(4096) -> bias"))
    rows = Schedule(Knobs((192,), 160, 64, 2, groups=3, together=True), geometry)
    assert (rows.own, [width for _, _, width in rows.sums], rows.part_width) == ((64,), [128, 32], 32)
    assert (rows.pieces, rows.weight_pieces) == (3, 5)
    boxes = [slot.map.box for slot in rows.tensors(()) if slot.map]
    assert boxes == [(64, 64), (64, 32), (64, 32)]
    features = Schedule(Knobs((192,), 256, 64, 2, together=True, swapped=True), geometry)
    assert features.sum_shape == (128, 192)
    assert features.is_crowded
    assert features.part == (32,)


@pytest.mark.parametrize(
    "text",
    [
        "f16[64x64x55x55, nhwc] -> conv2d(64, kernel=3, padding=1) -> bias -> add -> relu",
        "bf16[64x4096] -> matmul(4096)",
        "bf16[2x64x8x8, nhwc] -> conv2d(64, kernel=3, padding=1, groups=2)",
    ],
)
def test_every_choice_fits_a_processor(text: str) -> None:
    kernel = lowered(text)
    found = dict(choices(kernel, TARGET))
    assert found
    for knobs in found:
        schedule = Hopper(**vars(knobs)).schedule(kernel)
        assert schedule.shared_bytes * knobs.programs <= SHARED_BYTES
        rows, columns = schedule.sum_shape
        assert rows in (64, 128)
        assert rows * columns // 128 <= 192  # accumulators a thread
        assert all(size & (size - 1) == 0 for size in (knobs.depth, *schedule.part, schedule.part_columns))
        assert not (schedule.is_crowded and (knobs.spread or schedule.geometry.scatters))
        assert 1 <= schedule.grid(TARGET.processors) <= TARGET.processors * knobs.programs


def test_a_held_weight_keeps_a_program_at_its_features() -> None:
    kernel = lowered("f16[64x64x55x55, nhwc] -> conv2d(256, kernel=1)")
    held = [Schedule(knobs, Geometry(kernel)) for knobs, _ in choices(kernel, TARGET) if knobs.resident]
    assert held
    assert all(schedule.grid(TARGET.processors) % schedule.across == 0 for schedule in held)


def test_the_cost_falls_with_the_work() -> None:
    small, large = (lowered(f"f16[{rows}x512] -> matmul(512)") for rows in (4096, 65536))
    choice = Hopper((128,), 128, 64, 4)
    assert choice.seconds(small, TARGET) < choice.seconds(large, TARGET)
    more = replace(TARGET, processors=264)
    assert choice.seconds(large, more) < choice.seconds(large, TARGET)


def test_rows_of_a_gated_weight_begin_with_a_sector() -> None:
    kernel = lowered("bf16[256x1000] -> linear(512) -> glu(silu, gate=first)")
    choice = Hopper((128,), 256, 64, 4, together=True)
    assert Geometry(kernel).weight_map(256, 64).strides == (1008, 1008, 1)
    assert choice.packed_weight(kernel).extents == (512, 1, 1008)
    plain = lowered("bf16[256x1000] -> linear(512)")  # read as it is, where nothing has to be put in order
    assert choice.packed_weight(plain).extents == (512, 1, 1000)


def test_tiles_are_spread_where_programs_would_be_idle() -> None:
    def found(text: str) -> set[bool]:
        return {knobs.spread for knobs, _ in choices(lowered(text), TARGET)}

    assert found("bf16[1591x3880] -> matmul(4096)") == {False, True}
    assert found("bf16[1408x4096] -> matmul(3072)") == {
        False,
        True,
    }  # 132 tiles of 128 x 256, but not of others
    assert found("bf16[1591x256] -> matmul(4096)") == {False}  # too few blocks
    assert found("bf16[*x3880] -> matmul(4096)") == {False}  # any number of tiles
    assert found("bf16[65537x16384] -> matmul(65528)") == {False}  # blocks past 32 bits
    kernel = lowered("bf16[1408x4096] -> matmul(3072)")
    assert not any(
        knobs.spread for knobs, _ in choices(kernel, TARGET) if (knobs.box, knobs.columns) == ((128,), 256)
    )


@pytest.mark.parametrize(
    "text",
    [
        "bf16[2470x9256] -> linear(8192) -> bias -> gelu",
        "bf16[791x4099] -> linear(1304) -> glu(silu, gate=first)",
        "f16[32x64x56x56, nhwc] -> conv2d(64, kernel=3, padding=1) -> bias -> relu",
        "bf16[2131x2904] -> linear(32000) -> cross_entropy",
    ],
)
def test_a_varied_schedule_is_estimated_as_one_that_is_made_anew(text: str) -> None:
    kernel = lowered(text)
    found = list(Hopper.estimated(kernel, TARGET, "default"))
    assert len({each.text for _, each in found}) == len(found)
    assert [estimate for estimate, _ in found] == [each.seconds(kernel, TARGET) for _, each in found]


LINES = (
    ("bf16[440x7144] -> linear(4096)", ((True, False), (True, True)), (4096, 1, 7232)),
    ("bf16[440x7168] -> linear(4096)", ((False, False),), (4096, 1, 7168)),
    ("bf16[440x7152] -> linear(4096)", ((False, False),), (4096, 1, 7152)),
    ("bf16[440x7143] -> linear(4096)", ((True, True),), (4096, 1, 7232)),
    ("bf16[440x4096] -> matmul(4104)", ((True, False),), (4096, 4160)),
    ("bf16[440x3080] -> linear(3008) -> glu(silu, gate=first)", ((True, False), (True, True)), None),
    ("f16[3x440x3080] -> matmul(520, batched=True)", ((False, False),), None),
)


@pytest.mark.parametrize(("text", "packings", "extents"), LINES)
def test_rows_that_begin_inside_of_sectors_are_packed(
    text: str, packings: tuple[tuple[bool, bool], ...], extents: tuple[int, ...] | None
) -> None:
    kernel = lowered(text)
    found = {(knobs.whole_lines, knobs.padded): knobs for knobs, _ in choices(kernel, TARGET)}
    assert set(found) == set(Geometry(kernel).packings) == set(packings)
    chosen = Hopper(**vars(found[packings[-1]]))
    assert extents is None or chosen.packed_weight(kernel).extents == extents


def test_dst_leaves_from_where_its_residual_came() -> None:
    kernel = lowered("bf16[4096x8192] -> linear(2048) -> add")
    knobs = Knobs((128,), 256, 64, 3, together=True)
    assert Schedule(knobs, Geometry(kernel)).shared_bytes <= SHARED_BYTES
    kept = lowered("bf16[4096x8192] -> linear(2048) -> add -> save(sum) -> relu")
    assert Schedule(knobs, Geometry(kept)).shared_bytes > SHARED_BYTES
