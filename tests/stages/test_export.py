"""Kernels as files for programs without Python: C programs that link them, and binaries for GPUs."""

import ctypes
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import fuseplan
from fuseplan.backends.cpu import loader
from fuseplan.cli.commands import fuseplan as command
from fuseplan.errors import ArgumentError, BuildError
from fuseplan.execution.stages import decide
from fuseplan.export.c import CObject
from fuseplan.export.packings import pack_function
from fuseplan.kernels.packing import Halves, Join, Packing, Pad, Product, Reshape, Thirds, Tiles, Transpose
from fuseplan.language.dtypes import dtype_of
from fuseplan.measure.data import random_arrays
from fuseplan.plans.plan import FusionPlan
from fuseplan.system import limits
from fuseplan.tensors.arrays import aligned_copy

GCC = shutil.which("gcc") or shutil.which("cc")
PLAN = "f32[8x60] -> matmul(33) -> bias -> leaky_relu(0.3)"
PROGRAM = """
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include "layer.h"

static void *block;

static void *part(void *thread) {
    layer_run(block, (int64_t)(intptr_t)thread, 2);
    return NULL;
}

static float *read_floats(const char *path, size_t count) {
    float *values = malloc(count * sizeof *values);
    FILE *file = fopen(path, "rb");
    if (!file || fread(values, sizeof *values, count, file) != count) exit(2);
    fclose(file);
    return values;
}

int main(void) {
    float *src = read_floats("src", 8 * 60), *from = read_floats("weight", 60 * 33);
    float *bias_from = read_floats("bias", 33), *dst = calloc(2 * 8 * 33, sizeof *dst);
    float *weight = aligned_alloc(64, LAYER_WEIGHT_ELEMENTS * sizeof *weight);
    float *bias = aligned_alloc(64, LAYER_BIAS_ELEMENTS * sizeof *bias);
    layer_pack_weight(from, weight);
    layer_pack_bias(bias_from, bias);
    layer(src, dst, weight, bias);

    block = malloc(LAYER_BLOCK_BYTES);
    layer_prepare(block, src, dst + 8 * 33, weight, bias);
    pthread_t other;
    pthread_create(&other, NULL, part, (void *)1);
    part((void *)0);
    pthread_join(other, NULL);
    return fwrite(dst, sizeof *dst, 2 * 8 * 33, stdout) != 2 * 8 * 33;
}
"""


def compiled_with(folder: Path, *words: str) -> None:
    """Runs the C compiler, strictly."""
    strictly = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-O1", "-Wno-unused-function"]
    run = subprocess.run(
        [str(GCC), *strictly, *words], cwd=folder, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr


@pytest.fixture
def c_compiler() -> None:
    if GCC is None:
        pytest.skip("there is no C compiler on this machine")
    reason = loader.refusal("avx2")
    if reason is not None:
        pytest.skip(reason)


def exported(*words: str) -> str:
    told = CliRunner().invoke(command, ["export", *words])
    assert told.exit_code == 0, told.output
    return told.output


@pytest.mark.usefixtures("c_compiler")
def test_a_c_program_links_and_calls_a_kernel_on_one_thread_and_on_two(tmp_path: Path) -> None:
    printed = exported(PLAN, "--target", "cpu:avx2", "-o", str(tmp_path / "layer.o"))
    assert f"{tmp_path / 'layer.h'}: " in printed
    (tmp_path / "main.c").write_text(PROGRAM)
    compiled_with(tmp_path, "main.c", "layer.o", "-pthread", "-o", "program")
    arrays = random_arrays(FusionPlan.parse(PLAN), 3)
    for key, array in arrays.items():
        array.tofile(tmp_path / key)
    run = subprocess.run([tmp_path / "program"], cwd=tmp_path, capture_output=True, check=True)
    got = np.frombuffer(run.stdout, np.float32).reshape(2, 8, 33)
    want = fuseplan.compile(PLAN, "cpu:avx2", threads=1)(arrays.pop("src"), **arrays)
    np.testing.assert_allclose(got[0], want, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(got[1], got[0])


@pytest.mark.usefixtures("c_compiler")
@pytest.mark.parametrize(
    ("text", "held"),
    [
        ("f32[1x64x14x14, nhwc] -> conv2d(64, kernel=3, padding=1) -> bias -> relu", ("weight", "bias")),
        ("f32[1x64x14x14] -> conv2d(32, kernel=1) -> add -> relu", ("weight",)),
        ("f32[1x16x9x9] -> conv2d(16, kernel=3, groups=16, padding=1) -> prelu", ()),
        ("f16[2x32x14x14, nhwc] -> batch_norm_training -> relu", ("scale",)),
        ("i8[9x64] -> dequantize(per=row) -> linear(16) -> quantize(f8e4m3, per=row)", ("weight", "scale_2")),
        ("f32[*x64] -> linear(16) -> bias -> relu", ("bias",)),
        ("f32[*x3x48] -> add -> save(total) -> layer_norm", ()),
    ],
)
def test_an_exported_kernel_computes_what_the_compiled_one_does(
    text: str, held: tuple[str, ...], tmp_path: Path
) -> None:
    """Some operands are in the object, the others are packed by the header's functions."""
    plan = FusionPlan.parse(text).with_extents(*[9] * text.count("*"))
    arrays = random_arrays(plan, 4)
    np.savez(tmp_path / "held.npz", **{key: arrays[key] for key in held})
    words = [text, "--target", "cpu:avx2", "--threads", "1", "--name", "block7"]
    exported(*words, "--weights", str(tmp_path / "held.npz"), "-o", str(tmp_path / "block.o"))
    compiled = fuseplan.compile(text, "cpu:avx2", threads=1)
    made = CObject(compiled.records, "block7", {key: arrays[key] for key in held})
    assert (tmp_path / "block.h").read_text() == made.header
    calls, given, values = [], [], {}
    for argument in made.arguments:
        if argument.name == "workspace":
            values["workspace"] = np.zeros(compiled.source.at(9).workspace(1) + 64, np.uint8)
            given.append(-values["workspace"].ctypes.data % 64 + values["workspace"].ctypes.data)
            continue
        if argument.name == "extent":
            given.append(9)
            continue
        packing = made.packings.get(argument.name.removesuffix("_saved"))
        if argument.name == "dst":
            values["dst"] = fuseplan.empty(plan.output)
        elif packing is not None:
            values[argument.name] = aligned_copy(np.zeros(packing.extents, np.float32))
            calls.append(argument.name)
        elif argument.name in arrays:
            values[argument.name] = arrays[argument.name].copy(order="K")
        else:
            result = next(each for each in plan.results if each.key == argument.name.removesuffix("_saved"))
            values[argument.name] = np.zeros(result.shape, np.float32)
        given.append(values[argument.name].ctypes.data)
    calling = "".join(
        f"void pack_{key}(const float *x, float *y) {{ block7_pack_{key}(x, y); }}\n" for key in calls
    )
    (tmp_path / "calls.c").write_text(f'#include "block.h"\n{calling}')
    compiled_with(tmp_path, "-shared", "-fPIC", "calls.c", "block.o", "-o", "block.so")
    library = ctypes.CDLL(str(tmp_path / "block.so"))
    for key in calls:
        operand = np.ascontiguousarray(arrays[key].astype(np.float32))
        getattr(library, f"pack_{key}")(
            ctypes.c_void_p(operand.ctypes.data), ctypes.c_void_p(values[key].ctypes.data)
        )
    library.block7(*map(ctypes.c_void_p, given))
    own = {key: array.copy(order="K") for key, array in arrays.items()}
    want = compiled(own.pop("src"), **own)
    saved = {"element": "_saved"}
    names = ("dst", *(f"{result.key}{saved.get(result.per, '')}" for result in plan.results))
    for name, tensor in zip(names, want if isinstance(want, tuple) else (want,), strict=True):
        np.testing.assert_allclose(values[name], tensor, rtol=1e-5, atol=1e-5)


def test_an_open_extent_is_an_argument(tmp_path: Path) -> None:
    plans = ("f32[*x48] -> layer_norm", False), ("f32[*x24x9x9] -> conv2d(40, kernel=3, padding=1)", True)
    for text, has_workspace in plans:
        exported(text, "--target", "cpu:avx2", "--name", "made", "-o", str(tmp_path / "made.o"))
        header = (tmp_path / "made.h").read_text()
        assert "int64_t extent);" in header
        assert "extent: elements along the open axes" in header
        assert ("#define MADE_WORKSPACE_BYTES(threads, extent)" in header) == has_workspace


CHAINS = (
    (),
    (Reshape((20,)), Pad((24,))),
    (Transpose((1, 0)), Pad((8, 5)), Reshape((2, 4, 5)), Transpose((0, 2, 1))),
    (Tiles(1, 3), Transpose((1, 0, 2))),
    (Reshape((2, 10)), Product(((1.0, 0.5), (0.1, 0.2), (0.3, -1.0))), Pad((3, 16)), Reshape((3, 4, 4))),
    (Transpose((1, 0)), Join(((Pad((6, 8)),), (Reshape((20,)),)))),
    (Transpose((1, 0)), Pad((5, 8)), Reshape((5, 2, 4)), Thirds(1)),
)


@pytest.mark.usefixtures("c_compiler")
def test_packing_in_c_gives_the_bytes_of_numpys(tmp_path: Path) -> None:
    packings = [Packing((4, 5), "f32", steps) for steps in CHAINS]
    listed = [pack_function(f"f{place}", each) for place, each in enumerate(packings)]
    text = "#include <stdint.h>\n" + "\n".join(each.removeprefix("static inline ") for each in listed)
    (tmp_path / "packing.c").write_text(text)
    compiled_with(tmp_path, "-shared", "-fPIC", "packing.c", "-o", "packing.so")
    library = ctypes.CDLL(str(tmp_path / "packing.so"))
    whole = np.random.default_rng(1).standard_normal((4, 5)).astype(np.float32)
    for place, packing in enumerate(packings):
        if packing.made == "bf16":
            whole.flat[:4] = np.inf, -np.inf, np.nan, np.finfo(np.float32).max
        got = np.full(packing.extents, 7, dtype_of(packing.made).array)
        getattr(library, f"f{place}")(ctypes.c_void_p(whole.ctypes.data), ctypes.c_void_p(got.ctypes.data))
        np.testing.assert_array_equal(got, packing.of(whole))


def test_a_step_without_c_is_refused() -> None:
    with pytest.raises(ValueError, match="has no code in C"):
        pack_function("f", Packing((4, 5), "f32", (Halves(),)))


def test_an_object_for_another_processor(tmp_path: Path) -> None:
    exported(PLAN, "--target", "cpu:neon", "-o", str(tmp_path / "layer.o"), "--header", str(tmp_path / "a.h"))
    assert (tmp_path / "layer.o").read_bytes()[18:20] == (183).to_bytes(2, "little"), (
        "it is no object for aarch64"
    )
    assert "Code for cpu:neon" in (tmp_path / "a.h").read_text()


def test_a_header_says_that_tiles_need_permission() -> None:
    for plan, says in (("bf16[20x64] -> linear(32)", True), ("f16[20x64] -> linear(32)", False)):
        header = CObject(decide(plan, "cpu:amx"), "product", {}).header
        assert ("SYS_arch_prctl" in header) == says


TILED = """
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>
#include "layer.h"

int main(void) {
    static uint16_t src[20 * 64], dst[20 * 32];
    if (syscall(SYS_arch_prctl, 0x1023, 18) || fread(src, 2, 20 * 64, stdin) != 20 * 64) return 1;
    layer(src, dst, aligned_alloc(64, LAYER_WORKSPACE_BYTES(1)));
    return fwrite(dst, 2, 20 * 32, stdout) != 20 * 32;
}
"""


@pytest.mark.usefixtures("c_compiler")
def test_a_c_program_asks_for_tiles_and_uses_them(tmp_path: Path) -> None:
    if loader.refusal("amx"):
        pytest.skip(str(loader.refusal("amx")))
    plan = "bf16[20x64] -> linear(32)"
    compiled = fuseplan.compile(plan, "cpu:amx", threads=1)
    arrays = random_arrays(compiled.plan, 1)
    np.savez(tmp_path / "weights.npz", weight=arrays["weight"].view(np.uint16))
    words = [plan, "--target", "cpu:amx", "--weights", str(tmp_path / "weights.npz"), "--threads", "1"]
    exported(*words, "--name", "layer", "-o", str(tmp_path / "layer.o"))
    (tmp_path / "main.c").write_text(TILED)
    compiled_with(tmp_path, "main.c", "layer.o", "-o", "main")
    src = np.ascontiguousarray(arrays["src"]).tobytes()
    made = subprocess.run([tmp_path / "main"], input=src, capture_output=True, check=True).stdout
    want = np.ascontiguousarray(compiled(**arrays)).view(np.uint16)
    np.testing.assert_array_equal(np.frombuffer(made, np.uint16).reshape(20, 32), want)


def test_only_the_documented_functions_can_be_linked_with(tmp_path: Path) -> None:
    code = CObject(decide(PLAN, "cpu:avx2"), "layer", {}).object
    for name in (b"layer\0", b"layer_prepare\0", b"layer_run\0"):
        assert name in code
    assert b"kernel\0" not in code


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--name", "2x"], "'2x' is no name of a C function"),
        (["--target", "reference"], "it interprets plans"),
        (["--target", "triton:sm_90", "--name", "layer"], "are for C"),
        (["--weights", "none.npz"], "none.npz holds no weights"),
    ],
)
def test_what_cannot_be_exported_is_refused(words: list[str], says: str, tmp_path: Path) -> None:
    told = CliRunner().invoke(command, ["export", PLAN, "-o", str(tmp_path / "layer.o"), *words])
    assert told.exit_code != 0
    assert says in told.output
    assert list(tmp_path.iterdir()) == []


def test_weights_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(**arrays: Any) -> str:
        np.savez(tmp_path / "weights.npz", **arrays)
        words = ["export", PLAN, "-o", str(tmp_path / "x.o"), "--weights", str(tmp_path / "weights.npz")]
        told = CliRunner().invoke(command, words)
        assert told.exit_code != 0
        return told.output

    assert "wieght" in refused(wieght=np.zeros((60, 33), np.float32))
    assert "has the wrong shape" in refused(weight=np.zeros((33, 61), np.float32))
    assert "allow_pickle=False" in refused(weight=np.array([{}], dtype=object))
    monkeypatch.setattr(limits, "WEIGHTS_BYTES", 10)
    assert "it has more than 10 bytes" in refused(weight=np.zeros((60, 33), np.float32))


def test_an_unknown_kind_of_processor_has_no_object() -> None:
    from dataclasses import replace

    records = decide(PLAN, "cpu:avx2")
    odd = replace(records, target=replace(records.target, name="baseline"))
    with pytest.raises(BuildError, match="take cpu:avx2, cpu:avx512, cpu:avx512bf16, cpu:amx, cpu:neon"):
        CObject(odd, "layer", {})
    with pytest.raises(ArgumentError, match="is no name"):
        CObject(records, "a b", {})


def test_a_gpus_kernel_is_files_that_its_vendors_tools_read(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    text = "f16[256x512] -> matmul(512) -> bias -> add -> leaky_relu(0.3)"
    exported(text, "--target", "triton:sm_90", "-o", str(tmp_path / "layer.cubin"))
    told = json.loads((tmp_path / "layer.json").read_text())
    assert (tmp_path / told["binary"]).read_bytes().startswith(b"\x7fELF")
    ptx = (tmp_path / told["assembly"]).read_text()
    entry = ptx[ptx.index(f".visible .entry {told['entry']}(") :]
    assert entry[: entry.index(")")].count(".param ") == len(told["arguments"])
    assert told["operands"]["bias"]["packed"] == {"dtype": "f32", "shape": [512], "elements": 512}
    assert told["operands"]["other"] == {"tensor": "f16[256x512]"}
    slots = [each["slot"] for each in told["arguments"] if "slot" in each]
    assert slots[-2:] == ["scratch", "scratch"]
    assert {"src", "dst", "operand:weight", "operand:bias", "operand:other"} <= set(slots)
    assert told["block"][0] % 32 == 0
    assert FusionPlan.parse(told["plan"]) == FusionPlan.parse(text)
    assert "open" not in told


def test_a_gpus_kernel_with_an_open_axis_says_how_it_is_launched(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    text = "f16[*x48] -> bias -> relu"
    exported(text, "--target", "triton:sm_90", "-o", str(tmp_path / "layer.cubin"))
    told = json.loads((tmp_path / "layer.json").read_text())
    programs = told["open"]["programs"]
    assert {"slot": "extent", "type": "i64"} in told["arguments"]
    tiles = -(-1000 * programs["rows"] // programs["tile"])
    assert fuseplan.compile(text, "triton:sm_90").source.at(1000).grid[0] == tiles * programs["across"]


def test_the_copy_of_an_odd_src_is_in_an_exported_workspace(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    text = "bf16[*x4099] -> matmul(4096) -> bias"
    exported(text, "--target", "triton:sm_90", "--template", "hopper", "-o", str(tmp_path / "layer.cubin"))
    told = json.loads((tmp_path / "layer.json").read_text())
    copied = next(
        each["map"] for each in told["arguments"] if each.get("slot") == "workspace" and "map" in each
    )
    assert (told["workspace_bytes"], told["cooperative"], copied["begin"]) == (4096, True, 4096)
    assert told["open"]["workspace_bytes_per_extent"] == 2 * copied["strides"][0]


def test_the_object_has_a_name() -> None:
    told = CliRunner().invoke(command, ["export", "f32[2x3] -> relu", "-o", ""])
    assert (told.exit_code, "--output has no file's name" in told.output) == (2, True), told.output
