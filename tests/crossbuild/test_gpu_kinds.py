"""Every GPU template's code for an NVIDIA and an AMD GPU, compiled here and judged, whatever machine this is.

`fuseplan crossbuild SUITE` does the same for whole suites and more candidates.
"""

import json
import sys
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.crossbuild import Allowance, Build, allowances, builds, crossbuild, judged
from benchmarks.gate import faults
from fuseplan.backends.triton import TRITON, sass
from fuseplan.backends.triton.compiler import PACKAGE, compile_source
from fuseplan.backends.triton.templates.attention import GpuAttention
from fuseplan.backends.triton.templates.hopper_attention import HopperAttention
from fuseplan.backends.triton.templates.hopper_attention_gradient import HopperAttentionGradient
from fuseplan.backends.triton.templates.order import TEMPLATES
from fuseplan.backends.triton.toolchain import types_of
from fuseplan.cli.commands import fuseplan
from fuseplan.errors import ArgumentError
from fuseplan.kernels.emit import Slot, Source, TensorMap
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import match
from fuseplan.kernels.target import parse_target
from fuseplan.plans.plan import FusionPlan
from toy_templates import ToyProduct

KINDS = ("triton:sm_90", "triton:gfx942")
MOST = 60  # compiles, each up to four seconds of one core
ROOT = Path(__file__).resolve().parents[2]
PLANS = (
    "f16[8x64x56x56, nhwc] -> batch_norm -> relu",
    "bf16[8x64x28x28] -> batch_norm(per_activation) -> add -> gelu -> dropout",
    "f64[2x19x7x9, nhwc] -> batch_norm -> elu",
    "f16[16x256x28x28, nhwc] -> conv2d(512, kernel=1) -> bias -> relu",
    "f16[16x64x28x28, nhwc] -> conv2d(64, kernel=3, padding=1) -> batch_norm -> add -> relu",
    "f16[16x64x28x28] -> conv2d(64, kernel=3, padding=1) -> bias -> relu",
    "f32[8x64x28x28, nhwc] -> conv2d(64, kernel=3, padding=1) -> bias -> gelu",
    "f16[8x3x112x112, nhwc] -> conv2d(64, kernel=7, stride=2, padding=3) -> bias -> relu",
    "f16[8x96x28x28, nhwc] -> conv2d(96, kernel=3, padding=1, groups=96) -> bias -> hardswish",
    "bf16[16384x1024] -> matmul(4096) -> bias -> gelu -> dropout",
    "bf16[4096x1024] -> linear(5632) -> bias -> glu(silu)",
    "bf16[4096x1024] -> linear(32000) -> cross_entropy",
    "i8[4096x1024] -> linear(2048) -> dequantize(f16) -> bias",
    "f32[512x1024] -> matmul(256) -> bias -> save(pre) -> gelu -> mul(pre)",
    "f16[8x64x28x28, nhwc] -> relu -> conv2d_weight_gradient(128, kernel=3, stride=2, padding=1)",
    "bf16[32x19x33] -> conv1d(37, kernel=5, stride=2) -> tanh",
    "f32[32x64x64x64] -> conv_transpose2d(64, kernel=4, stride=2, padding=1, precision=tf32) -> bias -> relu",
    "f16[8x64x28x28, nhwc] -> conv_transpose2d(64, kernel=3, stride=2, padding=1) -> bias -> relu",
    "f16[64x128x28x28, nhwc] -> batch_norm_training(running=True) -> relu",
    "f32[64x256x14x14] -> batch_norm_backward(relu, statistics=recomputed)",
    "bf16[64x64x56x56] -> batch_norm_backward(gelu)",
    "f32[64x37x9x9, nhwc] -> batch_norm_training(mode=per_activation)",
    "f16[2048x768] -> scale -> softmax",
    "f32[8x65536] -> log_softmax",
    "f16[1x16777225] -> argmax(1)",
    "bf16[64x256x28x28, nhwc] -> relu -> mean(hw) -> bias",
    "bf16[16384x4096] -> rms_norm -> dynamic_quantize(f8e4m3)",
    "f32[16384x4096] -> relu -> cumsum",
    "f32[*x512x256] -> scale -> cumsum(1, exclusive=True, reverse=True) -> add",
    "bf16[2x16x1024x128, bhsd] -> attention(is_causal=True)",
    "bf16[2x16x1024x128, bhsd] -> attention_gradient(is_causal=True, by=key)",
    "f32[2x16x1024x128, bhsd] -> attention(is_causal=True)",
    "bf16[4096x65536] -> rms_norm",
    "f16[*x64x56x56, nhwc] -> batch_norm -> relu",
    "f16[*x64x7x7] -> batch_norm -> relu",
    "bf16[*x512x768] -> linear(3072) -> bias -> gelu",
    "f16[*x768] -> add -> save(sum) -> layer_norm",
    "f32[*x64x28x28, nhwc] -> conv2d(64, kernel=3, padding=1, groups=64) -> bias -> relu",
    "f16[*x64x28x28, nhwc] -> conv2d(64, kernel=3, padding=1) -> bias -> relu",
)
NVIDIA, AMD = (list(builds(PLANS, [parse_target(kind)])) for kind in KINDS)
# Nothing launches code for AMD's GPUs yet: its first plan of each template.
CASES = [*NVIDIA, *{each.template.name: each for each in reversed(AMD)}.values()]
ALLOWED = allowances(ROOT / "benchmarks" / "allowed_spills.toml")


compiled = cache(compile_source)  # some tests look at one kernel


def name_of(build: Build) -> str:
    return f"{build.target.name}-{build.template.name}-{build.plan}"


def kind_of(build: Build) -> str:
    """The target, template and dtype: continuous integration compiles a build of each one."""
    return sys.intern(f"{build.target.name}-{build.template.name}-{build.plan.partition('[')[0]}")


@pytest.mark.parametrize("chip", ["sm_80", "sm_89", "sm_100", "sm_120", "gfx950"])
def test_products_compile_for_other_kinds(chip: str) -> None:
    plan = "f16[16x64x28x28, nhwc] -> conv2d(64, kernel=3, padding=1) -> bias -> relu"
    first = next(builds([plan], [parse_target(f"triton:{chip}")]))
    used = compile_source(first.job.source, first.job.types, first.job.target).resources
    assert used["serialized"] == 0


@pytest.mark.part(1.5)
@pytest.mark.parametrize(
    ("kind", "build"), [pytest.param(kind_of(each), each, id=name_of(each)) for each in CASES]
)
def test_a_kernel_compiles_and_is_sound(kind: str, build: Build) -> None:
    job = build.job
    artifact = compiled(job.source, job.types, job.target)
    built = judged(build, job, artifact.pack(), ALLOWED)
    assert not built.faults, f"{build.template.text}\n{job.source.text}\n{built.resources}"


def test_exponentials_run_beside_the_product_with_the_values() -> None:
    """ptxas moves waits for products up, but to the end of a block of instructions at most."""
    plan = "bf16[2x16x1024x128, bhsd] -> attention"
    job = next(builds([plan], [parse_target("triton:sm_90")], only=HopperAttention.name)).job
    code = sass.disassembled(compiled(job.source, job.types, job.target).binary, PACKAGE)
    lines = [line.text for line in code.lines]
    waits = [place for place, line in enumerate(lines) if sass.WAIT.match(line)]
    beside = [lines[first:last] for first, last in pairwise(waits) if lines[first].endswith("0x1")]
    assert len(beside) == 2  # groups of warps
    for each in beside:
        assert sum("MUFU.EX2" in line for line in each) >= 64


@pytest.mark.parametrize("by", ["query", "key"])
def test_exponentials_run_beside_the_products_of_gradients(by: str) -> None:
    """In the loop, behind the wait for the scores, and in front of the next one; nothing is spilled there."""
    plan = f"bf16[2x16x1024x128, bhsd] -> attention_gradient(is_causal=True, by={by})"
    job = next(builds([plan], [parse_target("triton:sm_90")], only=HopperAttentionGradient.name)).job
    code = sass.disassembled(compiled(job.source, job.types, job.target).binary, PACKAGE)
    lines = [line.text for line in code.lines]
    waits = [place for place, line in enumerate(lines) if sass.WAIT.match(line)]
    beside = [lines[first:last] for first, last in pairwise(waits) if lines[first].endswith("0x2")]
    assert len(beside) == 2  # groups of warps
    for each in beside:
        assert sum("MUFU.EX2" in line for line in each) == 32
        assert not any(line.startswith(("STL", "LDL")) for line in each)


@pytest.mark.parametrize("size", [64, 128])
def test_no_three_products_of_attention_spill(size: int) -> None:
    plan = f"f32[2x16x1024x{size}, bhsd] -> attention(keys=1000, bias_axes=hst)"
    kernel, target = lower(match(FusionPlan.parse(plan))), parse_target(KINDS[0])
    listed = list(GpuAttention.candidates(kernel, target, "default"))
    three = [each for each in listed if each.knobs["arithmetic"] == "tf32x3"]
    assert three
    for each in three:
        source = each.emit(kernel, target)
        types = types_of(source, kernel, each, target)
        used = compiled(source, types, target).resources
        assert not used["spill_bytes"]
        assert not used["serialized"]


def test_the_set_is_bounded() -> None:
    assert len(CASES) <= MOST


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: template.name)
def test_every_template_is_built(template: type) -> None:
    assert any(type(build.template) is template for build in CASES)


def test_the_same_choice_gives_the_same_text() -> None:
    for build in CASES:
        assert build.job == build.job


def test_faults() -> None:
    target = parse_target("triton:sm_90")
    mapped = TensorMap("f16", (64, 64), (64, 1), (64, 64), (1, 1))
    source = Source("tl.dot(a, b)", "k", (Slot("src", map=mapped),), language="triton")
    sound = {
        "spill_bytes": 0, "serialized": 0, "shared_bytes": 0, "programs": 1, "tma_loads": 1, "wgmma": 4,
    }  # fmt: skip
    types = ("tensordesc<fp16[64, 64]>",)
    assert list(faults(source, types, sound, target)) == []
    wrong = {
        "spill_bytes": 4, "serialized": 1, "shared_bytes": 1 << 20, "programs": 0, "tma_loads": 0, "wgmma": 0,
    }  # fmt: skip
    for name, value in wrong.items():
        assert len(list(faults(source, types, sound | {name: value}, target))) == 1, name
    meeting = replace(source, options=(("cooperative", 1),), grid=(132, 1, 1))
    assert list(faults(meeting, types, sound, target)) == []
    (said,) = faults(replace(meeting, grid=(133, 1, 1)), types, sound, target)
    assert said == "its 133 programs wait for each other, and 132 can run at once"
    assert not list(faults(source, types, sound | {"spill_bytes": 4}, target, allowed_spill=4))


def test_accepted_spills_give_their_reason(tmp_path: Path) -> None:
    entry = '[[allowed]]\ntriton = ["3.6"]\ntarget = "triton:sm_90"\ntemplate = "t"\nplan = "p"\nbytes = 8\n'
    entry += 'reason = "{}"\n'
    place = tmp_path / "allowed.toml"
    place.write_text(entry.format("outside of the loop"))
    assert allowances(place) == (Allowance(("3.6",), "triton:sm_90", "t", "p", 8, "outside of the loop"),)
    place.write_text(entry.format(" "))
    with pytest.raises(ArgumentError, match="gives no reason"):
        allowances(place)
    with pytest.raises(ArgumentError, match="not a list of accepted spills"):
        allowances(tmp_path / "none.toml")


def test_builds_run_in_other_processes_and_what_fails_is_a_fault() -> None:
    plan = "f16[8x256x16x16, nhwc] -> conv2d(256, kernel=1)"
    kernel = lower(match(FusionPlan.parse(plan)))
    template = ToyProduct(rows=64, columns=64, depth=64)
    asked = [Build(plan, parse_target(kind), template, kernel) for kind in KINDS]
    good, bad = crossbuild(asked, workers=1)
    assert not good.faults
    assert good.resources["wgmma"] > 0
    assert good.to_json()["faults"] == []
    assert "tensor maps" in bad.faults[0]


def test_the_command_tells_what_each_kernel_uses_and_fails_on_faults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TRITON, "templates", (ToyProduct,))
    suite = tmp_path / "one.toml"
    suite.write_text(
        'title = "one"\n[[case]]\nname = "a"\ngroup = "b"\nmodel = "c"\n'
        'plan = "f16[8x256x16x16, nhwc] -> conv2d(256, kernel=1)"\n'
    )
    good = CliRunner().invoke(fuseplan, ["crossbuild", str(suite), "--target", "triton:sm_90", "--jobs", "1"])
    assert good.exit_code == 0, good.output
    assert "wgmma" in good.stdout
    assert "1 kernel, 0 unsound" in good.stdout
    bad = CliRunner().invoke(fuseplan, ["crossbuild", str(suite), "--jobs", "1", "--json"])
    assert bad.exit_code == 1
    told = [json.loads(line) for line in bad.stdout.splitlines()]
    assert [bool(each["faults"]) for each in told] == [False, True]
