"""Streams, graphs, devices, tensors of other libraries, and tensors too large for 32-bit offsets."""

import threading
from typing import Any

import pytest
import torch

from device.guarded import inputs, output, wanted, worst
from fuseplan.backends.triton import driver as drivers
from fuseplan.compile import CompiledPlan
from fuseplan.compile import compile as compile_plan
from fuseplan.measure.spaces import empty
from fuseplan.system import limits

PLANS = (
    "f16[4x64x15x13, nhwc] -> batch_norm -> add -> relu",
    "f16[4x64x14x14, nhwc] -> conv2d(64, kernel=3, padding=1) -> bias -> relu",
    "bf16[64x2048] -> matmul(256) -> bias -> gelu(approximate=tanh)",
)
GIB = 1 << 30
MEMORY_NEEDED = 40 * GIB  # of the largest test here


class Prepared:
    """A plan compiled and bound to random tensors, with what it has to give."""

    def __init__(self, text: str, target: str = "cuda", seed: int = 1) -> None:
        self.compiled: CompiledPlan = compile_plan(text, target)
        device = f"cuda:{self.compiled.target.device}"
        self.tensors = inputs(self.compiled.plan, seed, device)
        self.want, self.allowed = wanted(self.compiled, self.tensors)
        self.src = self.tensors["src"]
        self.operands = {key: tensor for key, tensor in self.tensors.items() if key != "src"}
        self.bound = self.compiled.bind(**self.operands)

    def is_right(self, got: Any) -> bool:
        return worst(got, self.want, self.allowed) <= 1


@pytest.mark.parametrize("text", PLANS)
def test_calls_bound_unbound_and_without_out(text: str) -> None:
    made = Prepared(text)
    out = output(made.compiled.plan)
    assert made.compiled(made.src, out.tensor, **made.operands) is out.tensor
    assert made.is_right(out.tensor)
    for _ in range(3):  # the first is checked, later ones take the short way
        fresh = made.bound(made.src)
        assert fresh.stride() == made.compiled.plan.output.element_strides
        assert made.is_right(fresh)


@pytest.mark.parametrize("text", PLANS)
def test_the_current_stream_is_used(text: str) -> None:
    """What is launched on a stream comes after what that stream does before, and before what it does next."""
    made, stream = Prepared(text), torch.cuda.Stream()
    out = output(made.compiled.plan).tensor
    kept = made.src.clone()
    torch.cuda.synchronize()
    for _ in range(10):
        made.src.fill_(float("nan"))
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(2_000_000)  # a millisecond, before which src is not yet what it will be
            made.src.copy_(kept)
            made.bound(made.src, out)
            copied = out.clone()
        stream.synchronize()
        assert made.is_right(copied)


@pytest.mark.parametrize("text", PLANS)
def test_a_cuda_graph_runs_again_on_new_data(text: str) -> None:
    made, other = Prepared(text), Prepared(text, seed=2)
    first, second = made.src.clone(), output(made.compiled.plan)
    made.bound(first, second.tensor)  # what is allocated once is allocated now
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made.bound(first, second.tensor)
        again = made.bound(first)
    for src in (made.src, other.src, made.src):
        first.copy_(src)
        second.tensor.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        want = made.bound(src)
        assert torch.equal(second.tensor, want) or worst(second.tensor, want.double(), 2 * made.allowed) <= 1
        assert (
            torch.equal(again, second.tensor) or worst(again, second.tensor.double(), 2 * made.allowed) <= 1
        )
    assert made.is_right(second.tensor)
    assert second.stands


def test_threads_share_a_bound_plan() -> None:
    made = Prepared(PLANS[1])
    wrong: list[object] = []

    def work() -> None:
        stream = torch.cuda.Stream()
        with torch.no_grad(), torch.cuda.stream(stream):
            for _ in range(50):
                out = output(made.compiled.plan)
                made.bound(made.src, out.tensor)
                stream.synchronize()
                if not made.is_right(out.tensor) or not out.stands:
                    wrong.append(out)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("text", PLANS)
def test_each_device_runs_its_own(text: str) -> None:
    for index in range(torch.cuda.device_count()):
        made = Prepared(text, f"cuda:{index}")
        assert made.is_right(made.bound(made.src))  # whatever device is current


def test_parameters_change_without_compiling() -> None:
    compiled = compile_plan("f32[3x5] -> leaky_relu", "cuda")
    src = torch.randn(3, 5, device="cuda")
    bound = compiled.bind(negative_slope=0.5)
    assert torch.equal(bound(src), torch.nn.functional.leaky_relu(src, 0.5))
    assert torch.equal(bound(src, negative_slope=0.25), torch.nn.functional.leaky_relu(src, 0.25))
    assert torch.equal(bound(src), torch.nn.functional.leaky_relu(src, 0.5))


class _Foreign:
    """A tensor as a library that speaks only one protocol shows it."""

    def __init__(self, tensor: Any, protocol: str) -> None:
        self._tensor = tensor
        if protocol == "__dlpack__":
            self.__dlpack__ = tensor.__dlpack__
            self.__dlpack_device__ = tensor.__dlpack_device__
        else:
            self.__cuda_array_interface__ = tensor.__cuda_array_interface__


@pytest.mark.parametrize("protocol", ["__dlpack__", "__cuda_array_interface__"])
def test_tensors_of_other_libraries(protocol: str) -> None:
    made = Prepared("f16[4x64x14x14] -> batch_norm -> add -> relu")
    out = output(made.compiled.plan)
    made.bound(_Foreign(made.src, protocol), _Foreign(out.tensor, protocol))
    assert made.is_right(out.tensor)


def test_nothing_is_allocated_by_a_call_with_out() -> None:
    made = Prepared(PLANS[2])
    out = output(made.compiled.plan).tensor
    made.bound(made.src, out)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(10):
        made.bound(made.src, out)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


LARGE = (
    "f16[33x64x1024x1024, nhwc] -> bias -> relu",
    "f16[33x64x1024x1024] -> scale -> relu",
    "f16[2098000x1024] -> matmul(16) -> bias -> relu",
    "f16[524500x32] -> matmul(4096) -> bias -> relu",
    "f16[33x64x1024x1024, nhwc] -> conv2d(8, kernel=1) -> bias -> relu",
    "f16[33x8x1024x1024, nhwc] -> conv2d(64, kernel=3, padding=1) -> bias -> relu",
    "f16[33x64x1024x1024, nhwc] -> conv2d(64, kernel=3, padding=1, groups=64) -> bias -> relu",
)


@pytest.mark.parametrize("text", LARGE)
def test_tensors_of_more_than_2_to_the_31_elements(text: str) -> None:
    """The last image or rows, which 32-bit offsets do not reach, against the same plan on them alone."""
    free = torch.cuda.mem_get_info()[0]
    if free < MEMORY_NEEDED:
        pytest.skip(f"needs {MEMORY_NEEDED / GIB:.0f} GiB of free memory, has {free / GIB:.0f}")
    compiled = compile_plan(text, "cuda")
    plan = compiled.plan
    assert max(plan.src.size, plan.output.size) > 2**31
    src = empty(plan.src, "cuda")
    src.normal_()
    rows = max(1, plan.src.batch // 100)
    small_text = text.replace(f"[{plan.src.batch}x", f"[{rows}x")
    small = compile_plan(small_text, "cuda")
    tensors = {key: tensor for key, tensor in inputs(small.plan, 1).items() if key != "src"}
    out = empty(plan.output, "cuda", float("nan"))
    compiled.bind(**tensors)(src, out)
    for part in (slice(None, rows), slice(plan.src.batch - rows, None)):
        given = empty(small.plan.src, "cuda").copy_(src[part])
        want, allowed = wanted(small, {"src": given, **tensors})
        assert worst(out[part], want, allowed) <= 1
    assert not any(bool(chunk.isnan().any()) for chunk in out.split(rows))
    del src, out
    torch.cuda.empty_cache()


def test_a_module_is_unloaded_after_its_plan_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "KERNELS_KEPT", 0)
    monkeypatch.setattr("fuseplan.execution.build._programs", {})
    counts = []
    for columns in range(64, 70):
        made = Prepared(f"f32[512x{8 * columns}] -> bias -> relu")
        for _ in range(20):  # the last ones are under way when the plan goes
            got = made.bound(made.src)
        assert made.is_right(got)
        del made
        counts.append(len(getattr(drivers.driver(), "_modules")))  # noqa: B009 - a protocol has no such field
    assert counts[-1] == counts[1]


def test_a_graph_replays_a_kernel_that_no_plan_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "KERNELS_KEPT", 0)
    monkeypatch.setattr("fuseplan.execution.build._programs", {})
    src = torch.randn(512, 1024, device="cuda")
    out = torch.empty_like(src)
    layer = compile_plan("f32[512x1024] -> relu -> tanh", "cuda").bind()
    layer(src, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer(src, out)
    del layer
    for columns in (72, 80):
        made = Prepared(f"f32[512x{8 * columns}] -> bias -> relu")
        assert made.is_right(made.bound(made.src))
        del made
    src.neg_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.allclose(out, src.relu().tanh(), atol=1e-5)
