"""Plans on DTensors: the ways that processes share one, and two processes that do."""

from typing import Any

import pytest

import meshes
from fuseplan.plans.plan import FusionPlan


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return meshes.told(tmp_path_factory.mktemp("mesh"), "cpu")


@pytest.mark.parametrize("check", meshes.CHECKS)
def test_each_process_computes_its_share(check: str, told: dict[str, list[Any]]) -> None:
    assert told[check] == [meshes.CHECKS[check]] * 2


# Behind the first way, that each process computes all: the plan, and the axes along which src and the other
# tensors, then what it makes, are shared out: `.` is a whole tensor, `+` a sum over the processes.
WAYS = (
    (
        "f32[4x16] -> linear(32) -> bias -> gelu",
        "f32[2x16] -> linear(32) -> bias -> gelu: 0..>0",
        "f32[4x16] -> linear(16) -> bias -> gelu: .00>1",
    ),
    (
        "f32[4x16] -> linear(31) -> bias -> add(alpha2=2)",  # 31 features have no equal shares
        "f32[2x16] -> linear(31) -> bias -> add(alpha2=2): 0..0>0",
        "f32[4x8] -> linear(31) -> bias -> add(alpha2=2): 11++>+",
    ),
    (
        "f32[2x8x4x4, nhwc] -> conv2d(6, kernel=3) -> batch_norm -> relu",
        "f32[1x8x4x4, nhwc] -> conv2d(6, kernel=3) -> batch_norm -> relu: 0.....>0",
        "f32[2x8x4x4, nhwc] -> conv2d(3, kernel=3) -> batch_norm -> relu: .00000>1",
    ),
    (
        "f32[4x3x16] -> add -> save(sum) -> layer_norm -> add(other=sum)",
        "f32[2x3x16] -> add -> save(sum) -> layer_norm -> add(other=sum): 00..>00",
    ),
    ("f32[3x5x16] -> mean(1) -> scale", "f32[3x5x8] -> mean(1) -> scale: 20>1"),
    (
        "f32[2x8x4x6] -> max_pool2d(2)",
        "f32[1x8x4x6] -> max_pool2d(2): 0>0",
        "f32[2x4x4x6] -> max_pool2d(2): 1>1",
    ),
    ("f32[4x16] -> linear(32) -> glu", "f32[2x16] -> linear(32) -> glu: 0.>0"),
    ("weight=2:0 | f32[5x16] -> linear(32) -> glu", "f32[5x16] -> linear(16) -> glu: .00>1"),
    (
        "weight=2:0 bias=2:0 | f32[6x16] -> linear(32) -> bias -> tanh -> glu",
        "f32[3x16] -> linear(32) -> bias -> tanh -> glu: 0....>0",
        "f32[6x16] -> linear(16) -> bias -> tanh -> glu: .0000>1",
    ),
    ("weight=2:0 | f32[5x16] -> linear(32) -> tanh",),
    ("weight=2:0 | f32[5x16] -> linear(32) -> glu(interleaved=True)",),
    ("f32[2x2x8x4, bhsd] -> attention",),
    ("f32[4x8] -> batch_norm_training",),
)


@pytest.mark.parametrize("texts", WAYS, ids=lambda texts: texts[0])
def test_the_ways_to_share_a_plan(texts: tuple[str, ...]) -> None:
    from fuseplan.torch.sharing import SUMMED, WHOLE, Places, ways

    def words(places: Places) -> str:
        return "".join({WHOLE: ".", SUMMED: "+"}.get(place) or str(place.dim) for place in places)

    whole, *want = texts
    text = whole.rpartition(" | ")[2]
    first, *found = (
        f"{each.plan}: {words(each.given)}>{words(each.made)}"
        for each in ways(FusionPlan.parse(text), 2, whole)
    )
    assert found == want
    assert set(first.removeprefix(f"{text}: ")) == {".", ">"}
