"""From tensors to launches on a GPU, without one: what a launch is given."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fuseplan
from fuseplan import Arguments
from fuseplan.backends.triton.memory import GpuMemory, packed
from fuseplan.errors import ArgumentError, BuildError
from fuseplan.kernels.emit import COUNTER_BYTES
from fuseplan.kernels.packing import Packing, Pad, Transpose
from pretend_gpu import Machine, PretendQueue, machine
from toy_chain import PLAN, SIZE, Tensors, ToyChain, chain, random_tensors, split, wanted
from toy_templates import ToyProduct


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One cache for the module: the toys are compiled once."""
    made = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FUSEPLAN_CACHE_DIR", str(made))
        yield made


@pytest.fixture
def gpu() -> Iterator[Machine]:
    with machine(ToyChain) as made:
        made.driver.meaning = chain
        yield made


@pytest.fixture
def tensors() -> Tensors:
    return random_tensors()


# ---- what is launched


def test_every_way_to_call_launches_the_same(gpu: Machine, tensors: Tensors) -> None:
    compiled = fuseplan.compile(PLAN, "cuda")
    src, given = split(tensors)
    arguments = Arguments(compiled.plan, **given)
    results = [
        compiled(src, **given),
        compiled.execute(src, arguments),
        compiled.bind(arguments)(src),
        compiled.bind(scale=given["scale"])(src, other=given["other"]),
        compiled.bind()(src, **given),
    ]
    for result in results:
        assert isinstance(result, torch.Tensor)
        torch.testing.assert_close(result, wanted(tensors))
    assert len(gpu.launches) == len(results)
    assert {(launch.stream, launch.device, launch.grid) for launch in gpu.launches} == {(7, 0, (4, 1, 1))}


def test_out_is_written_and_a_parameter_is_passed_by_value(gpu: Machine, tensors: Tensors) -> None:
    src, given = split(tensors)
    bound = fuseplan.compile(PLAN, "cuda").bind(**given, negative_slope=0.25)
    out = torch.full((4, 64), float("nan"))
    for _ in range(2):
        assert bound(src, out) is out
    torch.testing.assert_close(out, wanted(tensors, 0.25))
    torch.testing.assert_close(bound(src, negative_slope=-3.0), wanted(tensors, -3.0))
    torch.testing.assert_close(
        bound(src, out), wanted(tensors, 0.25), msg="one call's parameter does not stay"
    )
    assert [launch.arguments[3] for launch in gpu.launches] == [0.25, 0.25, -3.0, 0.25]
    assert fuseplan.compile(PLAN, "cuda")(src, **given, negative_slope=1e300).isinf().any()


def test_an_unbound_call_packs_nothing_that_lies_right_and_bind_copies(
    gpu: Machine, tensors: Tensors
) -> None:
    compiled = fuseplan.compile(PLAN, "cuda")
    src, given = split(tensors)
    compiled(src, **given)
    bound = compiled.bind(**given)
    assert gpu.queues[0].waits == 1, "what was copied is there before any stream reads it"
    bound(src)
    first, second = (launch.arguments[1] for launch in gpu.launches)
    assert first == given["scale"].data_ptr() != second
    assert all(launch.arguments[2] == given["other"].data_ptr() for launch in gpu.launches)
    given["scale"].zero_()
    assert bound(src).ne(given["other"]).any()


def test_operands_that_lie_otherwise_are_packed(gpu: Machine, tensors: Tensors) -> None:
    src, given = split(tensors)
    compiled = fuseplan.compile(PLAN, "cuda")
    every_third = given["scale"].repeat_interleave(3)[::3]
    misaligned = torch.cat([torch.zeros(1), given["scale"]])[1:]
    assert misaligned.data_ptr() % 16
    for scale in (every_third, misaligned):
        torch.testing.assert_close(compiled(src, scale=scale, other=given["other"]), wanted(tensors))


def test_each_stream_has_its_workspace_and_a_recorded_launch_its_own(gpu: Machine, tensors: Tensors) -> None:
    src, given = split(tensors)
    bound = fuseplan.compile(PLAN, "cuda").bind(**given)
    queue = gpu.queues[0]
    for stream, capturing in ((7, False), (8, False), (7, False), (7, True), (7, False)):
        queue.now, queue.capturing = stream, capturing
        bound(src)
    first, other, again, recorded, last = (launch.arguments[4] for launch in gpu.launches)
    assert first == again == last
    assert len({first, other, recorded}) == 3
    assert [launch.stream for launch in gpu.launches] == [7, 8, 7, 7, 7]


def test_a_launch_on_tensors_that_stay_is_one_call_on_its_stream(gpu: Machine, tensors: Tensors) -> None:
    src, given = split(tensors)
    bound = fuseplan.compile(PLAN, "cuda").bind(**given)
    out, queue = torch.full((4, 64), float("nan")), gpu.queues[0]
    launch = bound.launcher(src, out)
    assert not gpu.launches
    room = queue.workspace(7, 0)
    queue.now = 8
    larger = queue.workspace(7, 1 << 20)
    for status in (0, 201):  # of a thread without a context
        gpu.driver.statuses[:] = [status] if status else []
        src.mul_(-1.5)
        launch()
        torch.testing.assert_close(out, wanted(tensors))
    assert [each.stream for each in gpu.launches] == [7, 7]
    assert {each.arguments[4] for each in gpu.launches} == {room.address} != {larger.address}
    gpu.driver.statuses[:] = [700, 700]
    with pytest.raises(BuildError, match="refuses to launch"):
        launch()
    for bad, other in ((src, src), (src.double(), out), (src, torch.zeros(SIZE + 1)[1:].view(4, 64))):
        with pytest.raises(ArgumentError):
            bound.launcher(bad, other)


def test_a_launch_on_tensors_that_stay_keeps_packed_operands(gpu: Machine, tensors: Tensors) -> None:
    src, given = split(tensors)
    bound = fuseplan.compile(PLAN, "cuda").bind(**given)
    out = torch.empty(4, 64)  # which the caller keeps
    held, launch = weakref.ref(bound), bound.launcher(src, out)
    del bound
    gc.collect()
    assert held() is not None
    launch()
    del launch
    gc.collect()
    assert held() is None


def test_a_launch_on_tensors_that_stay_has_its_tensor_maps() -> None:
    with machine(ToyProduct) as gpu:
        compiled = fuseplan.compile("f16[8x32x4x4, nhwc] -> conv2d(32, kernel=1)", "cuda")
        bound = compiled.bind(weight=torch.randn(32, 32, 1, 1).half())
        src, out = (torch.randn(8, 32, 4, 4).half().to(memory_format=torch.channels_last) for _ in range(2))
        launches = [bound.launcher(src, out), bound.launcher(src.clone(), out)]
        encoded = len(gpu.driver.encodings)
        for launch in (*launches, *launches):
            launch()
        assert len(gpu.driver.encodings) == encoded
        places = [[each.encoded.address for each in launch.arguments] for launch in gpu.launches]
        assert places[:2] == places[2:]
        assert places[0][0] == src.data_ptr() != places[1][0]


def test_the_counters_of_a_workspace_are_zero() -> None:
    queue = PretendQueue(0)
    first = queue.workspace(7, COUNTER_BYTES + 64)
    assert first.tensor.numel() == COUNTER_BYTES + 64
    assert not first.tensor[:COUNTER_BYTES].any()
    assert queue.workspace(7, 64) is first, "plans of a stream share it"
    larger = queue.workspace(7, COUNTER_BYTES + 128)
    assert larger.address != first.address
    assert queue.workspace(7, 64) is larger
    queue.capturing = True
    larger.tensor.fill_(1)
    recorded = [queue.workspace(7, COUNTER_BYTES + 64) for _ in range(2)]
    assert len({room.address for room in (first, larger, *recorded)}) == 4
    assert not any(room.tensor[:COUNTER_BYTES].any() for room in recorded)


def test_the_default_stream_is_not_asked_whether_it_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = PretendQueue(0)
    asked: list[bool] = []
    monkeypatch.setattr(queue, "is_capturing", lambda: asked.append(True))
    room = queue.workspace(0, COUNTER_BYTES)
    assert queue.workspace(0, COUNTER_BYTES) is room
    assert not asked
    queue.workspace(7, COUNTER_BYTES)
    assert asked


def test_nothing_is_waited_for_while_a_graph_is_recorded(gpu: Machine, tensors: Tensors) -> None:
    src, given = split(tensors)
    compiled = fuseplan.compile(PLAN, "cuda")
    gpu.queues[0].capturing = True
    compiled.bind(**given)(src)
    assert gpu.queues[0].waits == 0


def test_tensor_maps_are_made_anew_only_for_new_addresses() -> None:
    torch.manual_seed(0)
    with machine(ToyProduct) as gpu:
        compiled = fuseplan.compile("f16[8x32x4x4, nhwc] -> conv2d(32, kernel=1)", "cuda")
        bound = compiled.bind(weight=torch.randn(32, 32, 1, 1).half())
        src = torch.randn(8, 32, 4, 4).half().to(memory_format=torch.channels_last)
        out = bound(src)
        for _ in range(3):
            bound(src, out)
        assert len(gpu.driver.encodings) == 3
        bound(src.clone(), out)
        assert len(gpu.driver.encodings) == 4


# ---- targets, devices, the cache


def test_a_plan_for_another_gpu_is_compiled_and_says_why_it_does_not_run(gpu: Machine) -> None:
    compiled = fuseplan.compile(PLAN, "triton:sm_80")
    assert compiled.program.code
    assert compiled.program.resources["registers"] > 0
    assert "def toy" in compiled.source.text
    told = json.loads(json.dumps(compiled.to_json()))
    assert "sm_90" in told["program"]["refusal"]
    src = torch.zeros(4, 64)
    for call in (
        lambda: compiled(src),
        compiled.bind,
        lambda: compiled.execute(src, Arguments(compiled.plan)),
    ):
        with pytest.raises(
            BuildError, match=r"code for triton:sm_80 does not run here: .* is triton:sm_90"
        ) as met:
            call()
        assert "program.code" in str(met.value)
    assert gpu.launches == []


def test_a_kind_that_this_machine_has_runs_on_the_current_gpu(gpu: Machine, tensors: Tensors) -> None:
    compiled = fuseplan.compile(PLAN, "triton:sm_90")
    assert compiled.target.device == 0
    src, given = split(tensors)
    torch.testing.assert_close(compiled(src, **given), wanted(tensors))


def test_equal_devices_share_the_code_and_not_what_is_loaded(gpu: Machine) -> None:
    first, second, again = (fuseplan.compile(PLAN, name).program for name in ("cuda", "cuda:1", "cuda:0"))
    assert first.key == second.key == again.key
    assert first.loaded is again.loaded is not second.loaded
    assert (again.origin, second.origin) == ("memory", "disk")
    assert (first.target.device, second.target.device) == (0, 1)


def test_threads_are_a_cpus(gpu: Machine) -> None:
    with pytest.raises(ArgumentError, match="threads=2 is for CPUs"):
        fuseplan.compile(PLAN, "cuda", threads=2)


LOADING = """
import sys
sys.path[:0] = [{tests!r}]
from pretend_gpu import machine
from toy_chain import PLAN, ToyChain
import fuseplan
assert "triton" not in sys.modules
with machine(ToyChain):
    program = fuseplan.compile(PLAN, "cuda").program
assert program.origin == "disk", program.origin
assert "triton" not in sys.modules
"""


def test_a_stored_plan_is_loaded_without_triton(gpu: Machine) -> None:
    fuseplan.compile(PLAN, "cuda")
    tests = str(Path(__file__).parent.parent)
    script = LOADING.format(tests=tests)
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


# ---- packing


@pytest.mark.parametrize("keep", [False, True])
def test_packing_is_the_templates(keep: bool) -> None:
    weight = torch.randn(6, 5, 3, 2, dtype=torch.float16)
    wanted = Packing((6, 5, 3, 2), "f32", (Transpose((0, 2, 3, 1)), Pad((8, 3, 2, 16))))
    got = packed(weight, wanted, keep=keep)
    assert got.is_contiguous()
    assert got.dtype is torch.float32
    torch.testing.assert_close(got[:6, :, :, :5], weight.permute(0, 2, 3, 1).float())
    assert not got[6:].any()
    assert not got[..., 5:].any()


def test_a_tensor_that_lies_so_is_not_copied_unless_it_is_kept() -> None:
    weight = torch.randn(6, 8, 3, 2, dtype=torch.float16).to(memory_format=torch.channels_last)
    as_it_is = Packing((6, 8, 3, 2), "f16", (Transpose((0, 2, 3, 1)),))
    assert packed(weight, as_it_is, keep=False).data_ptr() == weight.data_ptr()
    kept = packed(weight, as_it_is, keep=True)
    assert kept.data_ptr() != weight.data_ptr()
    assert torch.equal(kept, weight.permute(0, 2, 3, 1))


def test_a_new_result_lies_as_the_plan_says() -> None:
    made, address = GpuMemory(PretendQueue(0)).maker(fuseplan.TensorSpec((2, 3, 4, 5), "bf16", "nhwc"))(None)
    assert address == made.data_ptr()
    assert (made.dtype, made.stride()) == (torch.bfloat16, (60, 1, 15, 3))
