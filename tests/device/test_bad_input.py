"""What cannot be run on a GPU is refused before a launch, and leaves the GPU as it was: a good call works."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from device.guarded import inputs, wanted, worst
from fuseplan.compile import CompiledPlan
from fuseplan.compile import compile as compile_plan
from fuseplan.errors import ArgumentError, BuildError

PLAN = "f16[4x64x14x14, nhwc] -> conv2d(64, kernel=1) -> bias -> add -> relu"
Make = Callable[[Any], Any]


@pytest.fixture(scope="module")
def compiled() -> CompiledPlan:
    return compile_plan(PLAN, "cuda")


@pytest.fixture
def tensors(compiled: CompiledPlan) -> dict[str, Any]:
    return inputs(compiled.plan, 1)


def shifted(tensor: Any) -> Any:
    """The same tensor two bytes further on: no multiple of 16."""
    room = torch.zeros(tensor.numel() + 8, dtype=tensor.dtype, device="cuda")
    return room[1 : 1 + tensor.numel()].as_strided(tensor.shape, tensor.stride()).copy_(tensor)


def last(tensor: Any) -> Any:
    return tensor.contiguous(memory_format=torch.channels_last)


@dataclass(frozen=True)
class Bad:
    """A tensor made of a good one that must not be taken, and words of the message."""

    key: str
    told: str
    made: Make

    def given(self, tensors: dict[str, Any]) -> dict[str, Any]:
        good = torch.empty_like(tensors["src"]) if self.key == "out" else tensors[self.key]
        return {**tensors, self.key: self.made(good)}


ANY: dict[str, tuple[str, Make]] = {
    "on the CPU": ("is on cpu", lambda tensor: tensor.cpu()),
    "in NumPy": ("", lambda tensor: tensor.cpu().numpy()),
    "of integers": ("i32", lambda tensor: tensor.int()),
    "of another size": ("", lambda tensor: tensor[:1]),
    "no tensor": ("", lambda tensor: "tensor"),
    "without storage": ("meta", lambda tensor: tensor.to("meta")),
}
IN_PLACE: dict[str, tuple[str, Make]] = {
    "in another dtype": ("f64", lambda tensor: tensor.double()),
    "in another layout": ("layout", lambda tensor: tensor.contiguous()),
    "of another batch": ("", lambda tensor: last(tensor[:3])),
    "of another rank": ("", lambda tensor: tensor[0]),
    "misaligned": ("multiple of 16", shifted),
    "wanting a gradient": ("gradient", lambda tensor: tensor.clone().requires_grad_()),
    "sparse": ("sparse", lambda tensor: tensor.contiguous().to_sparse()),
    "expanded": ("layout", lambda tensor: tensor[:1].expand(tensor.shape)),
}
BAD = {
    f"{key} {how}": Bad(key, told, made)
    for keys, kinds in ((("src", "out", "other", "weight", "bias"), ANY), (("src", "out", "other"), IN_PLACE))
    for key in keys
    for how, (told, made) in kinds.items()
}


def without(tensors: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: tensor for key, tensor in tensors.items() if key not in keys}


def check_works(compiled: CompiledPlan, tensors: dict[str, Any]) -> None:
    want, allowed = wanted(compiled, tensors)
    assert worst(compiled(**tensors), want, allowed) <= 1
    torch.cuda.synchronize()


@pytest.mark.parametrize("name", BAD)
def test_refused_and_the_next_call_works(name: str, compiled: CompiledPlan, tensors: dict[str, Any]) -> None:
    with torch.enable_grad(), pytest.raises(ArgumentError) as raised:
        compiled(**BAD[name].given(tensors))
    assert BAD[name].told in str(raised.value)
    check_works(compiled, tensors)


@pytest.mark.parametrize("name", [name for name, bad in BAD.items() if bad.key in ("src", "out")])
def test_refused_on_the_short_way_too(name: str, compiled: CompiledPlan, tensors: dict[str, Any]) -> None:
    """A bound plan that has accepted tensors before looks again at those that differ."""
    bound = compiled.bind(**without(tensors, "src"))
    good = bound(tensors["src"])
    given = BAD[name].given(tensors)
    with torch.enable_grad(), pytest.raises(ArgumentError):
        bound(given["src"], given.get("out"))
    assert torch.equal(bound(tensors["src"]), good)


def test_parameters_are_taken_while_no_gradient_is_recorded(
    compiled: CompiledPlan, tensors: dict[str, Any]
) -> None:
    bound = compiled.bind(**without(tensors, "src"))
    wanting = tensors["src"].clone().requires_grad_()
    for _ in range(2):  # what was accepted before is refused with gradients enabled
        assert torch.equal(bound(wanting), bound(tensors["src"]))
        with torch.enable_grad(), pytest.raises(ArgumentError, match="gradient"):
            bound(wanting)


@pytest.mark.parametrize("key", ["src", "other"])
def test_what_is_read_is_not_written(key: str, compiled: CompiledPlan, tensors: dict[str, Any]) -> None:
    bound = compiled.bind(**without(tensors, "src"))
    for _ in range(2):  # the second goes the short way
        with pytest.raises(ArgumentError, match="overlap"):
            bound(tensors["src"], tensors[key])
        bound(tensors["src"])
    check_works(compiled, tensors)


def test_storage_that_overlaps_in_part(compiled: CompiledPlan, tensors: dict[str, Any]) -> None:
    shape, strides, size = tensors["src"].shape, tensors["src"].stride(), tensors["src"].numel()
    room = torch.zeros(2 * size, dtype=torch.float16, device="cuda")
    src, near, apart = (room[at : at + size].as_strided(shape, strides) for at in (0, size // 2, size))
    with pytest.raises(ArgumentError, match="overlap"):
        compiled(src, near, **without(tensors, "src"))
    assert compiled(src, apart, **without(tensors, "src")) is apart


def test_operands_missing_and_unknown(compiled: CompiledPlan, tensors: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match="`weight` of operator 0"):
        compiled(**without(tensors, "weight"))
    with pytest.raises(ArgumentError, match="gain"):
        compiled(gain=1, **tensors)
    check_works(compiled, tensors)


def test_another_gpus_tensors_are_refused(compiled: CompiledPlan, tensors: dict[str, Any]) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with pytest.raises(ArgumentError, match="cuda:1"):
        compiled(tensors["src"].to("cuda:1"), **without(tensors, "src"))
    check_works(compiled, tensors)


def test_a_gpu_that_is_not_there() -> None:
    with pytest.raises(ArgumentError, match="no GPU"):
        compile_plan(PLAN, f"cuda:{torch.cuda.device_count()}")


def test_another_generations_code_is_not_launched(tensors: dict[str, Any]) -> None:
    made = compile_plan(PLAN, "triton:gfx942")
    assert made.source.text
    with pytest.raises(BuildError, match="does not run here"):
        made(**tensors)


def test_special_values_pass_through() -> None:
    made = compile_plan("f32[2x3x7] -> bias -> relu", "cuda")
    src = torch.randn(2, 3, 7, device="cuda")
    src[0, 0, :3] = torch.tensor([float("nan"), float("inf"), float("-inf")])
    got = made(src, bias=torch.zeros(3, device="cuda"))
    assert torch.equal(got.nan_to_num(nan=-1.0), torch.relu(src).nan_to_num(nan=-1.0))
