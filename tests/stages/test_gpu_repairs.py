"""What Triton and ptxas get wrong is put right: no product is dropped, and no factor overwritten."""

from itertools import islice

import pytest

import sass
from fuseplan.backends.triton import compiler, repairs
from fuseplan.backends.triton.artifact import Artifact
from fuseplan.backends.triton.signature import types_of
from fuseplan.backends.triton.template import GpuTemplate
from fuseplan.backends.triton.templates.convolution import GpuConvolution
from fuseplan.backends.triton.templates.hopper import Hopper
from fuseplan.backends.triton.templates.product import Product
from fuseplan.errors import BuildError
from fuseplan.lower import lower
from fuseplan.match import match
from fuseplan.plan import FusionPlan
from fuseplan.stages import decide
from fuseplan.target import parse_target

SM_90 = parse_target("triton:sm_90")
CONV = "[2x32x5x6, nhwc] -> conv2d(64, kernel=(1, 3), padding=same)"
SIZES = f"bf16{CONV} -> abs -> bias"
TILE = "positions=64, features=64"
WIDE = "positions=64, features=64, depth=32, joined=1, ahead=False, swapped=False, arithmetic=native, warps=8"


def compiled_sizes(plan: str = SIZES, tile: str = TILE) -> Artifact:
    """A plan whose sums ptxas 12.8 and 12.9 drop, with tiles of that size."""
    kernel = lower(match(FusionPlan.parse(plan)))
    template = next(each for each in GpuConvolution.candidates(kernel, SM_90, "default") if tile in each.text)
    assert isinstance(template, GpuTemplate)
    source = template.emit(kernel, SM_90)
    return compiler.compile_source(source, types_of(source, kernel, template), SM_90, assembly=True)


@pytest.mark.parametrize(
    ("plan", "tile"),
    [
        (SIZES, TILE),
        (SIZES, "positions=64, features=16"),
        (f"bf16{CONV} -> elementwise('-x') -> relu", WIDE),
        (f"f16{CONV} -> elementwise('expm1(-abs(x))') -> bias", WIDE),
    ],
    ids=["size", "size of few features", "negative", "negative size"],
)
def test_products_that_ptxas_drops_are_kept(plan: str, tile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[bool] = []
    known = repairs.lacks_products

    def noted(cubin: bytes) -> bool:
        tried.append(known(cubin))
        return tried[-1]

    monkeypatch.setattr(repairs, "lacks_products", noted)
    compiled_sizes(plan, tile)
    assert tried == [True, False], "by instructions for the sign; where the first is False, nothing is to do"


def test_products_that_nothing_uses_may_be_dropped() -> None:
    records = decide("bf16[4096x1024] -> matmul(1024) -> elementwise('x ** 0') -> bias", "triton:sm_90")
    template = records.choice.template
    assert isinstance(template, Hopper)
    types = types_of(records.source, records.kernel, template)
    artifact = compiler.compile_source(records.source, types, SM_90, assembly=True)
    assert repairs.lacks_products(artifact.binary)
    assert not repairs.uses_products(artifact.assembly)


def test_no_kernel_lacks_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repairs, "lacks_products", lambda cubin: True)
    with pytest.raises(BuildError, match="ptxas drops matrix instructions"):
        compiled_sizes()


PROLOGUES = [
    (Product, "f16[1000x768] -> relu -> matmul(1536) -> bias -> add -> relu"),
    (GpuConvolution, "f16[1000x768] -> relu -> matmul(1536) -> bias -> add -> relu"),
    (Product, "bf16[1000x256] -> relu -> matmul(1536) -> bias"),
    (GpuConvolution, "bf16[8x128x28x28, nhwc] -> batch_norm -> relu -> conv2d(256, kernel=3, padding=1)"),
    (GpuConvolution, "f16[8x128x28x28] -> batch_norm -> relu -> conv2d(256, kernel=3, padding=1)"),
]


def codes(kind: type[GpuTemplate], plan: str) -> list[bytes]:
    """Machine code of the first candidates for a plan whose first factor is made in registers."""
    kernel = lower(match(FusionPlan.parse(plan)))
    made = []
    for template in islice(kind.candidates(kernel, SM_90, "default"), 6):
        assert isinstance(template, kind)
        source = template.emit(kernel, SM_90)
        made.append(compiler.compile_source(source, types_of(source, kernel, template), SM_90).binary)
    return made


@pytest.mark.parametrize(("kind", "plan"), PROLOGUES)
def test_no_factor_is_overwritten_before_it_is_read(kind: type[GpuTemplate], plan: str) -> None:
    codes_of = [sass.disassembled(each) for each in codes(kind, plan)]
    assert any(sass.from_registers(lines) for lines, _ in codes_of)
    assert [sass.overwritten(*each) for each in codes_of] == [set()] * len(codes_of)


def test_what_triton_makes_overwrites_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repairs, "settled", lambda ptx: ptx)
    found = [sass.overwritten(*sass.disassembled(each)) for each in codes(GpuConvolution, PROLOGUES[1][1])]
    assert any(found), "where this version of Triton does not, `settled` has nothing to do"
