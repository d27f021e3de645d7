"""Errors of Triton and ptxas are repaired: no product is dropped, no factor overwritten, no fence missing."""

import re
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import fuseplan
from fuseplan.backends.triton import TRITON, assembler, compiler, repairs, sass
from fuseplan.backends.triton.artifact import Artifact
from fuseplan.backends.triton.template import GpuTemplate
from fuseplan.backends.triton.templates.attention import GpuAttention
from fuseplan.backends.triton.templates.hopper import Hopper
from fuseplan.backends.triton.templates.pointwise import GpuPointwise
from fuseplan.backends.triton.templates.product import Product
from fuseplan.backends.triton.toolchain import types_of
from fuseplan.errors import BuildError, UnsoundCodeError
from fuseplan.execution.build import build_sound
from fuseplan.execution.select import ranked
from fuseplan.execution.stages import decide
from fuseplan.kernels.emit import Source
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import match
from fuseplan.kernels.target import Target, parse_target
from fuseplan.kernels.template import Template
from fuseplan.plans.plan import FusionPlan

SM_90 = parse_target("triton:sm_90")
CONV = "[2x32x5x6, nhwc] -> conv2d(64, kernel=(1, 3), padding=same)"
SIZES = f"bf16{CONV} -> abs -> bias"
TILE = Product(64, 64, 32, warps=8).text


def compiled_sizes(plan: str = SIZES, tile: str = TILE) -> Artifact:
    """A plan whose sums ptxas 12.8 and 12.9 drop, with tiles of that size."""
    kernel = lower(match(FusionPlan.parse(plan)))
    template = next(each for each in Product.candidates(kernel, SM_90, "default") if tile == each.text)
    assert isinstance(template, GpuTemplate)
    source = template.emit(kernel, SM_90)
    return compiler.compile_source(source, types_of(source, kernel, template, SM_90), SM_90, assembly=True)


@pytest.mark.parametrize(
    ("plan", "tile"),
    [
        (SIZES, TILE),
        (SIZES, Product(64, 16, 32).text),
        (f"bf16{CONV} -> elementwise('-x') -> relu", TILE),
        (f"f16{CONV} -> elementwise('expm1(-abs(x))') -> bias", TILE),
    ],
    ids=["size", "size of few features", "negative", "negative size"],
)
def test_products_that_ptxas_drops_are_kept(plan: str, tile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not repairs.lacks_products(compiled_sizes(plan, tile).binary)
    monkeypatch.setattr(repairs, "as_numbers", lambda ptx: ptx)
    with pytest.raises(BuildError, match=r"ptxas .* wrong results: ptxas drops matrix instructions"):
        compiled_sizes(plan, tile)


def test_sums_whose_bits_are_read_keep_their_signs() -> None:
    """The conversion to e5m2 takes the sign from the bits of each of a thread's 8 sums."""
    plan = "f8e5m2[2x96x512] -> conv1d(288, kernel=2, stride=2, groups=96)"
    ptx = compiled_sizes(plan, Product(64, 16, 16, stages=3).text).assembly
    read = r"add\.rn\.f32 (\w+), %r\d+, 0f80000000; shr\.u32 %r\d+, \1, 24;"
    assert len(re.findall(read, ptx)) == 8


def test_sums_that_are_stored_in_shared_memory_are_stored_as_they_are() -> None:
    """A store of bits, st.shared.b32, reads the sum as no operation does."""
    plan = "f32[31x2x1x4] -> tanh(0.1, beta=2) -> matmul(1, precision=tf32)"
    tile = Product(64, 16, 16, arithmetic="tf32", warps=8).text
    assert re.search(r"st\.shared\.b32 \t\[%r\d+\], %r\d+;", compiled_sizes(plan, tile).assembly)


def test_products_that_nothing_uses_may_be_dropped() -> None:
    plan = "bf16[4096x1024] -> matmul(1024) -> elementwise('x ** 0') -> bias"
    records = decide(plan, "triton:sm_90", template="hopper")
    template = records.choice.template
    assert isinstance(template, Hopper)
    types = types_of(records.source, records.kernel, template, SM_90)
    artifact = compiler.compile_source(records.source, types, SM_90, assembly=True)
    assert repairs.lacks_products(artifact.binary)
    assert not repairs.uses_products(artifact.assembly)


@pytest.mark.parametrize(
    ("template", "plan"),
    [
        ("hopper_attention", "bf16[1x2x256x64, bhsd] -> attention(score='where(index(t) < 128, -inf, x)')"),
        ("hopper_attention", "bf16[1x2x256x64, bhsd] -> attention(score='where(index(t) >= 128, 2, x)')"),
        ("attention", "f16[1x2x256x64, bhsd] -> attention(score='where(index(h) < 5, -inf, x)')"),
        (
            "hopper_attention_gradient",
            "f16[1x2x256x64, bhsd] -> attention_gradient(by=key, score='where(index(s) < 128, -inf, x)')",
        ),
    ],
)
def test_blocks_that_a_formula_hides_for_certain_keep_their_products(template: str, plan: str) -> None:
    records = decide(plan, SM_90, template=template)
    chosen = records.choice.template
    assert isinstance(chosen, GpuTemplate)
    types = types_of(records.source, records.kernel, chosen, SM_90)
    assert compiler.compile_source(records.source, types, SM_90).binary


PROLOGUES: list[tuple[type[GpuTemplate], str]] = [
    (Product, "f16[1000x768] -> relu -> matmul(1536) -> bias -> add -> relu"),
    (Product, "bf16[8x128x28x28, nhwc] -> batch_norm -> relu -> conv2d(256, kernel=3, padding=1)"),
]


def made(kind: type[GpuTemplate], plan: str, most: int) -> list[Artifact]:
    """The first candidates for a plan whose first factor is made in registers."""
    kernel = lower(match(FusionPlan.parse(plan)))
    found = []
    for template in islice(kind.candidates(kernel, SM_90, "default"), most):
        assert isinstance(template, kind)
        source = template.emit(kernel, SM_90)
        types = types_of(source, kernel, template, SM_90)
        found.append(compiler.compile_source(source, types, SM_90, assembly=True))
    return found


def overwritten(kind: type[GpuTemplate], plan: str) -> list[bool]:
    """Whether the code of each of the first candidates overwrites factors; of one at least it could."""
    codes = [sass.disassembled(each.binary, compiler.PACKAGE) for each in made(kind, plan, 2)]
    assert any(sass.from_registers(each) for each in codes)
    return [bool(sass.overwritten(each)) for each in codes]


@pytest.mark.parametrize(("kind", "plan"), PROLOGUES)
def test_no_factor_is_overwritten_before_it_is_read(kind: type[GpuTemplate], plan: str) -> None:
    assert not any(overwritten(kind, plan))


def test_what_triton_makes_overwrites_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repairs, "overwrites_factors", lambda *_: False)
    assert any(overwritten(*PROLOGUES[0])), (
        "where this version of Triton does not, `settled` has nothing to do"
    )


def merged(monkeypatch: pytest.MonkeyPatch, *, repaired: bool) -> list[str]:
    """Registers that a conversion to fp8 is merged with and that nothing was written to."""
    if not repaired:
        monkeypatch.setattr(repairs, "unmerged", lambda ptx: ptx)
    (code,) = made(GpuPointwise, "f8e4m3[1x16] -> elementwise('where(index(n) >= index(c), x, 0.5)')", 1)
    written, unknown = set[str](), list[str]()
    for line in sass.listed(code.binary, compiler.PACKAGE).splitlines():
        registers = re.findall(r"\bR(?:\d+|Z)\b", line)
        if "MERGE_C" in line and registers[-1] not in {*written, "RZ"}:
            unknown.append(registers[-1])
        written |= set(registers[:1])
    return unknown


def test_pairs_of_fp8_are_merged_with_what_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    assert merged(monkeypatch, repaired=True) == []


def test_what_ptxas_makes_of_pairs_that_are_used_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    is_right = assembler.assembler(compiler.PACKAGE).release >= (13, 0)
    assert (merged(monkeypatch, repaired=False) == []) == is_right


def sums_of_nothing(monkeypatch: pytest.MonkeyPatch, *, repaired: bool) -> list[str]:
    """Instructions that add 0 to a pair of numbers."""
    if not repaired:
        monkeypatch.setattr(repairs, "halved", lambda ptx: ptx)
    plan = "f32[33x2x3, nwc] -> elementwise('where(index(n) >= index(), x, 0.5)')"
    codes = made(GpuPointwise, plan, 4)
    lines = (line for code in codes for line in sass.listed(code.binary, compiler.PACKAGE).splitlines())
    return [line for line in lines if re.search(r"VIADD\.16x2 R\d+, R\d+, 0x0\b", line)]


def test_constants_are_added_to_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not sums_of_nothing(monkeypatch, repaired=True)


def test_what_ptxas_makes_of_half_a_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    is_right = assembler.assembler(compiler.PACKAGE).release > (13, 0)
    assert (not sums_of_nothing(monkeypatch, repaired=False)) == is_right


def unwritten(listing: str) -> list[str]:
    """Instructions that read a uniform register which none above them writes."""
    found, written = list[str](), set[int]()
    for line in sass.parsed(listing).lines:
        name, _, rest = line.text.partition(" ")
        registers = [int(each) for each in re.findall(r"\bUR(\d+)\b", rest)]
        is_written = rest.startswith("UR") and not name.startswith("ST")
        if product := sass.PRODUCT.match(line.text):  # four, the first two for a factor that is not there
            registers = list(range(registers[0] + 2 * bool(product[1]), registers[0] + 4))
        found += [line.text for each in registers[is_written:] if each not in written]
        if is_written:
            written |= set(range(registers[0], registers[0] + 1 + bool(re.search(r"\.64|WIDE", name))))
    return found


def descriptors(monkeypatch: pytest.MonkeyPatch, *, repaired: bool) -> list[str]:
    """Instructions of an attention that read what nothing wrote: its heads are read in 64 and 32 elements."""
    if not repaired:
        monkeypatch.setattr(repairs, "in_words", lambda ptx: ptx)
    (code,) = made(GpuAttention, "f16[2x6x16x96] -> attention(keys=48, key_heads=2)", 1)
    return unwritten(sass.listed(code.binary, compiler.PACKAGE, "-ndf"))


def test_descriptors_of_several_kinds_are_added_to_what_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    assert descriptors(monkeypatch, repaired=True) == []


def test_what_ptxas_makes_of_descriptors_of_several_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    is_right = assembler.assembler(compiler.PACKAGE).release >= (12, 9)
    assert (descriptors(monkeypatch, repaired=False) == []) == is_right


def test_a_kernel_that_no_repair_helps_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repairs, "overwrites_factors", lambda *_: True)
    with pytest.raises(BuildError, match=r"wrong results: registers are overwritten .* FUSEPLAN_PTXAS"):
        made(*PROLOGUES[1], 1)


def test_code_that_cannot_be_read_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own = assembler.own_assembler(compiler.PACKAGE)
    monkeypatch.setattr(compiler, "PACKAGE", tmp_path)
    for name in ("own_assembler", "assembler"):
        monkeypatch.setattr(compiler, name, lambda package: own)
    with pytest.raises(BuildError, match="nvdisasm cannot read the kernel's code"):
        made(*PROLOGUES[1], 4)


def test_copies_are_fenced_from_the_products_that_read_them() -> None:
    (artifact,) = made(*PROLOGUES[0], 1)
    assert artifact.resources["async_copies"] > 0
    between = artifact.assembly.split("cp.async.wait_group", 1)[1].split("wgmma.fence", 1)[0]
    assert repairs.FENCE in between, "the first product reads copies"
    assert repairs.fenced(artifact.assembly) == artifact.assembly, "once is enough"


SMALL = "f16[64x64] -> relu -> matmul(64)"


def test_a_kernel_that_fails_a_check_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    first = decide(SMALL, SM_90)
    known = compiler.compile_source

    def compiled(source: Source, *others: Any, **more: Any) -> Artifact:
        with monkeypatch.context() as patch:
            patch.setattr(repairs, "overwrites_factors", lambda *_: source == first.source)
            return known(source, *others, **more)

    monkeypatch.setattr(compiler, "compile_source", compiled)
    found = fuseplan.compile(SMALL, SM_90, cache=False)
    assert found.choice.template == first.choice.candidates[1]
    assert found.source == found.choice.template.emit(found.kernel, SM_90)
    assert found.choice.considered[-1].template == first.choice.template.text
    unfolded = " ".join(str(found.explain()).split())
    assert re.search(rf"not {re.escape(first.choice.template.text)}: ptxas .* are overwritten", unfolded)


def failing(monkeypatch: pytest.MonkeyPatch) -> list[Template]:
    """The templates whose code is made, and fails a check."""
    made: list[Template] = []

    def fails(source: Source, kernel: Kernel, template: Template, target: Target) -> bytes:
        made.append(template)
        raise UnsoundCodeError(f"the code of number {len(made)} is wrong")

    monkeypatch.setattr(TRITON, "compile_object", fails)
    return made


def test_where_no_code_passes_the_checks_the_last_fault_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    made, records = failing(monkeypatch), decide(SMALL, SM_90)
    count = len(records.choice.candidates)
    with pytest.raises(UnsoundCodeError, match=rf"number {count} is wrong\n.* {count - 1} other candidates"):
        build_sound(records, use_cache=False)
    assert made == list(records.choice.candidates)


def test_behind_a_measured_choice_comes_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    made, records = failing(monkeypatch), decide(SMALL, SM_90)
    every = records.choice.candidates
    chosen = ranked(every[2], decide(SMALL, SM_90, template=every[2].text).choice.considered, every)
    with pytest.raises(UnsoundCodeError):
        build_sound(replace(records, choice=chosen), use_cache=False)
    assert made[:3] == [every[2], *every[:2]]


def test_a_candidate_that_is_named_has_none_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made, text = failing(monkeypatch), decide(SMALL, SM_90).choice.template.text
    with pytest.raises(UnsoundCodeError, match=r"^the code of number 1 is wrong$"):
        fuseplan.compile(SMALL, SM_90, template=text, cache=False)
    assert len(made) == 1


STEP = "wgmma.fence.sync.aligned;\nwgmma.mma_async.sync x;\n"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (f"cp.async.wait_group 0;\nbar.sync 0;\n{STEP}ret;", True),
        (f"cp.async.wait_all;\nbar.sync 0;\n{STEP}ret;", True),
        (f"$top:\n{STEP}cp.async.wait_group 3;\n@%p1 bra $top;\nret;", True),
        (f"cp.async.wait_group 3;\n$top:\n{STEP}@%p1 bra $top;\nret;", True),
        (f"cp.async.wait_group 0;\nbar.sync 0;\n{repairs.FENCE}\n{STEP}ret;", False),
        (f"{STEP}cp.async.wait_group 0;\nbar.sync 0;\nret;", False),
        ("cp.async.wait_group 0;\nbar.sync 0;\n$top:\nmma.sync x;\n@%p1 bra $top;\nret;", False),
    ],
    ids=["straight", "all", "loop's end", "before a loop", "fenced", "no product", "no such product"],
)
def test_where_a_fence_is_needed(before: str, after: bool) -> None:
    assert (repairs.fenced(before).count(repairs.FENCE) > before.count(repairs.FENCE)) == after
