"""Compiled plans as files: saved, loaded without a compiler, run as compiled plans do; and other files."""

import hashlib
import json
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fuseplan
from fuseplan.backends.cpu import loader
from fuseplan.backends.triton.artifact import Artifact
from fuseplan.errors import ArgumentError, BuildError
from fuseplan.execution.saved import FORMAT, HEADER, Saved
from fuseplan.measure.data import random_arrays
from fuseplan.system import limits, tiles

PLAN = "f32[8x64] -> matmul(32) -> bias -> gelu"
PLANS = (
    PLAN,
    "f32[1x64x30x30, nhwc] -> conv2d(64, kernel=3, padding=1) -> bias -> relu",
    "f32[1x16x20x20] -> conv2d(24, kernel=5, stride=2, padding=2) -> batch_norm(per_activation)",
    "f32[1x64x28x28] -> conv2d(64, kernel=1) -> add -> leaky_relu(negative_slope=0.2)",
    "f32[1x32x30x30] -> conv2d(32, kernel=3, groups=32, padding=1) -> prelu",
    "bf16[2x32x14x14, nhwc] -> conv2d(32, kernel=3, groups=8) -> elu(alpha=0.3)",
    "f16[4x64x14x14, nhwc] -> batch_norm_training -> relu",
    "f64[8x64] -> tanh",
    "i8[8x64] -> dequantize(f16, per=row, zero_points=True) -> linear(16) -> quantize(f8e5m2, per=row)",
)
linux = pytest.mark.skipif(loader.refusal("avx2") is not None, reason="saved code runs on x86-64 under Linux")


def called(plan: Any, arrays: dict[str, Any]) -> list[Any]:
    """The tensors that a call gives, of copies of the arrays."""
    own = {key: array.copy(order="K") for key, array in arrays.items()}
    made = plan(own.pop("src"), **own)
    return list(made) if isinstance(made, tuple) else [made]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    reason = loader.refusal("avx2")
    if reason is not None:
        pytest.skip(reason)
    fuseplan.compile(PLAN, "cpu:avx2", threads=2).save(tmp_path / "layer.fpk")
    return tmp_path / "layer.fpk"


@linux
@pytest.mark.parametrize("text", PLANS)
def test_a_loaded_plan_computes_what_the_compiled_one_does(text: str, tmp_path: Path) -> None:
    compiled = fuseplan.compile(text, "cpu:avx2", threads=2)
    digest = compiled.save(tmp_path / "layer.fpk")
    loaded = fuseplan.load(tmp_path / "layer.fpk", sha256=digest)
    assert (loaded.plan, loaded.threads, loaded.output) == (compiled.plan, 2, compiled.output)
    assert loaded.workspace_bytes == compiled.workspace_bytes
    assert loaded.template == compiled.choice.template.text
    arrays = random_arrays(compiled.plan, 1)
    for got, want in zip(called(loaded, arrays), called(compiled, arrays), strict=True):
        np.testing.assert_array_equal(got, want)
    src = arrays.pop("src")
    bound = loaded.bind(**arrays)
    assert bound.missing == ()
    np.testing.assert_array_equal(called(bound, {"src": src})[0], called(compiled, {"src": src, **arrays})[0])


BLOCKED = """
import sys
class Blocked:
    def find_spec(self, name, *_):
        if name.split(".")[0] in ("llvmlite", "triton", "torch"):
            raise ImportError(name)
sys.meta_path.insert(0, Blocked())
import os, threading
import numpy as np
import fuseplan
layer = fuseplan.load(sys.argv[1])
given = dict(np.load(sys.argv[2]))
want, src = given.pop("want"), given.pop("src")
bound = layer.bind(**given)
assert np.array_equal(layer(src, **given), want)
calls = [threading.Thread(target=lambda: [bound(src) for _ in range(200)]) for _ in range(2)]
[call.start() for call in calls], [call.join() for call in calls]
child = os.fork()
if child == 0:
    os._exit(not np.array_equal(bound(src), want))
assert os.waitpid(child, 0)[1] == 0
assert np.array_equal(bound(src), want)
print(layer.threads)
"""


def test_loading_needs_no_compiler_and_threads_and_forks_work(tmp_path: Path, file: Path) -> None:
    compiled = fuseplan.compile(PLAN, "cpu:avx2", threads=2)
    arrays = random_arrays(compiled.plan, 2)
    given: dict[str, Any] = {"want": called(compiled, arrays)[0], **arrays}
    np.savez(tmp_path / "arrays.npz", **given)
    words = [sys.executable, "-c", BLOCKED, str(file), str(tmp_path / "arrays.npz")]
    run = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (0, "2\n"), run.stderr


def test_a_loaded_plan_refuses_what_the_compiled_one_does(file: Path) -> None:
    compiled, loaded = fuseplan.compile(PLAN, "cpu:avx2"), fuseplan.load(file)
    src, weight = np.zeros((8, 64), np.float32), np.zeros((64, 32), np.float32)
    wrong: tuple[Callable[[Any], object], ...] = (
        lambda plan: plan(src, weight=weight),
        lambda plan: plan(src.T, weight=weight, bias=weight[0]),
        lambda plan: plan(src, weight=weight.T, bias=weight[0]),
        lambda plan: plan.bind(wieght=weight),
        lambda plan: plan.execute(src, fuseplan.Arguments("f32[8x64] -> relu")),
    )
    for each in wrong:
        with pytest.raises(ArgumentError) as wanted:
            each(compiled)
        with pytest.raises(ArgumentError) as got:
            each(loaded)
        assert str(got.value) == str(wanted.value)


@linux
def test_autograd_notices_what_a_loaded_plan_writes(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    fuseplan.compile("f32[8x64] -> relu", "cpu:avx2").save(tmp_path / "relu.fpk")
    loaded, src, out = fuseplan.load(tmp_path / "relu.fpk"), torch.randn(8, 64), torch.empty(8, 64)
    before = out._version
    loaded(src, out)
    assert out._version > before
    assert torch.equal(out, src.relu())


# ---- files that are none


def refused(path: Path, **options: Any) -> str:
    with pytest.raises(ArgumentError) as error:
        fuseplan.load(path, **options)
    assert str(path) in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("kept", [9, HEADER.size - 1, HEADER.size + 10, -1])
def test_a_truncated_file_is_refused(file: Path, kept: int) -> None:
    file.write_bytes(file.read_bytes()[:kept])
    assert "it is cut off" in refused(file)


def test_every_altered_byte_is_noticed(file: Path) -> None:
    whole = file.read_bytes()
    for place in (20, HEADER.size + 3, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert "it was altered: its checksum does not match" in refused(file)


def test_another_format_is_refused(file: Path) -> None:
    whole = file.read_bytes()
    file.write_bytes(whole[:8] + (FORMAT + 1).to_bytes(4, "little") + whole[12:])
    assert f"its format is {FORMAT + 1}; this version of fuseplan reads {FORMAT}" in refused(file)


@pytest.mark.parametrize("content", [b"", b"\x80\x04\x95pickle", b"\x7fELF" + bytes(100)])
def test_a_foreign_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "foreign").write_bytes(content)
    assert "it is no file that `compiled.save(path)` wrote" in refused(tmp_path / "foreign")


def test_a_file_that_is_not_there_or_too_large_is_refused(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "No such file" in refused(tmp_path / "none.fpk")
    monkeypatch.setattr(limits, "SAVED_BYTES", 1000)
    assert "it has more than 1000 bytes" in refused(file)


def test_one_file_can_be_pinned(file: Path) -> None:
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert fuseplan.compile(PLAN, "cpu:avx2", threads=2).save(file) == digest
    assert "it is another file" in refused(file, sha256="0" * 64)
    assert fuseplan.load(file, sha256=digest.upper()).plan == fuseplan.FusionPlan.parse(PLAN)


def changed(file: Path, **members: Any) -> None:
    """Writes the file anew, its checksum right, with other members of its description."""
    data = file.read_bytes()
    _, _, _, head, code = HEADER.unpack_from(data)
    told = json.dumps(json.loads(data[HEADER.size : HEADER.size + head]) | members).encode()
    body = len(told).to_bytes(8, "little") + code.to_bytes(8, "little") + told + data[-code:]
    file.write_bytes(data[:12] + hashlib.sha256(body).digest() + body)


@pytest.mark.parametrize(
    ("members", "says"),
    [
        ({"plan": "f32[8x64] -> mystery"}, "mystery"),
        ({"plan": "f32[8x64] -> matmul(32) -> scale"}, "'scale'"),
        ({"target": "cpu"}, "its description cannot be read"),
        ({"source": {}}, "'entry'"),
        ({"packings": {"weight": [1], "bias": None}}, "values to unpack"),
    ],
)
def test_a_description_that_cannot_be_read_is_refused(file: Path, members: Any, says: str) -> None:
    changed(file, **members)
    assert says in refused(file)


@pytest.mark.parametrize(
    ("target", "says"),
    [
        (["cpu", "avx1024", 1], "there is no kind of processor 'avx1024'"),
        (["triton", "gfx942", 1], "code for triton:gfx942 does not run here"),
        (["reference", "", 1], "it has no code"),
    ],
)
def test_another_machine_is_refused(file: Path, target: list[Any], says: str) -> None:
    changed(file, target=target)
    with pytest.raises(BuildError, match=says):
        fuseplan.load(file)


def test_a_processor_that_lacks_a_flag_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    (tmp_path / "cpuinfo").write_text(
        "processor\t: 0\nflags\t\t: fpu avx2 fma f16c bmi1 bmi2 abm movbe popcnt\n"
    )
    assert loader.refusal("avx2", tmp_path / "cpuinfo") is None
    lacking = loader.refusal("avx512", tmp_path / "cpuinfo")
    assert lacking == "this processor has no avx512bw, avx512cd, avx512dq, avx512f, avx512vl"
    held = " ".join(loader.FLAGS["amx"])
    (tmp_path / "cpuinfo").write_text(f"flags\t\t: {held}\n")
    for permitted, says in (
        (True, None),
        (False, "Linux does not let this process use the processor's tiles (AMX)"),
    ):
        monkeypatch.setattr(tiles, "permitted", lambda permitted=permitted: permitted)
        assert loader.refusal("amx", tmp_path / "cpuinfo") == says
    monkeypatch.setattr("sys.platform", "darwin")
    assert "this machine is darwin on x86_64" in str(loader.refusal("avx2"))


@pytest.mark.parametrize("kind", ["cpu:avx512bf16", "cpu:amx"])
def test_products_of_bf16_are_saved_for_kinds_that_have_them(kind: str, tmp_path: Path) -> None:
    refusal = loader.refusal(kind.removeprefix("cpu:"))
    if refusal is not None:
        pytest.skip(refusal)
    compiled = fuseplan.compile("bf16[20x64] -> linear(32) -> bias", kind)
    compiled.save(tmp_path / "product.fpk")
    arrays = random_arrays(compiled.plan, 1)
    loaded = fuseplan.load(tmp_path / "product.fpk")
    np.testing.assert_array_equal(loaded(**arrays), compiled(**arrays))


def test_what_has_no_code_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="it has no code to save"):
        fuseplan.compile("f32[8x64] -> relu", "reference").save(tmp_path / "none.fpk")
    assert not (tmp_path / "none.fpk").exists()


@pytest.mark.parametrize("code", [b"", b"\x7fELF", b"\x7fELF\x02\x01" + bytes(200), b"MZ" + bytes(200)])
def test_code_that_is_no_object_is_refused(code: bytes) -> None:
    with pytest.raises(BuildError, match="the object code cannot be linked"):
        loader.load(code, ("kernel",))


def test_the_linker_refuses_unknown_functions_and_symbols(file: Path) -> None:
    from fuseplan.backends.cpu import toolchain
    from fuseplan.kernels.target import KINDS

    code = Saved.unpack(file.read_bytes()).code
    with pytest.raises(BuildError, match="'absent'"):
        loader.load(code, ("absent",))
    text = (
        "declare void @system(ptr)\ndefine void @kernel(ptr %x) {\n call void @system(ptr %x)\n ret void\n}\n"
    )
    with pytest.raises(BuildError, match="it refers to 'system'"):
        loader.load(toolchain.portable_object(text, KINDS["cpu:avx2"]), ("kernel",))


def test_code_lives_as_long_as_its_addresses(file: Path) -> None:
    found = loader.load(Saved.unpack(file.read_bytes()).code, ("kernel", "launch"))
    image = weakref.ref(found["kernel"].held)
    del found["launch"]
    assert image() is not None
    del found
    assert image() is None


# ---- GPUs


def test_a_loaded_plan_runs_on_its_kind_of_gpu_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    from posing import CUDA_0, posing

    text = "f16[16x64] -> matmul(32) -> bias -> relu"
    with posing():
        compiled = fuseplan.compile(text, CUDA_0, cache=False, template="product")  # Gluon's do not run here
        compiled.save(tmp_path / "layer.fpk")
        with pytest.raises(BuildError, match="code for triton:sm_90 does not run here"):
            fuseplan.load(tmp_path / "layer.fpk")
        monkeypatch.setattr("fuseplan.backends.triton.backend.gpu_target", lambda: CUDA_0)
        loaded = fuseplan.load(tmp_path / "layer.fpk")
        assert (loaded.plan, str(loaded.target), loaded.target.device) == (compiled.plan, "triton:sm_90", 0)
        src, weight, bias = torch.randn(16, 64).half(), torch.randn(64, 32).half(), torch.randn(32).half()
        want = compiled(src, weight=weight, bias=bias)
        assert torch.equal(loaded.bind(weight=weight, bias=bias)(src), want)


def test_code_for_a_gpu_is_saved_on_a_machine_without_one(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    text = "f32[16x64] -> bias -> relu"
    fuseplan.compile(text, "triton:sm_90").save(tmp_path / "layer.fpk")
    saved = Saved.unpack((tmp_path / "layer.fpk").read_bytes())
    assert (str(saved.plan), str(saved.target), saved.target.device) == (text, "triton:sm_90", None)
    assert Artifact.unpack(saved.code).architecture == "sm_90"
    assert "triton" in saved.toolchain


@linux
def test_files_carried_to_another_machine_are_checked_there(tmp_path: Path) -> None:
    """The script for GPUs, on a CPU."""
    pytest.importorskip("torch")
    from device import carried

    assert carried.build(tmp_path, "cpu:avx2", PLANS[:3:2]) == 2
    lines = list(carried.run(tmp_path, times=False))
    assert [line["plan"] for line in lines] == [str(fuseplan.FusionPlan.parse(text)) for text in PLANS[:3:2]]
    assert all(line["right"] for line in lines)
