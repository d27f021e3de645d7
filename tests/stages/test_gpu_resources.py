"""What toolchains say of a kernel, read; and how many programs a multiprocessor holds."""

import pytest

from fuseplan.backends.triton.resources import amd, amd_programs, nvidia, nvidia_programs

LOG = """ptxas info    : 0 bytes gmem
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to
insufficient register resources for the wgmma pipeline in the function 'fused'
ptxas info    : Compiling entry function 'fused' for 'sm_90a'
ptxas info    : Function properties for fused
    24 bytes stack frame, 20 bytes spill stores, 36 bytes spill loads
ptxas info    : Used 168 registers, used 3 barriers, 24 bytes cumulative stack size
"""
PTX = """
wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {%r1}, %rd1, %rd2, 1, 1, 1, 0, 0;
cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r2, %r3}], [%r4];
cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%rd1, {%r2, %r3, %r4, %r5}], [%r1];
setmaxnreg.dec.sync.aligned.u32 24;
"""
AMDGCN = """
    v_mfma_f32_32x32x8_f16 a[0:15], v[0:1], v[2:3], a[0:15]
    buffer_load_dwordx4 v[0:3], v4, s[0:3], 0 offen
    global_load_dwordx4 v[0:3], v[4:5], off
  - .agpr_count:     64
    .private_segment_fixed_size: 48
    .vgpr_count:     130
    .vgpr_spill_count: 3
"""


def test_nvidia() -> None:
    used = nvidia(LOG, PTX, "sm_90", threads=384, shared_bytes=200_000)
    assert used["registers"] == 168
    assert (used["spill_bytes"], used["stack_bytes"], used["serialized"]) == (56, 24, 1)
    assert (used["wgmma"], used["tma_loads"], used["tma_stores"], used["register_moves"]) == (1, 1, 1, 1)
    assert (used["mma"], used["async_copies"], used["programs"]) == (0, 0, 1)
    assert not nvidia("Used 8 registers", "", "sm_90", 128, 0)["serialized"]


def test_amd() -> None:
    used = amd(AMDGCN, "gfx942", threads=512, shared_bytes=32768, warp=64)
    assert (used["registers"], used["accumulator_registers"]) == (130, 64)
    assert (used["spill_bytes"], used["stack_bytes"], used["programs"]) == (12, 48, 1)
    assert (used["mfma"], used["buffer_loads"], used["global_loads"], used["wmma"]) == (1, 1, 1, 0)


@pytest.mark.parametrize(
    ("registers", "threads", "shared_bytes", "programs"),
    [
        (32, 128, 0, 16),  # warps: 64
        (16, 32, 0, 32),  # programs: 32
        (168, 384, 0, 1),  # registers: 12 warps of 5376 in 4 partitions of 16384
        (168, 128, 0, 3),
        (255, 256, 0, 1),
        (64, 128, 113 * 1024, 2),  # shared memory: 228 KiB, of which each program takes one more
        (64, 128, 114 * 1024, 1),
        (64, 128, 227 * 1024, 1),
        (64, 128, 228 * 1024, 0),
    ],
)
def test_programs_of_an_h100(registers: int, threads: int, shared_bytes: int, programs: int) -> None:
    assert nvidia_programs("sm_90", registers, threads, shared_bytes) == programs


def test_programs_of_kinds_that_are_not_known() -> None:
    assert nvidia_programs("sm_75", 32, 128, 0) == 0


@pytest.mark.parametrize(
    ("kind", "registers", "waves", "shared_bytes", "programs"),
    [
        ("gfx942", 64, 4, 0, 8),  # eight waves of each of four units
        ("gfx942", 128, 4, 0, 4),
        ("gfx942", 64, 4, 65536, 1),
        ("gfx950", 64, 4, 65536, 2),
        ("gfx1100", 96, 4, 0, 16),
    ],
)
def test_programs_of_a_compute_unit(
    kind: str, registers: int, waves: int, shared_bytes: int, programs: int
) -> None:
    assert amd_programs(kind, registers, waves, shared_bytes) == programs
