"""The assembler for NVIDIA's GPUs: which one is taken, what is said of it, and what a wrong one leads to."""

import sys
from pathlib import Path
from typing import Any

import pytest

from fuseplan.backends.triton import assembler as assemblers
from fuseplan.backends.triton import sass, toolchain, versions
from fuseplan.backends.triton.assembler import KEEPS_FACTORS, TOOLS, Assembler, assembler, own_assembler
from fuseplan.backends.triton.repairs import overwrites_factors, settled
from fuseplan.compile import compile as compile_plan
from fuseplan.errors import ArgumentError, BuildError
from registers import summary

NEWEST = Path(sys.prefix) / f"triton-{versions.NEWEST}"  # where `make test` installs it
PLAN = "f16[5x64] -> relu"
SAYS = """#!/bin/sh
echo "ptxas: NVIDIA (R) Ptx optimizing assembler"
echo "Cuda compilation tools, release {release}, V{release}.{patch}"
"""


def installed_package() -> Path:
    package = versions.package()
    assert package is not None
    return package


def program(path: Path, text: str, mode: int = 0o755) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
    return path


def ptxas(path: Path, version: str) -> Path:
    """A program that says it is the assembler of that version."""
    release, _, patch = version.rpartition(".")
    return program(path, SAYS.format(release=release, patch=patch))


@pytest.mark.parametrize(
    ("version", "ptx"),
    [
        ("11.8.89", 78),
        ("12.0.76", 80),
        ("12.5.82", 85),
        ("12.6.20", 85),
        ("12.8.93", 87),
        ("12.9.86", 88),
        ("13.0.48", 90),
        ("13.4.59", 94),
    ],
)
def test_the_ptx_that_a_release_takes(version: str, ptx: int) -> None:
    assert Assembler(Path("ptxas"), version, 1).ptx == ptx


@pytest.mark.parametrize(
    ("blackwell", "nvidia", "driver", "taken"),
    [
        ("12.9.86", None, (13, 0), "12.8.93"),
        ("13.1.80", "13.2.51", (13, 0), "12.8.93"),
        ("13.3.33", None, (13, 0), "13.3.33"),
        ("13.3.33", "13.4.59", (13, 0), "13.3.33"),
        ("13.1.80", "13.4.59", (13, 4), "13.4.59"),
        (None, "13.4.59", (13, 0), "13.4.59"),
        ("13.4.59", None, None, "13.4.59"),
        ("13.4.59", None, (12, 9), "12.8.93"),
        ("14.0.10", "13.4.59", (13, 0), "13.4.59"),
    ],
)
def test_the_newer_one_is_taken_where_the_driver_loads_its_code(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    blackwell: str | None,
    nvidia: str | None,
    driver: tuple[int, int] | None,
    taken: str,
) -> None:
    ptxas(tmp_path / "triton" / TOOLS / "ptxas", "12.8.93")
    if blackwell:
        ptxas(tmp_path / "triton" / TOOLS / "ptxas-blackwell", blackwell)
    if nvidia:
        ptxas(tmp_path / "nvidia" / f"cu{nvidia[:2]}" / "bin" / "ptxas", nvidia)
    monkeypatch.setattr(assemblers, "driver_release", lambda: driver)
    assert assembler(tmp_path / "triton").version == taken


def test_the_setting_names_the_assembler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = own_assembler(installed_package())
    usual = compile_plan(PLAN, "triton:sm_90").program
    named = program(tmp_path / "ptxas", f'#!/bin/sh\nexec {own.path} "$@"\n')
    monkeypatch.setenv("FUSEPLAN_PTXAS", str(named))
    other = compile_plan(PLAN, "triton:sm_90").program
    assert other.to_json()["toolchain"] == toolchain.fingerprint()
    assert f"ptxas {own.version} of {named.stat().st_size} bytes" in other.toolchain
    assert usual.key != other.key, "code of one assembler passes for another's"
    assert usual.code == other.code


@pytest.mark.parametrize(
    ("text", "mode", "why"),
    [
        (None, 0, "is not a file"),
        ("#!/bin/sh\necho Cuda compilation tools, release 13.4, V13.4.59\n", 0o755, "does not run as"),
        ("#!/bin/sh\necho NVIDIA (R) Ptx optimizing assembler\n", 0o755, "does not run as"),
        ("#!/bin/sh\nexit 3\n", 0o755, "does not run as"),
        ("#!/bin/sh\n", 0o644, "does not run as"),
    ],
    ids=["missing", "nvcc", "no version", "fails", "no program"],
)
def test_a_setting_that_names_no_assembler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, mode: int, why: str
) -> None:
    if text is not None:
        program(tmp_path / "ptxas", text.replace("(R)", "'(R)'"), mode)
    monkeypatch.setenv("FUSEPLAN_PTXAS", str(tmp_path / "ptxas"))
    with pytest.raises(ArgumentError, match=rf"FUSEPLAN_PTXAS={tmp_path}/ptxas {why}.*; want the path"):
        compile_plan(PLAN, "triton:sm_90")


def test_an_assembler_is_asked_once_on_a_machine(tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    path = program(
        tmp_path / "triton" / TOOLS / "ptxas", f"{SAYS.format(release='12.8', patch=93)}echo >> {asked}\n"
    )
    for _ in range(2):
        assemblers._asked.cache_clear()  # as in another process
        assert own_assembler(tmp_path / "triton").version == "12.8.93"
    assert asked.read_text() == "\n"
    program(path, SAYS.format(release="13.4", patch=59))
    assemblers._asked.cache_clear()
    assert own_assembler(tmp_path / "triton").version == "13.4.59"


def test_a_package_without_assembler(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="ptxas does not run"):
        assembler(tmp_path)


def witness() -> str:
    """PTX whose products read copies of registers, each waited for before its copy is made again."""

    def registers(name: str) -> str:
        return ", ".join(f"%{name}{number}" for number in range(4))

    loads = "".join(
        f"ld.global.v4.b32 {{{registers(part)}}}, [%at + {16 * place}];\n"
        + "".join(f"max.f16x2 %{part}{number}, %{part}{number}, %zero;\n" for number in range(4))
        for place, part in enumerate("ab")
    )
    products = "".join(
        "".join(f"mov.b32 %k{part}{number}, %{part}{number};\n" for number in range(4))
        + "wgmma.fence.sync.aligned;\n"
        + "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 "
        + f"{{{registers('s')}}}, {{{registers('k' + part)}}}, %factor, 1, 1, 1, 0;\n"
        + "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 1;\n"
        for part in "ab"
    )
    named = "".join(f".reg .b32 %{name}<4>;\n" for name in ("a", "b", "ka", "kb"))
    zeros = "".join(f"mov.f32 %s{number}, 0f00000000;\n" for number in range(4))
    return f"""
.version 8.4
.target sm_90a
.address_size 64
.visible .entry witness(.param .u64 src, .param .u64 dst, .param .u64 weight, .param .u32 steps)
.reqntid 128, 1, 1
{{
.reg .f32 %s<4>;
{named}.reg .b32 %left, %zero;
.reg .b64 %at, %to, %factor;
.reg .pred %more;
ld.param.u64 %at, [src];
ld.param.u64 %to, [dst];
ld.param.u64 %factor, [weight];
ld.param.u32 %left, [steps];
cvta.to.global.u64 %at, %at;
cvta.to.global.u64 %to, %to;
mov.b32 %zero, 0;
{zeros}$next:
{loads}{products}add.s64 %at, %at, 4096;
sub.s32 %left, %left, 1;
setp.ne.s32 %more, %left, 0;
@%more bra $next;
wgmma.wait_group.sync.aligned 0;
st.global.v4.f32 [%to], {{{registers("s")}}};
ret;
}}
"""


def test_copies_that_an_early_assembler_removes_are_found() -> None:
    package, ptx = installed_package(), witness()
    brought = [package, *(place for place in [NEWEST / "triton"] if place.exists())]
    for each in {taken(place) for place in brought for taken in (own_assembler, assembler)}:
        cubin, _ = each.assembled(ptx, 90)
        assert overwrites_factors(ptx, cubin, package) == (each.release < KEEPS_FACTORS), each
        waiting = settled(ptx)
        assert not overwrites_factors(waiting, each.assembled(waiting, 90)[0], package)


PRODUCT = "HGMMA.64x8x16.F32 R24, R32, gdesc[UR8], R24, gsb0"


def code_of(*lines: str) -> sass.Code:
    """A disassembler's text of instructions and labels."""
    return sass.parsed(
        "\n".join(
            f"{line}" if line.endswith(":") else f"        /*{16 * place:04x}*/ {line} ;"
            for place, line in enumerate(lines)
        )
    )


@pytest.mark.parametrize(
    ("between", "wrong"),
    [
        ("MOV R32, R1", True),
        ("@P0 MOV R35, R1", True),
        ("@!UP0 LDS.64 R34, [R1]", True),
        ("MOV R36, R32", False),
        ("CS2R R31, SRZ", True),
        ("CS2R.32 R31, SRZ", False),
        ("LDSM.16.MT88.4 R29, [R1]", True),
        ("LDSM.16.M88.2 R29, [R1]", False),
        ("LDG.E.128 R28, desc[UR4][R2.64]", False),
        ("LDG.E.128 R29, desc[UR4][R2.64]", True),
        ("IMAD.WIDE.U32 R31, R1, R2, R3", True),
        ("F2F.F64.F32 R31, R1", True),
        ("SHFL.BFLY PT, R33, R1, 0x1, 0x1f", True),
        ("LOP3.LUT P0, R33, R1, R2, RZ, 0xc0, !PT", True),
        ("ISETP.GE.AND P0, PT, R33, R2, PT", False),
        ("STS.128 [R1], R32", False),
        ("ST.E R32, desc[UR4][R32]", False),
        ("RET.REL.NODEC R32 `(k)", False),
        ("BRX R2 -0x10", True),
    ],
)
def test_an_instruction_behind_a_product_that_may_still_read(between: str, wrong: bool) -> None:
    assert bool(sass.overwritten(code_of("k:", PRODUCT, between, "EXIT"))) == wrong
    waited = code_of("k:", PRODUCT, "WARPGROUP.DEPBAR.LE gsb0, 0x0", between, "EXIT")
    assert not sass.overwritten(waited)


@pytest.mark.parametrize(("kept", "wrong"), [("0x1", True), ("0x0", False)])
def test_the_next_step_of_a_loop(kept: str, wrong: bool) -> None:
    other = PRODUCT.replace("R32", "R40")
    wait = f"WARPGROUP.DEPBAR.LE gsb0, {kept}"
    code = code_of(
        "k:", ".L_x_0:", "MOV R41, R1", "MOV R33, R1", PRODUCT, other, wait, "@P0 BRA `(.L_x_0)", "EXIT"
    )
    assert {what for what, _ in sass.overwritten(code)} == ({"MOV R41, R1"} if wrong else set())


def test_every_way_is_followed() -> None:
    """Both sides of a jump, a function that is called, and a loop that never waits."""
    product, write, jump = PRODUCT, "MOV R33, R1", "`(.L_x_0)"
    assert sass.overwritten(code_of("k:", product, f"@P0 BRA {jump}", "EXIT", ".L_x_0:", write, "EXIT"))
    assert sass.overwritten(code_of("k:", product, f"BRA !UP0, {jump}", write, ".L_x_0:", "EXIT"))
    assert not sass.overwritten(code_of("k:", product, f"BRA {jump}", write, ".L_x_0:", "EXIT"))
    called = ("k:", product, "CALL.REL.NOINC `(f)", "EXIT", "f:", write, "RET.REL.NODEC R2 `(k)")
    assert sass.overwritten(code_of(*called))
    turns = ("k:", ".L_x_0:", product, f"BRA {jump}", write)
    assert not sass.overwritten(code_of(*turns))


def test_kernels_are_counted_by_triton_assembler_and_prologue() -> None:
    def line(plan: str, **overwritten: list[int]) -> dict[str, Any]:
        by_version = {name.replace("_", ".")[1:]: counts for name, counts in overwritten.items()}
        return {"triton": "3.6.0", "plan": plan, "overwritten": by_version}

    product, prologue = "f16[4x4] -> matmul(4)", "f16[4x4] -> relu -> matmul(4)"
    lines = [
        line(prologue, _12_8_93=[9, 0], _13_4_59=[0]),
        line(prologue, _12_8_93=[9, 3], _13_4_59=[0]),
        line(product, _12_8_93=[0]),
        line("f32[4x4] -> matmul(4)"),
    ]
    assert [list(each.values()) for each in summary(lines)] == [
        ["3.6.0", "12.8.93", "f16, bf16", 1, 0, 0],
        ["3.6.0", "12.8.93", "f16, bf16, a prologue", 2, 2, 1],
        ["3.6.0", "13.4.59", "f16, bf16, a prologue", 2, 0, 0],
    ]
