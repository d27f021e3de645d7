"""Text to machine code for GPUs: what is recorded, what is refused, and what a dying compiler does."""

import re
from dataclasses import replace

import pytest

from fuseplan.backends.triton import compiler, toolchain, versions
from fuseplan.backends.triton.artifact import Artifact
from fuseplan.backends.triton.pool import Job, compile_many
from fuseplan.backends.triton.template import GpuTemplate
from fuseplan.backends.triton.templates.product import Product
from fuseplan.backends.triton.toolchain import types_of
from fuseplan.errors import BuildError
from fuseplan.execution.stages import decide
from fuseplan.kernels.emit import Slot, Source, TensorMap
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import match
from fuseplan.kernels.target import parse_target
from fuseplan.plans.plan import FusionPlan
from toy_templates import HEAD, ToyProduct, ToyScale

SM_90, GFX942 = parse_target("triton:sm_90"), parse_target("triton:gfx942")
SCALE = lower(match(FusionPlan.parse("f16[7x19] -> scale")))
PRODUCT = lower(match(FusionPlan.parse("f16[8x256x16x16, nhwc] -> conv2d(256, kernel=1)")))


def text_of(body: str, *arguments: str) -> str:
    return f"{HEAD}def k({', '.join(arguments)}):\n    {body}\n"


def test_a_kernel_for_any_gpu() -> None:
    template = ToyScale()
    for target in (SM_90, GFX942):
        source = template.emit(SCALE, target)
        packed = toolchain.compile_object(source, SCALE, template, target)
        artifact = Artifact.unpack(packed)
        assert artifact.architecture == target.name
        assert artifact.types == ("*fp16", "*fp32", "*fp16")
        assert artifact.threads == 4 * target.warp
        assert artifact.binary[:4] == b"\x7fELF"
        assert toolchain.resources(packed)["registers"] > 0
        assert artifact.assembly == ""


def test_tensor_maps_and_matrix_instructions_are_told() -> None:
    template = ToyProduct(rows=128, columns=128, depth=64)
    source = template.emit(PRODUCT, SM_90)
    artifact = compiler.compile_source(
        source, types_of(source, PRODUCT, template, SM_90), SM_90, assembly=True
    )
    assert {place: layout.swizzle for place, layout in artifact.maps.items()} == {0: 3, 1: 3, 2: 3}
    assert artifact.maps[2].box == (128, 64)  # a row of 128 f16 is two of the widest swizzle
    used = artifact.resources
    assert min(used["wgmma"], used["tma_loads"], used["tma_stores"]) > 0
    assert used["spill_bytes"] == used["serialized"] == 0
    assert used["programs"] == 3
    assert "wgmma.mma_async" in artifact.assembly
    assert Artifact.unpack(artifact.pack()) == artifact


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("tl.store(dst, nothing)", "nothing is not defined"),
        ("tl.store(dst, tl.zeros((3,), tl.float32))", "power of 2"),
        ("return (", "was never closed"),
    ],
)
def test_what_is_wrong_with_a_text_is_told(body: str, said: str) -> None:
    source = Source(text_of(body, "dst"), "k", (Slot("dst"),), language="triton")
    with pytest.raises(BuildError, match=r"cannot compile|not valid") as caught:
        compiler.compile_source(source, ("*fp32",), SM_90)
    assert said in str(caught.value)
    assert caught.value.source == source.text


def test_what_cannot_be_launched_is_refused() -> None:
    template = ToyProduct(rows=128, columns=128, depth=64)
    source = template.emit(PRODUCT, SM_90)
    types = types_of(source, PRODUCT, template, SM_90)
    with pytest.raises(BuildError, match="tensor maps, which triton:gfx942 does not have"):
        compiler.compile_source(source, types, GFX942)
    with pytest.raises(BuildError, match=r"needs 65552 bytes of shared memory; .* has 65536"):
        compiler.compile_source(source, types, replace(SM_90, l1_bytes=65536))
    with pytest.raises(BuildError, match="has 3 arguments, its record 2"):
        compiler.compile_source(source, types[:2], SM_90)
    with pytest.raises(BuildError, match="asks for num_warp, which is not an option of the compiler"):
        compiler.compile_source(replace(source, options=(("num_warp", 4),)), types, SM_90)
    with pytest.raises(BuildError, match="not a kind of GPU"):
        compiler.compile_source(source, types, parse_target("reference"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"strides": (13, 1)}, "a stride is not a multiple of 16 bytes"),
        ({"strides": (256, 2)}, "innermost axis is not contiguous"),
        ({"steps": (9, 1)}, "a step is not 1 to 8"),
        ({"steps": (4, 1)}, "spans more than 256 elements"),
        ({"shape": (0, 256)}, "an extent is not 1"),
    ],
)
def test_what_the_copy_engine_cannot_do_is_refused(changes: dict[str, tuple[int, ...]], said: str) -> None:
    mapped = TensorMap("f16", (2048, 256), (256, 1), (128, 64), (1, 1))
    slots = (Slot("src", map=replace(mapped, **changes)), Slot("dst", map=mapped))  # type: ignore[arg-type]
    text = text_of("dst.store([0, 0], src.load([0, 0]))", "src", "dst")
    kind = "tensordesc<fp16[128, 64]>"
    with pytest.raises(BuildError, match=said):
        compiler.compile_source(Source(text, "k", slots, language="triton"), (kind, kind), SM_90)


def test_a_fingerprint_without_triton_imported() -> None:
    found = toolchain.fingerprint()
    assert found is not None
    assert re.fullmatch(
        rf"triton {versions.dotted(versions.version_of() or ())}, ptxas \d+\.\d+\.\d+ of \d+ bytes", found
    )


def test_bytes_that_are_no_artifact() -> None:
    template = ToyScale()
    packed = toolchain.compile_object(template.emit(SCALE, SM_90), SCALE, template, SM_90)
    for wrong in (b"", packed[:-1], b"x" + packed[1:], packed[:30] + b"\xff" + packed[31:]):
        with pytest.raises(BuildError, match="not made by this toolchain"):
            Artifact.unpack(wrong)


def test_the_candidates_of_a_kernel_at_once() -> None:
    templates = [ToyProduct(rows=64, columns=columns, depth=64) for columns in (32, 64)]
    templates.append(ToyProduct(rows=256, columns=256, depth=256))  # needs more shared memory than there is
    found = list(toolchain.compile_all([(PRODUCT, each) for each in templates], SM_90, workers=1))
    assert [source for source, _ in found] == [template.emit(PRODUCT, SM_90) for template in templates]
    codes = [code for _, code in found]
    assert all(isinstance(code, bytes) and toolchain.resources(code)["wgmma"] for code in codes[:2])
    assert "shared memory" in str(codes[2])


def test_many_at_once_in_order_and_what_dies_is_an_error() -> None:
    """A text may do what it likes when it is executed: here it ends the process, or never ends."""
    template = ToyScale()
    source = template.emit(SCALE, SM_90)
    good = Job(source, types_of(source, SCALE, template, SM_90), SM_90)

    def job(text: str) -> Job:
        return replace(good, source=replace(source, text=text))

    dies = job("import os, sys\nsys.stderr.write('LLVM ERROR')\nsys.stderr.flush()\nos.abort()\n")
    hangs = job("import time\ntime.sleep(60)\n")
    results = list(compile_many([good, dies, good, job("oops("), hangs, good], workers=2, seconds=10.0))
    assert [type(result) for result in results] == [bytes, BuildError, bytes, BuildError, BuildError, bytes]
    assert results[0] == results[2] == results[5]
    told = [str(result) for result in results]
    assert "died with status -6" in told[1]
    assert "LLVM ERROR" in told[1]
    assert "not valid" in told[3]
    assert "took more than 10 s" in told[4]


def test_the_assembler_that_torch_compile_sets_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    from fuseplan.kernels.target import parse_target

    monkeypatch.setattr(knobs.nvidia, "mock_ptx_version", "13.0")
    monkeypatch.setattr(type(knobs.nvidia.ptxas), "version", property(lambda _: "13.0"), raising=False)
    records = decide("f16[5x64] -> relu", "triton:sm_90")
    code = toolchain.compile_object(
        records.source, records.kernel, records.choice.template, parse_target("triton:sm_90")
    )
    assert code


def test_more_tensor_memory_than_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "TENSOR_MEMORY_COLUMNS", 32)
    target = parse_target("triton:sm_100")
    kernel = lower(match(FusionPlan.parse("bf16[256x192] -> matmul(128) -> abs -> bias")))
    template = next(iter(Product.candidates(kernel, target, "default")))
    assert isinstance(template, GpuTemplate)
    source = template.emit(kernel, target)
    with pytest.raises(BuildError, match=r"128 columns of tensor memory; triton:sm_100 has 32"):
        compiler.compile_source(source, types_of(source, kernel, template, target), target)


@pytest.mark.parametrize("prologue", ["", "-> relu "])
def test_rows_and_channels_that_fill_no_tile_are_loaded_ahead(prologue: str) -> None:
    """The masks of the first tile and of those in the loop have other shapes."""
    target = parse_target("triton:sm_80")
    kernel = lower(match(FusionPlan.parse(f"bf16[75x105] {prologue}-> linear(40)")))
    made = Product.candidates(kernel, target, "default")
    template = next(each for each in made if isinstance(each, Product) and each.ahead)
    source = template.emit(kernel, target)
    assert compiler.compile_source(source, types_of(source, kernel, template, target), target)
