"""Statistics over any axes on GPUs: the text in Triton's interpreter, and which tiles are tried."""

from __future__ import annotations

import pytest

from fuseplan.backends.lattice import Lattice
from fuseplan.backends.triton.templates.reduction import HELD, GpuReduction
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import match
from fuseplan.kernels.target import parse_target
from fuseplan.plans.plan import FusionPlan
from interpreted import assert_interpreted

# A tile with all elements, blocks of some, and programs that meet.
INTERPRETED = (
    ("f32[33x40] -> scale -> softmax", GpuReduction(4, 64, 1, 4)),
    ("f32[9x40] -> log_softmax", GpuReduction(4, 16, 1, 4)),
    ("f32[3x100] -> softmax -> bias", GpuReduction(2, 32, 2, 4)),
    ("f32[3x100] -> softmax", GpuReduction(1, 32, 4, 4)),
    ("f16[2x5x3x7, nhwc] -> relu -> mean(hw) -> bias", GpuReduction(8, 8, 2, 4)),
    ("f32[2x5x3x7] -> sum -> tanh", GpuReduction(1, 64, 1, 4)),
    ("f32[1x1] -> amax", GpuReduction(1, 1, 1, 4)),
    ("f64[3x4x5, cbs of bsc] -> add -> softmax(bs) -> add", GpuReduction(4, 16, 1, 4)),
    ("f32[2x3x7] -> relu -> save(a) -> softmax(1) -> save(b) -> add(other=a)", GpuReduction(8, 2, 2, 4)),
    ("f32[2x5x3x7, nhwc] -> relu -> save(a) -> mean(hw) -> save(b) -> bias", GpuReduction(2, 8, 1, 4)),
    ("f32[2x3x5x7, strides=1:1000:100:10 of bhsc] -> layer_norm -> relu", GpuReduction(4, 4, 2, 4)),
    ("bf16[2x3x5x7, bhsc] -> bias -> amax(h) -> add", GpuReduction(4, 4, 1, 4)),
    ("f32[9x40] -> var(1)", GpuReduction(4, 16, 2, 4)),
    ("f32[9x40] -> logsumexp(1)", GpuReduction(4, 16, 1, 4)),
    ("f32[9x40] -> amin(1)", GpuReduction(4, 64, 1, 4)),
    ("f32[3x30] -> prod(1)", GpuReduction(1, 8, 4, 4)),
    ("f32[9x40] -> argmax(1)", GpuReduction(4, 64, 1, 4)),
    ("f32[2x3x5x7, bhsc] -> argmax((1, 3))", GpuReduction(4, 8, 1, 4)),
    ("f32[4x6x5x7, nhwc] -> argmax((0, -1), keepdim=True)", GpuReduction(8, 16, 1, 4)),
    ("f32[3x100] -> argmax(1)", GpuReduction(1, 32, 4, 4)),
    ("f64[3x4x5, cbs of bsc] -> argmax(bs, keepdim=True)", GpuReduction(2, 8, 1, 4)),
    ("f16[2x5x3x7, nhwc] -> argmax(hw) -> cast(f32)", GpuReduction(8, 8, 2, 4)),
    ("f32[3x300] -> softmax -> bias", GpuReduction(2, 64, 1, 4, lanes=True)),
    ("f16[5x301] -> add -> save(a) -> layer_norm", GpuReduction(1, 64, 1, 4, lanes=True)),
    ("f32[3x300] -> layer_norm -> gelu", GpuReduction(2, 32, 2, 4, lanes=True)),
    ("f32[9x70] -> scale -> rms_norm", GpuReduction(4, 32, 1, 4, lanes=True)),
    ("f16[70x40] -> sum(0)", GpuReduction(32, 8, 4, 4, lanes=True)),
    ("f32[3x100] -> argmax(1)", GpuReduction(1, 16, 2, 4, lanes=True)),
    ("bf16[2x6x5x40, bhsd] -> rms_norm -> rotary", GpuReduction(4, 16, 1, 4, lanes=True)),
    ("f32[2x6x5x7, nhwc] -> group_norm(2) -> silu", GpuReduction(2, 16, 1, 4, lanes=True)),
    ("f16[9x40] -> scale -> softmax -> mul", GpuReduction(4, 64, 1, 4)),
    ("bf16[9x64] -> log_softmax -> save(a) -> tanh", GpuReduction(1, 64, 1, 4)),
)
# Programs that go through all tiles, of which each has several.
SHARED = (
    ("f32[517x60] -> layer_norm", GpuReduction(2, 64, 1, 4, resident=1, ahead=3)),
    ("f32[300x60] -> layer_norm_backward", GpuReduction(1, 64, 1, 4, resident=2, ahead=3)),
    ("f16[200x64] -> rms_norm -> dynamic_quantize(f8e4m3)", GpuReduction(1, 64, 1, 1, resident=1, ahead=4)),
    ("f16[140x256] -> dynamic_quantize(f8e4m3, each=block)", GpuReduction(2, 128, 1, 4, resident=1, ahead=3)),
    (
        "f32[140x256] -> layer_norm -> dynamic_quantize(i8, each=block)",
        GpuReduction(1, 256, 1, 4, resident=1, ahead=3),
    ),
    ("f16[4x50x3x32, bshd] -> rms_norm -> rotary", GpuReduction(4, 16, 1, 1, resident=1, ahead=3)),
    ("f32[267x40] -> add -> save(sum) -> layer_norm", GpuReduction(2, 64, 1, 1, resident=1, ahead=3)),
    ("f32[137x30] -> cross_entropy", GpuReduction(1, 32, 1, 1, resident=1, ahead=3)),
    ("f64[140x20] -> softmax_backward", GpuReduction(1, 32, 1, 1, resident=1, ahead=3)),
    ("bf16[140x60] -> softmax", GpuReduction(1, 64, 1, 1, resident=1, ahead=3)),
    ("f32[7x33x40, nwc] -> sum(1, keepdim=True) -> bias", GpuReduction(1, 64, 1, 1, resident=1, ahead=3)),
)


@pytest.mark.parametrize(("plan", "template"), INTERPRETED + SHARED)
def test_a_gpus_text_in_the_interpreter(plan: str, template: GpuReduction) -> None:
    assert_interpreted(plan, template, slack=64)


@pytest.mark.parametrize(
    "plan", ["f16[4096x768] -> softmax", "f32[8x100000] -> softmax", "f32[64x32x56x56, nhwc] -> mean(hw)"]
)
def test_candidates_fit_the_gpu(plan: str) -> None:
    """Programs that meet are all there at once, and a tile has no more elements than its registers hold."""
    kernel, target = lower(match(FusionPlan.parse(plan))), parse_target("triton:sm_90")
    found = list(GpuReduction.candidates(kernel, target, "default"))
    assert found == sorted(found, key=lambda each: each.seconds(kernel, target))
    for each in found:
        assert isinstance(each, GpuReduction)
        source, threads = each.emit(kernel, target), 32 * each.warps
        most = dict(source.options).get("maxnreg", min(255, 65536 // threads))
        room = min(1536, 65536 // most) // threads * target.processors
        assert each.programs == 1 or source.grid[0] <= room
        assert each.cells * each.elements <= max(HELD) * 32 * each.warps
        assert not each.lanes or each.elements * each.programs < Lattice(kernel).element_count


def test_programs_that_never_meet_have_all_registers() -> None:
    """Asked for those of 154 programs of a processor, ptxas refused to compile."""
    kernel = lower(match(FusionPlan.parse("bf16[547x75408] -> cross_entropy_backward")))
    target = parse_target("triton:sm_90")
    apart = [
        each for each in GpuReduction.candidates(kernel, target, "default") if each.knobs["programs"] != 1
    ]
    assert apart
    assert not any("maxnreg" in dict(each.emit(kernel, target).options) for each in apart)
