"""match, lower, select, emit and the records between them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import fuseplan
from fuseplan.backends import BACKENDS, backend_of
from fuseplan.backends.reference import REFERENCE
from fuseplan.errors import ArgumentError, BuildError, Unsupported
from fuseplan.execution.select import select
from fuseplan.execution.stages import decide
from fuseplan.kernels.emit import Slot, Source
from fuseplan.kernels.kernel import Kernel, KernelOperand
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import RULES, match, unfuse
from fuseplan.kernels.packing import Packing
from fuseplan.kernels.target import Target, parse_target
from fuseplan.kernels.template import Accuracy, Template, Traffic
from fuseplan.language.dtypes import DTYPES, FACTORS
from fuseplan.messages.reasons import Claim, Reason, claim
from fuseplan.plans.plan import FusionPlan
from fuseplan.scalar import functions, leaf

FULL = (
    "f16[2x8x5x6, nhwc] -> leaky_relu(0.3)"
    " -> conv2d(4, kernel=(3, 2), stride=(1, 2), padding=((1, 0), (2, 1)), groups=2)"
    " -> bias -> batch_norm(per_activation) -> add -> bias"
)
AVX2 = parse_target("cpu:avx2")


def kernel_of(text: str) -> Kernel:
    return lower(match(FusionPlan.parse(text)))


# ---- match


def test_the_first_rule_that_holds_is_taken() -> None:
    assert match(FusionPlan.parse(FULL)).rule == "contraction"
    found = match(FusionPlan.parse("f32[1x8] -> relu -> bias"))
    assert found.rule == "pointwise"
    assert [refusal.code for refusal in found.refusals] == ["no-contraction"]
    assert str(found) == "pointwise: relu -> bias"


@pytest.mark.parametrize(
    ("text", "code", "operator"),
    [
        ("f32[1x8]", "empty-plan", None),
        ("f32[1x8x9x9] -> conv2d(4, kernel=3) -> relu -> conv2d(4, kernel=3)", "several-contractions", 2),
    ],
)
def test_what_no_rule_takes_is_refused_by_each(text: str, code: str, operator: int | None) -> None:
    with pytest.raises(Unsupported) as refused:
        match(FusionPlan.parse(text))
    met = {refusal.code: refusal for refusal in refused.value.refusals}
    assert met[code].operator == operator
    assert {refusal.tried for refusal in refused.value.refusals} <= RULES.keys()


def test_rules_tell_before_after_and_what_they_save() -> None:
    for rule, told in RULES.items():
        assert all(word in told.description for word in ("before:", "after:", "saves:")), rule


def test_unfusing_gives_a_plan_an_operator() -> None:
    plan = FusionPlan.parse(FULL)
    alone = unfuse(plan)
    assert [str(each[0].op.name) for each in alone] == [step.op.name for step in plan]
    for earlier, later in itertools.pairwise(alone):
        assert earlier.output == later.src
    assert alone[-1].output == plan.output


# ---- lower


def test_a_kernel_holds_what_the_plan_says() -> None:
    kernel = kernel_of(FULL)
    assert [stage.op_text for stage in kernel.prologue] == ["leaky_relu"]
    assert [stage.step for stage in kernel.epilogue] == [2, 3, 4, 5]
    conv = kernel.contraction
    assert (conv.batch, conv.channels, conv.features, conv.groups) == (2, 8, 4, 2)
    assert (conv.kernel, conv.stride, conv.padding) == ((3, 2), (1, 2), ((1, 0), (2, 1)))
    assert conv.dst_spatial == kernel.dst.spatial == (4, 4)
    assert conv.flops == 2 * (2 * 4 * 4) * 4 * (4 * 3 * 2)
    roles = [(operand.key, operand.role, operand.axes, operand.dtype) for operand in kernel.operands]
    assert roles == [
        ("weight", "weight", (0, 1, 2, 3), "f16"),
        ("bias", "epilogue", (1,), "f32"),
        *((name, "epilogue", (1, 2, 3), "f32") for name in ("mean", "variance", "scale", "shift")),
        ("other", "epilogue", (0, 1, 2, 3), "f16"),
        ("bias_2", "epilogue", (1,), "f32"),
    ]
    assert kernel.parameters == ("negative_slope", "epsilon", "alpha1", "alpha2")
    assert kernel.weight.shape == (4, 4, 3, 2)
    assert kernel.shape_of(kernel.operand("other")) == kernel.dst


def test_a_pointwise_plan_is_all_epilogue() -> None:
    kernel = kernel_of("f64[2x3x4] -> bias -> tanh")
    assert kernel.centre is None
    assert kernel.prologue == ()
    assert len(kernel.epilogue) == 2
    assert kernel.compute_dtype == "f64"
    with pytest.raises(KeyError):
        kernel.weight  # noqa: B018 - reading it is the test


@pytest.mark.parametrize(
    ("text", "shape", "strides"),
    [
        ("f32[1x3x5x8, bhsd] -> rms_norm -> rotary", (5, 4), (4, 1)),
        ("f32[1x5x3x8, bshd] -> rms_norm -> rotary", (5, 4), (4, 1)),
    ],
)
def test_an_operand_beside_statistics_lies_as_src_does(
    text: str, shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    held = kernel_of(text).operands[-1]
    assert (held.shape, held.strides) == (shape, strides)


def test_kernel_text_is_the_key() -> None:
    """Equal exactly where the same code serves both."""
    one = "f32[1x8x9x9, nhwc] -> conv2d(4, kernel=3) -> leaky_relu(0.1)"
    assert kernel_of(one).text == kernel_of(one.replace("0.1", "0.2")).text
    changes = [
        ("f32", "f64"), ("nhwc", "nchw"), ("1x8x", "2x8x"), ("8x9x9", "8x9x10"), ("conv2d(4", "conv2d(8"),
        ("kernel=3", "kernel=3, padding=1"), ("kernel=3", "kernel=3, stride=2"),
        ("kernel=3", "kernel=3, dilation=2"), ("kernel=3", "kernel=3, groups=2"), ("leaky_relu(0.1)", "relu"),
        ("leaky_relu(0.1)", "leaky_relu(0.1) -> relu"), ("-> conv2d", "-> relu -> conv2d"),
        ("-> leaky_relu(0.1)", "-> bias -> leaky_relu(0.1)"), ("leaky_relu(0.1)", "prelu"),
        ("leaky_relu(0.1)", "prelu(shared=True)"),
    ]  # fmt: skip
    texts = [kernel_of(one.replace(*change)).text for change in changes]
    assert len({kernel_of(one).text, *texts}) == 1 + len(changes)


def test_flops_and_bytes() -> None:
    kernel = kernel_of("f32[1x8x10x10] -> conv2d(4, kernel=3) -> bias -> relu")
    assert kernel.flops == 2 * 64 * 4 * 72 + 2 * 64 * 4
    assert kernel.minimum_bytes == 4 * (800 + 256 + 4 * 72 + 4)


def test_shared_functions_count_once() -> None:
    x = leaf("x")
    part = x * x + 1
    assert functions(part) == 2
    assert functions(part * part) == 3


# ---- select


class _Base(Template):
    """A template with a set price."""

    price = 1.0
    allows = True

    @classmethod
    def limits(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Claim]:
        yield claim(True, Reason.EMPTY_PLAN)
        yield claim(cls.allows, Reason.ACCURACY, got=1, want=2)

    @classmethod
    def candidates(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Template]:
        yield cls()

    def traffic(self, kernel: Kernel, target: Target) -> Traffic:
        return Traffic(1, 2, 3)

    def seconds(self, kernel: Kernel, target: Target) -> float:
        return self.price

    def error_bound(self, kernel: Kernel) -> float:
        return 0.0

    def emit(self, kernel: Kernel, target: Target) -> Source:
        return Source("", "none", ())

    def packing(self, kernel: Kernel, target: Target, operand: KernelOperand) -> Packing:
        return Packing(operand.shape, operand.dtype)


def template(name: str, price: float, *, allows: bool = True) -> type[Template]:
    return type(name, (_Base,), {"name": name, "price": price, "allows": allows})


def chosen(monkeypatch: pytest.MonkeyPatch, *templates: type[Template]) -> Any:
    monkeypatch.setattr(REFERENCE, "templates", templates)
    return select(kernel_of("f32[1x8] -> relu"), Target("reference"))


def test_the_quickest_is_chosen_and_everything_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = chosen(
        monkeypatch, template("slow", 3), template("never", 0, allows=False), template("quick", 2)
    )
    assert choice.template.name == "quick"
    assert choice.seconds == 2
    assert [each.template for each in choice.considered] == ["quick()", "slow()", "never"]
    assert choice.considered[2].refusal.code == "accuracy"
    assert json.loads(json.dumps(choice.to_json()))["considered"][1]["seconds"] == 3


def test_of_equals_the_first_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(monkeypatch, template("a", 1), template("b", 1)).template.name == "a"


def test_where_nothing_fits_every_refusal_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unsupported) as refused:
        chosen(monkeypatch, template("a", 1, allows=False), template("b", 1, allows=False))
    assert [refusal.tried for refusal in refused.value.refusals] == ["b", "a"], "the more general one first"
    assert "compile(plan, 'cpu')" in refused.value.what, "the target that would take it"


def test_a_template_named_alone_is_blamed_alone() -> None:
    with pytest.raises(Unsupported) as refused:
        decide("f32[1x8] -> relu", "cpu:avx2", template="direct")
    assert "the template direct does not compute this plan" in refused.value.what
    assert [refusal.tried for refusal in refused.value.refusals] == ["direct"]


def test_the_reference_is_last_and_takes_everything() -> None:
    assert BACKENDS[-1] is REFERENCE
    assert backend_of("reference") is REFERENCE
    with pytest.raises(ArgumentError, match="Did you mean `cpu`"):
        backend_of("cpuu")


def test_a_bound_that_cannot_be_met_is_refused_with_the_target_that_can() -> None:
    with pytest.raises(Unsupported) as refused:
        decide("f32[1x8x9x9] -> conv2d(4, kernel=3) -> relu", "cpu:avx2", accuracy=1e-12)
    assert {"accuracy"} <= {refusal.code for refusal in refused.value.refusals}
    assert "compile(plan, 'reference')" in str(refused.value)


# ---- template and emit


def test_operands_are_packed_to_whole_vectors() -> None:
    kernel = kernel_of("f32[1x5x3x2, nhwc] -> bias -> batch_norm(per_activation) -> prelu(shared=True)")
    made = select(kernel, AVX2).template
    bias = made.packing(kernel, AVX2, kernel.operand("bias")).of(np.arange(5, dtype=np.float32))
    np.testing.assert_array_equal(bias, [0, 1, 2, 3, 4, 0, 0, 0])
    image = np.arange(30, dtype=np.float32).reshape(5, 3, 2)
    mean = made.packing(kernel, AVX2, kernel.operand("mean")).of(image)
    np.testing.assert_array_equal(mean[:30], image.transpose(1, 2, 0).reshape(-1))
    np.testing.assert_array_equal(mean[30:], np.zeros(2))
    slope = made.packing(kernel, AVX2, kernel.operand("slope")).of(np.full(1, 3, np.float32))
    np.testing.assert_array_equal(slope, [3, 0, 0, 0, 0, 0, 0, 0])
    with pytest.raises(ValueError, match="only its template"):
        made.packing(kernel_of(FULL), AVX2, kernel_of(FULL).weight)


def test_traffic_counts_the_workspace_twice() -> None:
    assert Traffic(1, 2, 3).total == 9


def test_a_source_without_its_text_goes_through_json() -> None:
    source = Source("text", "entry", (Slot("src"), Slot("operand", "bias")), 100, 10)
    back = Source.from_frame(json.loads(json.dumps(source.frame)))
    assert back == Source("", "entry", source.slots, 100, 10)
    assert source.workspace(3) == 130
    with pytest.raises(ValueError, match="a slot is one of"):
        Slot("destination")


def test_emitting_twice_gives_the_same_text() -> None:
    first, second = (decide(FULL, "cpu:avx2").source.text for _ in range(2))
    assert first == second != ""


# ---- compile


def test_the_arguments_of_compile_are_checked() -> None:
    for threads in (0, -1, 1.5, True, "2", 10**9):
        with pytest.raises(ArgumentError, match="want a whole number"):
            fuseplan.compile("f32[1x8] -> relu", threads=threads)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="threads=20000; want a whole number from 1 to 1024"):
        fuseplan.explain("f32[1x8] -> relu", replace(fuseplan.parse_target("cpu:avx2"), threads=20000))
    for accuracy in ("exact", 0, -1.0, float("nan"), None, True):
        with pytest.raises(ArgumentError, match="want 'default', 'strict'"):
            fuseplan.compile("f32[1x8] -> relu", accuracy=accuracy)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="want a FusionPlan or its text, got an int"):
        fuseplan.compile(3)  # type: ignore[arg-type]


def test_compiling_freezes_the_plan() -> None:
    plan = FusionPlan("f32[1x8]", fuseplan.Relu())
    fuseplan.compile(plan, "reference")
    with pytest.raises(fuseplan.PlanError, match="frozen"):
        plan.add(fuseplan.Relu())


def test_code_for_another_processor_is_explained_and_not_run() -> None:
    elsewhere = "cpu:neon" if "x86" in _machine() or "AMD64" in _machine() else "cpu:avx2"
    assert decide("f32[1x8] -> relu", elsewhere).source.text
    assert fuseplan.explain("f32[1x8] -> relu", elsewhere).is_fused
    with pytest.raises(BuildError, match=rf"{elsewhere} does not run here"):
        fuseplan.compile("f32[1x8] -> relu", elsewhere)


def _machine() -> str:
    import platform

    return platform.machine()


def test_a_compiled_plan_holds_every_record() -> None:
    compiled = fuseplan.compile(FULL, threads=2)
    assert compiled.plan == FusionPlan.parse(FULL)
    assert compiled.match.rule == "contraction"
    assert compiled.kernel.text in fuseplan.compile(FULL).kernel.text
    assert compiled.output == compiled.plan.output
    assert compiled.threads == 2
    assert compiled.kernels == 1
    assert compiled.workspace_bytes == compiled.source.workspace(2)
    assert compiled.source.text.startswith(";")
    assert compiled.traffic.total >= compiled.kernel.minimum_bytes
    told = json.loads(json.dumps(compiled.to_json()))
    assert told["program"]["entry"] == compiled.source.entry


def test_source_is_emitted_for_a_cached_program() -> None:
    first, second = (fuseplan.compile(FULL) for _ in range(2))
    assert second.program.origin == "memory"
    assert first.source == second.source


@pytest.mark.parametrize("dtype", FACTORS)
def test_the_reference_backend_agrees_with_the_plan(dtype: str) -> None:
    from fuseplan.measure.data import deviation, random_arrays, reference

    for text in (
        FULL,
        "f16[2x5x7] -> conv1d(3, kernel=3, padding=same) -> scale",
        "f16[3x4] -> mish -> prelu",
        "f16[3x4] -> tanh -> matmul(5) -> bias",
        "f16[2x3x2x4] -> matmul(5, transposed=True, batched=True) -> relu",
    ):
        plan = FusionPlan.parse(text.replace("f16", dtype))
        arrays = random_arrays(plan, seed=2)
        got = fuseplan.compile(plan, "reference")(**arrays)
        # Parameters are numbers of the compute dtype: 0.3 is none of float32.
        assert deviation(got, reference(plan, arrays)) <= DTYPES[dtype].epsilon


def test_a_template_may_be_named() -> None:
    plan = "f32[1x16x8x8, nhwc] -> conv2d(16, kernel=3, padding=1) -> relu"
    records = decide(plan, "cpu:avx2", template="direct")
    assert {each.name for each in records.choice.candidates} == {"direct"}
    last = records.choice.candidates[-1]
    exact = decide(plan, "cpu:avx2", template=last.text)
    assert exact.choice.template == last
    assert exact.choice.considered[0].template == last.text


def test_a_template_that_does_not_take_the_plan_says_why() -> None:
    with pytest.raises(Unsupported) as refused:
        decide("f32[1x16x8x8] -> relu", "cpu:avx2", template="direct")
    assert [each.tried for each in refused.value.refusals] == ["direct"]


@pytest.mark.parametrize(
    ("template", "said"),
    [("dirct", "Did you mean `direct`"), ("direct(rows=999)", "no candidate prints as"), ("", None)],
)
def test_no_such_template(template: str, said: str | None) -> None:
    plan = "f32[1x16x8x8, nhwc] -> conv2d(16, kernel=3, padding=1)"
    if said is None:
        assert decide(plan, "cpu:avx2", template=template).choice == decide(plan, "cpu:avx2").choice
        return
    with pytest.raises(ArgumentError, match=said):
        decide(plan, "cpu:avx2", template=template)
