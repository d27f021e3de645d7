"""What measuring on a GPU is made of, as far as it runs without one: on torch's CPU tensors."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from benchmarks import recorded, standings, suite
from fuseplan.bench import table
from fuseplan.bench.peers import known
from fuseplan.bench.results import Row
from fuseplan.cli.commands import fuseplan
from fuseplan.errors import ArgumentError
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import match
from fuseplan.language.tensor import TensorSpec
from fuseplan.measure import peaks, quiet
from fuseplan.measure.data import deviation, evaluated, random_arrays, reference
from fuseplan.measure.peaks import Floor
from fuseplan.measure.torch_eager import training_call
from fuseplan.ops import OPERATORS
from fuseplan.plans.plan import FusionPlan

BY_NAME = known(True).by_name
CONV = "f16[2x16x7x7, nhwc] -> conv2d(8, kernel=1) -> bias -> relu"
RESIDUAL = "f16[2x16x7x7, nhwc] -> conv2d(16, kernel=3, padding=1) -> batch_norm -> add -> relu"
MATMUL = "bf16[32x16] -> matmul(8) -> bias -> gelu(approximate=tanh)"
SAMPLES = [
    pytest.param(FusionPlan(TensorSpec.parse(text), op), id=str(FusionPlan(TensorSpec.parse(text), op)))
    for each in OPERATORS
    for text, op in each.samples()
]


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("plan", SAMPLES)
def test_float64_in_torch_is_float64_in_numpy(plan: FusionPlan) -> None:
    tensors = random_arrays(plan, 3, device="cpu")
    exact = {key: tensor.double().numpy() for key, tensor in tensors.items()}
    want, results = plan.evaluate(exact.pop("src"), exact)
    got, made = evaluated(plan, tensors)
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-12, atol=1e-12)
    assert made.keys() == results.keys()
    for key, result in made.items():
        np.testing.assert_allclose(result.numpy(), results[key], rtol=1e-12, atol=1e-12)


def test_tensors_lie_as_the_plan_says_and_hold_what_fits_its_dtype() -> None:
    plan = FusionPlan.parse(RESIDUAL)
    tensors = random_arrays(plan, 1, device="cpu")
    assert tensors["src"].stride() == plan.src.element_strides
    assert tensors["other"].stride() == plan.output.element_strides
    assert tensors["variance"].dtype == torch.float32
    assert torch.equal(tensors["variance"], tensors["variance"].half().float())
    assert tensors["variance"].min() > 0
    again = random_arrays(plan, 1, device="cpu")
    assert all(torch.equal(tensor, again[key]) for key, tensor in tensors.items())
    assert not torch.equal(random_arrays(plan, 2, device="cpu")["src"], tensors["src"])


UNFUSED = ("unfused:nchw", "unfused:nhwc")


def test_deviation_is_infinite_where_an_element_was_not_written() -> None:
    want = torch.ones(3, dtype=torch.float64)
    assert deviation(torch.tensor([1.0, 1.0, 1.5]), want) == 0.5
    assert deviation(torch.tensor([1.0, 1.0, float("nan")]), want) == float("inf")
    assert deviation(torch.ones(2), want) == float("inf")
    infinite, unknown = torch.tensor([float("inf"), 1.0]), torch.tensor([float("nan"), 1.0])
    assert deviation(infinite, infinite.double()) == deviation(unknown, unknown.double()) == 0
    assert deviation(-infinite, infinite.double()) == float("inf")
    assert deviation(unknown, infinite.double()) == float("inf")


TRAINING = ("f16[4x8x6x5, nhwc] -> batch_norm_training -> relu", "f32[4x8x6x5] -> batch_norm_backward(relu)")


@pytest.mark.parametrize(
    "text",
    [
        *TRAINING,
        "f16[4x8x6x5] -> batch_norm_backward",
        "f32[4x8x6x5] -> batch_norm_training(running=True, momentum=0.3) -> leaky_relu(0.2)",
    ],
)
@pytest.mark.parametrize("compiler", [None, lambda function: function], ids=["eager", "compiled"])
def test_training_in_torch(text: str, compiler: Any) -> None:
    """Both forms, the one that is written for torch.compile without compiling it."""
    plan = FusionPlan.parse(text)
    tensors = random_arrays(plan, 1, device="cpu")
    got = training_call(plan, tensors, "torch", compiler)()
    want, results = evaluated(plan, tensors)
    bounds = (1e-3 if plan.src.dtype == "f16" else 1e-6, *(1e-5 for _ in results))
    assert got[0].stride() == plan.output.element_strides
    for made, exact, bound in zip(got, (want, *results.values()), bounds, strict=True):
        assert deviation(made, exact) < bound


@pytest.mark.parametrize("text", [CONV, RESIDUAL, MATMUL, CONV.replace(", nhwc", "")])
@pytest.mark.parametrize(
    "name", ["torch", "torch:nhwc", "torch:steps", "unfused:nchw", "unfused:nhwc", "cublaslt"]
)
def test_a_peer_computes_the_plan(name: str, text: str) -> None:
    plan, peer = FusionPlan.parse(text), BY_NAME[name]()
    if not peer.takes(plan):
        return
    tensors = random_arrays(plan, 1, device="cpu")
    got = peer.prepare(plan, [tensors]).result()
    bound = 2e-2 if plan.src.dtype == "bf16" else 2e-3
    assert deviation(got, reference(plan, tensors)) < bound


def test_which_peers_are_measured_for_which_plan() -> None:
    def taking(text: str) -> set[str]:
        return {name for name, peer in BY_NAME.items() if peer().takes(FusionPlan.parse(text))}

    usual = {"fuseplan", "fuseplan:again", "fuseplan:unfused", "torch", "torch.compile"}
    usual |= {"unfused:nchw", "unfused:nhwc", "torch.compile:default"}
    other_layout = {"torch:nhwc", "torch.compile:nhwc", "cudnn:nhwc"}
    assert taking(CONV) == usual | {"torch:steps", "cudnn", "cublaslt"}
    assert taking(CONV.replace(", nhwc", "")) == usual | other_layout | {"torch:steps", "cudnn"}
    assert taking(RESIDUAL) == usual | {"fuseplan:plain", "cudnn:folded"}
    assert taking(MATMUL) == usual | {"torch:steps", "cublaslt"}
    assert taking("f16[2x16x7x7] -> batch_norm -> relu") == usual


def test_a_folded_convolution_is_the_plans() -> None:
    """What cudnn:folded hands to cuDNN, put together by hand."""
    plan = FusionPlan.parse(RESIDUAL)
    tensors = random_arrays(plan, 1, device="cpu")
    plain, given = BY_NAME["fuseplan:plain"]().asked(plan, tensors)
    assert str(plain) == "f16[2x16x7x7, nhwc] -> conv2d(16, kernel=3, padding=1) -> bias -> relu"
    assert set(given) == {"src", "weight", "bias"}
    assert given["bias"] is tensors["shift"]


def test_names_of_peers() -> None:
    assert known(True).named("torch, cudnn") == [
        "torch", "torch:nhwc", "torch:steps", "cudnn", "cudnn:nhwc", "cudnn:folded", "cudnn:attention",
    ]  # fmt: skip
    assert known(True).named("fuseplan,torch:steps") == ["fuseplan", "torch:steps"]
    with pytest.raises(ArgumentError, match="cudnn"):
        known(True).named("cudn")


def row(peer: str, median: float, group: str = "f16 nhwc, beyond the L2", **more: object) -> Row:
    machine = {"gpu": "a GPU", "cpu": "a CPU"}
    return Row("2026", "s", "a", group, "m", CONV, peer, 1, median=median, machine=machine, **more)  # type: ignore[arg-type]


def test_aims_against_named_peers_the_floor_and_our_plainer_form() -> None:
    (line,) = table.lines(
        [
            row("fuseplan", 2.0, floor=1.5),
            row("fuseplan:plain", 1.5, added=0.4),
            row("cudnn", 3.0),
            row("torch", 5.0),
            row("torch:steps", 4.0),
            row("torch.compile", 6.0),
        ]
    )
    against = (
        "all",
        "cudnn",
        "torch",
        "torch:steps",
        "cudnn,torch",
        "torch.compile",
        "floor",
        "fuseplan:plain",
    )
    assert [standings.ratio(line, each) for each in against] == pytest.approx(
        [1.5, 1.5, 2.0, 2.0, 1.5, 3.0, 0.75, 0.95]
    )
    assert standings.ratio(line, "ncnn") is None


def test_an_aim_covers_the_parts_of_its_group() -> None:
    aim = suite.Aim("f16 nhwc", "all", 1.0)
    assert aim.covers("f16 nhwc")
    assert aim.covers("f16 nhwc, beyond the L2")
    assert not aim.covers("f16 nhwcx")


def test_rows_of_one_gpu_are_told_from_those_of_another_in_the_same_machine() -> None:
    old, new = row("fuseplan", 1.0), row("fuseplan", 2.0)
    other = Row(**{**new.to_json(), "machine": {"gpu": "another", "cpu": "a CPU"}, "run": "2025"})
    assert recorded.latest([old, new, other]) == [old, new, other]


def test_a_floor_is_set_by_the_products_or_the_bytes() -> None:
    def floor(text: str) -> Floor:
        return made.floor(lower(match(FusionPlan.parse(text))))

    made = peaks.GpuPeaks("a GPU", {"dram": 1e12}, {"f16": 1e15, "tf32": 3e14, "f32": 5e13})
    assert floor("f16[1000x1000] -> relu") == Floor(4e-6, "dram")
    src, size, vector = "f16[64x250x25x5]", 2 * 10**6 * 2, 250 * 4
    forward, backward = f"{src} -> batch_norm_training -> relu", f"{src} -> batch_norm_backward(relu)"
    assert floor(forward) == Floor((3 * size + 4 * vector) / 1e12, "dram")
    assert floor(backward) == Floor((5 * size + 6 * vector) / 1e12, "dram")
    assert floor("f16[4096x4096] -> matmul(4096)") == Floor(2 * 4096**3 / 1e15, "compute")
    assert floor("f32[4096x4096] -> matmul(4096)") == Floor(2 * 4096**3 / 1e14, "compute")
    assert floor("f32[4096x4096] -> matmul(4096, precision=tf32)") == Floor(2 * 4096**3 / 3e14, "compute")


@pytest.mark.usefixtures("resting")
def test_kept_peaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEPLAN_CACHE_DIR", str(tmp_path))
    made = peaks.GpuPeaks("a GPU", {"dram": 1e12}, {"f16": 1e15})
    monkeypatch.setattr(peaks, "measure_gpu_peaks", lambda gpu, device: made)
    monkeypatch.setattr(peaks, "GpuWatch", lambda device: quiet.HostWatch())
    assert peaks.gpu_peaks("a GPU") is None
    assert peaks.measured_gpu_peaks("a GPU") == (made, None)
    assert peaks.gpu_peaks("a GPU") == made
    (place,) = tmp_path.glob("peaks-a-gpu.json")
    place.write_text('{"format": 1, "gpu": "a GPU"}')
    assert peaks.gpu_peaks("a GPU") is None


def test_without_a_gpu_the_benchmark_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    ran = CliRunner().invoke(fuseplan, ["bench", "gpu_overhead", "--target", "cuda", "--no-results"])
    assert ran.exit_code == 2
    assert "finds no GPU" in ran.output
