"""Every CPU template's code for every kind of CPU, compiled here by LLVM, whatever processor this is."""

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest

from fuseplan.backends.cpu import toolchain
from fuseplan.backends.cpu.templates.order import TEMPLATES
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import match
from fuseplan.kernels.target import KINDS, Target
from fuseplan.kernels.template import Template
from fuseplan.messages.reasons import first_refusal
from fuseplan.plans.plan import FusionPlan

TRIPLES = {
    kind: toolchain.triple_of(KINDS[kind]) for kind in ("cpu:avx2", "cpu:avx512", "cpu:neon", "cpu:amx")
}
# A register of the widest vectors each kind has, as its assembly names it.
REGISTERS = {
    "cpu:avx2": r"%ymm\d",
    "cpu:avx512": r"%zmm\d",
    "cpu:neon": r"\bv\d+\.4s|\bq\d+",
    "cpu:amx": r"%zmm\d",
}
VECTORS = ("cpu:avx2", "cpu:avx512", "cpu:neon")
PLANS = (
    "f32[1x64x28x28, nhwc] -> conv2d(64, kernel=3, padding=1) -> batch_norm -> add -> relu",
    "f32[2x64x14x14] -> conv2d(64, kernel=3, padding=1) -> bias -> silu",
    "f32[1x64x28x28] -> conv2d(64, kernel=1) -> bias -> gelu",
    "f32[1x32x28x28, nhwc] -> conv2d(32, kernel=3, padding=1, groups=32) -> bias -> hardswish",
    "f32[1x32x28x28] -> conv2d(32, kernel=3, stride=2, padding=1, groups=32) -> bias -> relu",
    "f32[1x64x14x14, nhwc] -> conv2d(64, kernel=3, padding=1, groups=32) -> bias -> relu",
    "f32[1x64x14x14] -> conv2d(64, kernel=3, padding=1, groups=16) -> bias -> relu",
    "f32[1x24x14x14, nhwc] -> conv2d(32, kernel=5, padding=2) -> scale -> sigmoid",
    "f32[1x24x14x14] -> conv_transpose2d(32, kernel=3, stride=2, padding=1) -> bias -> relu",
    "bf16[1x19x9x11, nhwc] -> relu -> conv2d(37, kernel=(3, 5), stride=2) -> tanh",
    "f32[128x256] -> matmul(512, transposed=True) -> bias -> gelu",
    "bf16[29x64] -> linear(1000) -> bias -> cross_entropy(label_smoothing=0.1)",
    "f32[1x2x40x32, bhsd] -> attention(is_causal=True)",
    "f16[1x2x40x24, bhsd] -> attention_gradient(is_causal=True, key_heads=1, by=key)",
    "f32[4x50x32, bcs of bsc] -> matmul(48, batched=True) -> relu",
    "f16[2x9x33] -> batch_norm -> mish",
    "f64[2x19x7x9, nhwc] -> batch_norm -> elu",
    "f32[2x64x31x33, nhwc] -> batch_norm(per_activation) -> power(gamma=2.5)",
    "f32[8x64x28x28] -> bias -> batch_norm_training(running=True) -> relu",
    "f16[8x64x28x28, nhwc] -> batch_norm_training -> gelu",
    "f32[16x24x7x7] -> batch_norm_backward(relu)",
    "bf16[16x24x7x7] -> batch_norm_backward(tanh, mode=per_activation, statistics=recomputed)",
    "bf16[37x50] -> linear(70) -> bias -> glu(silu)",
    "i8[37x50] -> linear(70)",
    "f32[7x40] -> relu -> softmax",
    "f32[2x32x14x14, nhwc] -> conv2d_weight_gradient(32, kernel=3, padding=1, groups=32)",
    "f32[2x32x14x14] -> relu -> conv2d_weight_gradient(32, kernel=3, padding=1, groups=32)",
    "f32[7x40] -> argmax(0)",
    "f32[2x5x3x7, nhwc] -> relu -> mean(hw) -> bias",
    "f32[7x40] -> relu -> cumsum -> add",
)


def kinds_of(template: type[Template]) -> tuple[str, ...]:
    return ("cpu:amx",) if template.name == "amx" else VECTORS


CASES = [(plan, kind, each) for plan in PLANS for each in TEMPLATES for kind in kinds_of(each)]


def target_of(kind: str) -> Target:
    return replace(KINDS[kind], threads=4)


@cache
def kernel_of(plan: str) -> Kernel:
    return lower(match(FusionPlan.parse(plan)))


@cache
def takes(template: type[Template], plan: str, kind: str) -> bool:
    return first_refusal(template.limits(kernel_of(plan), target_of(kind), "default")) is None


@pytest.mark.part(2)
@pytest.mark.parametrize(
    ("plan", "kind", "template"),
    [case for case in CASES if takes(case[2], case[0], case[1])],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_source_compiles_with_vectors_of_the_kind(plan: str, kind: str, template: type[Template]) -> None:
    kernel, target = kernel_of(plan), target_of(kind)
    chosen = next(iter(template.candidates(kernel, target, "default")))
    source = chosen.emit(kernel, target)
    text = toolchain.assembly(source.text, triple=TRIPLES[kind], cpu=target.cpu, features=target.features)
    assert re.search(rf"^{source.entry}:", text, re.MULTILINE)
    assert re.search(REGISTERS[kind], text)


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: template.name)
def test_every_template_is_built_for_every_kind(template: type[Template]) -> None:
    for kind in kinds_of(template):
        assert any(takes(template, plan, kind) for plan in PLANS)


@pytest.mark.parametrize("kind", TRIPLES)
def test_the_same_choice_gives_the_same_text(kind: str) -> None:
    kernel, target = kernel_of(PLANS[0]), target_of(kind)
    for template in TEMPLATES:
        if first_refusal(template.limits(kernel, target, "default")) is None:
            chosen = next(iter(template.candidates(kernel, target, "default")))
            assert chosen.emit(kernel, target).text == chosen.emit(kernel, target).text


def innermost_loops(assembly: str) -> Iterator[str]:
    """Blocks that jump back to their own label, up to that jump."""
    for block in re.split(r"\n(?=\.L)", assembly):
        label = block.partition(":")[0]
        back = re.search(rf"\tj\w+\t{re.escape(label)}$", block, re.MULTILINE)
        if back:
            yield block[: back.end()]


@pytest.mark.parametrize("plan", PLANS[:3])
def test_products_stay_in_registers(plan: str) -> None:
    """The innermost loop of `direct` spills no vector: each would cost as much as a product."""
    kernel, target = kernel_of(plan), target_of("cpu:avx512")
    direct = next(template for template in TEMPLATES if template.name == "direct")
    source = next(iter(direct.candidates(kernel, target, "default"))).emit(kernel, target)
    text = toolchain.assembly(
        source.text, triple=TRIPLES["cpu:avx512"], cpu=target.cpu, features=target.features
    )
    loop = max(innermost_loops(text), key=lambda loop: loop.count("vfmadd"))
    assert loop.count("vfmadd") >= 32
    assert "(%rsp)" not in loop


@pytest.mark.parametrize(
    ("plan", "word", "products", "tiles"),
    [
        ("bf16[64x256] -> linear(70) -> bias", "tdpbf16ps", 4, 4),
        ("i8[64x256] -> linear(70)", "tdpbssd", 4, 4),
        ("f32[64x256] -> linear(70)", "tdpbf16ps", 24, 14),
    ],
)
def test_products_by_tiles(plan: str, word: str, products: int, tiles: int) -> None:
    """A step of two by two tiles reads four and multiplies four; tiles are configured and released once.

    In three parts, there are six products of each two tiles, and neighbours share a part.
    """
    kernel, target = kernel_of(plan), target_of("cpu:amx")
    amx = next(template for template in TEMPLATES if template.name == "amx")
    source = next(iter(amx.candidates(kernel, target, "default"))).emit(kernel, target)
    text = toolchain.assembly(
        source.text, triple=TRIPLES["cpu:amx"], cpu=target.cpu, features=target.features
    )
    loop = max(innermost_loops(text), key=lambda loop: loop.count(word))
    assert (loop.count(word), loop.count("tileloadd")) == (products, tiles)
    assert "(%rsp)" not in loop
    assert text.count("ldtilecfg") == text.count("tilerelease") == 1
