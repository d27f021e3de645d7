"""The driver's letters: what plans they say, what they refuse, and the line that reproduces a plan."""

from __future__ import annotations

import shlex

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuseplan.cli.commands import fuseplan
from fuseplan.compat.miopen.operators import ACTIVATIONS as OF_MIOPEN
from fuseplan.compat.miopen_driver import command_of
from fuseplan.compat.miopen_driver.cli import driver_command, plan_of
from fuseplan.compat.miopen_driver.letters import ACTIVATIONS, BY_WORD, LETTERS, MODES, PROBLEMS
from fuseplan.compat.miopen_driver.problem import Problem
from fuseplan.errors import PlanError
from fuseplan.language.tensor import TensorSpec
from fuseplan.ops.affine import BatchNorm, Bias
from fuseplan.ops.conv import CONVOLUTIONS
from fuseplan.ops.training import ActivationBackward, BatchNormBackward, BatchNormTraining
from fuseplan.plans.plan import FusionPlan
from strategies import activations, convolutions, plans, tensors

CBA = "-F 4 -n 1 -c 4 -H 9 -W 8 -k 6"


def read(line: str) -> FusionPlan:
    """The plan that a line of the driver or of `fuseplan run` says."""
    words = shlex.split(line)
    assert words[0] == "fuseplan"
    command = fuseplan.get_command(click.Context(fuseplan), words[1])
    assert command is not None
    context = command.make_context(words[1], words[2:])
    return FusionPlan.parse(context.params["plan"]) if words[1] == "run" else plan_of(context)


def said(letters: str, problem: str = "CBAInfer") -> str:
    """The text of a problem's plan."""
    return str(read(f"fuseplan driver {problem} {letters}"))


@pytest.mark.parametrize(
    ("mode", "operators"),
    [
        ("0", "conv2d(6, kernel=3) -> bias -> batch_norm(per_activation) -> relu"),
        ("1", "conv2d(6, kernel=3) -> batch_norm(per_activation) -> relu"),
        ("2", "batch_norm(per_activation) -> relu"),
        ("3", "conv2d(6, kernel=3) -> batch_norm(per_activation)"),
        ("4", "conv2d(6, kernel=3) -> bias -> relu"),
        ("5", "conv2d(6, kernel=3) -> relu"),
        ("6", "conv2d(6, kernel=3) -> bias"),
        ("7", "batch_norm_training(per_activation) -> relu"),
        ("8", "batch_norm_backward(relu, mode=per_activation)"),
        ("9", "batch_norm_training(per_activation)"),
        ("10", "activation_backward(relu)"),
    ],
)
def test_modes(mode: str, operators: str) -> None:
    want = f"f32[1x4x9x8] -> {operators}"
    sizes = "-n 1 -c 4 -H 9 -W 8 -k 6"
    assert said(f"-F {mode} {sizes}") == want
    assert said(f"-J {tuple(MODES)[int(mode)]} {sizes}") == want, "R's letter, and the mode's name"


def test_the_defaults_are_miopens() -> None:
    assert said("") == "f32[32x3x32x32] -> conv2d(32, kernel=3) -> bias -> batch_norm(per_activation) -> relu"


@pytest.mark.parametrize(
    ("problem", "dtype"),
    [("CBAInfer", "f32"), ("CBAInferfp16", "f16"), ("CBAInferbfp16", "bf16")],
)
def test_problems(problem: str, dtype: str) -> None:
    assert said(CBA, problem) == f"{dtype}[1x4x9x8] -> conv2d(6, kernel=3) -> bias -> relu"
    without_bias = f"{dtype}[1x4x9x8] -> conv2d(6, kernel=3) -> relu"
    assert said("-n 1 -c 4 -H 9 -W 8 -k 6", problem.replace("CBA", "CA")) == without_bias


@pytest.mark.parametrize(
    ("letters", "convolution"),
    [
        ("-y 5 -x 3", "conv2d(6, kernel=(5, 3))"),
        ("-u 2 -v 1", "conv2d(6, kernel=3, stride=(2, 1))"),
        ("-p 1 -q 2", "conv2d(6, kernel=3, padding=(1, 2))"),
        ("-l 2 -j 2", "conv2d(6, kernel=3, dilation=2)"),
        ("-g 2", "conv2d(6, kernel=3, groups=2)"),
        ("-z same -p 5 -q 5", "conv2d(6, kernel=3, padding=same)"),
        ("-z valid -p 5 -q 5", "conv2d(6, kernel=3)"),
        ("-z default -p 1 -q 1", "conv2d(6, kernel=3, padding=1)"),
        ("--fil_h 1 --fil_w 1 --conv_stride_h 2 --conv_stride_w 2", "conv2d(6, kernel=1, stride=2)"),
    ],
)
def test_convolutions(letters: str, convolution: str) -> None:
    assert said(f"{CBA} {letters}") == f"f32[1x4x9x8] -> {convolution} -> bias -> relu"


def test_one_and_three_axes() -> None:
    one = "-F 6 -n 1 -c 4 -k 6 -_ 1 -W 9 -x 5 -v 2 -q 1 -j 2"
    assert said(one) == "f32[1x4x9] -> conv1d(6, kernel=5, stride=2, padding=1, dilation=2) -> bias"
    three = "-F 6 -n 1 -c 4 -k 6 -_ 3 '-!' 7 -H 8 -W 9 '-@' 1 '-#' 2 '-$' 1 '-^' 2 -I NDHWC"
    assert said(three) == (
        "f32[1x4x7x8x9, ndhwc] -> conv3d(6, kernel=(1, 3, 3), stride=(2, 1, 1), padding=(1, 0, 0), "
        "dilation=(2, 1, 1)) -> bias"
    )


def test_the_default_depth_is_miopens() -> None:
    assert said("-F 6 -n 1 -c 4 -k 6 -_ 3 -H 8 -W 9 '-@' 1").startswith(
        "f32[1x4x1x8x9] -> conv3d(6, kernel=(1, "
    )


def test_layouts() -> None:
    assert said(f"{CBA} -I nhwc -O NHWC -f NCHW").startswith("f32[1x4x9x8, nhwc] ->")


ABG = "-A 0.5 -B 0.25 -G 2"


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "identity"),
        (1, "sigmoid"),
        (2, "tanh(0.5, beta=0.25)"),
        (3, "relu"),
        (4, "softplus"),
        (5, "abs"),
        (6, "power(0.5, beta=0.25, gamma=2)"),
        (7, "clipped_relu(0.5)"),
        (8, "leaky_relu(0.5)"),
        (9, "elu(0.5)"),
        (10, "clamp(0.5, max=0.25)"),
    ],
)
def test_activations(number: int, text: str) -> None:
    assert said(f"-F 2 -M 1 -n 1 -c 4 -m {number} {ABG}").endswith(f" -> batch_norm -> {text}")
    word = tuple(ACTIVATIONS)[number]
    assert said(f"-F 2 -M 1 -n 1 -c 4 -m {word.upper()} {ABG}").endswith(f" -> {text}")


@pytest.mark.parametrize(
    ("letters", "operators"),
    [
        ("-F n_train -M 1 --run 1 --momentum 0.5", "batch_norm_training(running=True, momentum=0.5)"),
        ("-F n_train -M 1 --save no --epsilon 0.5", "batch_norm_training(saved=False, epsilon=0.5)"),
        ("-F n_train -M 1 --momentum 0.5", "batch_norm_training"),
        ("-F na_backward -M 1 --save 0", "batch_norm_backward(relu, statistics=recomputed)"),
        ("-F na_backward -M 1 -m 8 -A 0.25", "batch_norm_backward(leaky_relu(0.25))"),
        ("-F na_backward -M 1 -m 0", "batch_norm_backward"),
        ("-F a_backward -m 9 -A 0.5", "activation_backward(elu(0.5))"),
    ],
)
def test_training(letters: str, operators: str) -> None:
    assert said(f"{letters} -n 2 -c 4 -H 9 -W 8") == f"f32[2x4x9x8] -> {operators}"


def test_the_numbers_are_those_of_fuseplans_miopen() -> None:
    words = [f"miopenActivation{word.upper()}" for word in ACTIVATIONS]
    assert words == [mode.name for mode in sorted(OF_MIOPEN)]


def test_power_in_half_precision_has_miopens_threshold() -> None:
    assert said("-F 2 -m 6", "CBAInferfp16").endswith("power(1, beta=0, threshold=0.0001)")
    assert said("-F 2 -m 6", "CBAInferbfp16").endswith("power(1, beta=0)")


def test_batch_norm_parameters_have_the_convolutions_shape() -> None:
    """MIOpenDriver takes them from the input."""
    plan = read("fuseplan driver CBAInfer -F 3 -n 1 -c 4 -H 9 -W 8 -k 6")
    assert [each.shape for each in plan.operands[1:]] == [(6, 7, 6)] * 4


def test_letters_of_operators_that_a_mode_has_not_change_nothing() -> None:
    assert said("-F 2 -n 1 -c 4 -H 9 -W 8 -k 256 -y 1 -x 1 -u 2") == said("-F 2 -n 1 -c 4 -H 9 -W 8")


@pytest.mark.parametrize(
    ("letters", "says"),
    [
        ("-n x", "-n, --batchsize has no such value", ),
        ("-n 0", "got '0'; want a whole number, 1 or more"),
        ("-p -1", "got '-1'; want a whole number, 0 or more"),
        ("-n 1.5", "got '1.5'"),
        ("-n 1_0", "got '1_0'"),
        ("-A 1_0", "got '1_0'"),
        ("-A x", "-A, --alpha has no such value"),
        ("-A nan", "want a number"),
        ("-m 11", "want 0 or pasthru, 1 or logistic"),
        ("-m rellu", "Did you mean `relu`?"),
        ("-M 2", "want 0 or per_activation, 1 or spatial"),
        ("-F 99", "-F, -J, --fusion_mode has no such value"),
        ("-z full", "want conv or default or same or valid"),
        ("-r 1", "got '1'; want 0 alone"),
        ("-_ 4", "want a whole number, 1 to 3"),
        ("-I NCDHW", "want NCHW or NHWC"),
        ("-f NCW", "-f, --fil_layout"),
        ("-I NHWC -O NCHW", "got 'NCHW'; want NHWC, the input's"),
        ("-! 4", "Write --spatial_dim 3, or leave it out"),
        ("-_ 1 -H 4", "Write --spatial_dim 2, or leave it out"),
        ("-_ 1 -p 1", "-p, --pad_h"),
        ("-g 2 -c 3", "groups"),
        ("-H 2", "the kernel is larger than its padded input"),
        ("-k 99999999999", "want a whole number from 1 to 2^31 - 1"),
        ("-p 99999999999", "padding must be 0 to 2^31 - 1"),
    ],
)  # fmt: skip
def test_wrong_values_are_told_with_their_flag(letters: str, says: str) -> None:
    with pytest.raises(PlanError) as error:
        said(letters.replace("-! ", "'-!' "))
    assert says in str(error.value)


def test_a_problem_that_is_none() -> None:
    with pytest.raises(PlanError, match="has no problem 'CBAInferfp8'"):
        Problem("CBAInferfp8", {}).plan()
    with pytest.raises(PlanError) as refused:
        Problem("conv", {}).plan()
    assert str(refused.value).count("CBAInferbfp16") == 1, "the names are told once"
    with pytest.raises(PlanError, match=r"Did you mean `CBAInfer`\?"):
        Problem("cbainfer", {}).plan()
    with pytest.raises(PlanError, match="Leave out the quotes"):
        Problem("CBAInfer -n 2 -c 8", {}).plan()
    with pytest.raises(PlanError, match="the only mode of CAInfer"):
        said("-F 4", "CAInfer")
    assert said("-F 5", "CAInfer") == said("", "CAInfer")


def test_an_unknown_letter_is_told() -> None:
    with pytest.raises(click.NoSuchOption, match="-Z"):
        said("-Z 1")


def test_no_letter_stands_for_two_things() -> None:
    flags = [flag for parameter in driver_command.params for flag in parameter.opts]
    assert len(flags) == len(set(flags))
    assert set(BY_WORD) <= {parameter.name for parameter in driver_command.params}


@st.composite
def spoken(draw: st.DrawFn) -> FusionPlan:
    """Plans of the driver's operators, most of which its letters can say."""
    src = draw(tensors(ranks=(3, 4, 5), dtypes=("f32", "f16", "bf16"), strided=False))
    plan = FusionPlan(src)
    for word in MODES[draw(st.sampled_from(tuple(MODES)))]:
        numbers = st.floats(allow_nan=False)
        norms = st.sampled_from(["spatial", "per_activation"])
        running = st.booleans() if src.batch > 1 else st.just(False)
        made = {
            "c": convolutions(plan.output),
            "b": st.just(Bias()),
            "n": st.builds(BatchNorm, norms, epsilon=numbers),
            "a": activations(numbers),
            "t": st.builds(BatchNormTraining, norms, running=running, saved=st.booleans(), epsilon=numbers),
            "g": st.builds(
                BatchNormBackward, activations(numbers), norms, st.sampled_from(["saved", "recomputed"])
            ),
            "d": st.builds(ActivationBackward, activations(numbers)),
        }
        plan.add(draw(made[word]))
    return plan


@given(st.one_of(spoken(), plans()))
def test_a_command_reproduces_its_plan(plan: FusionPlan) -> None:
    assert read(command_of(plan)) == plan


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_the_letters_say_what_they_can(axes: int) -> None:
    src = TensorSpec((2, 4, *(9, 8, 7)[:axes]), "f16")
    conv = CONVOLUTIONS[axes - 1](6, kernel=(3, 1, 2)[:axes], stride=2, padding=(1, 0, 1)[:axes], groups=2)
    plan = FusionPlan(src, conv, BatchNorm(epsilon=1e-3))
    assert command_of(plan).startswith("fuseplan driver CBAInferfp16 -F 3 ")
    assert "--epsilon 0.001" in command_of(plan)


@pytest.mark.parametrize(
    "text",
    [
        "f64[1x4x9x8] -> bias",
        "f32[1x4x9x8] -> relu -> bias",
        "f32[1x4x9x8] -> conv2d(6, kernel=3, precision=tf32) -> bias",
        "f32[1x4x9x8] -> conv2d(6, kernel=3, padding=((1, 0), (0, 1))) -> bias",
        "f32[1x4x9x8] -> batch_norm(inverse=True) -> relu",
        "f16[1x4x9x8] -> batch_norm -> power(1, beta=0)",
        "f32[2x4x4x4, strides=100:1:16:4] -> batch_norm -> relu",
    ],
)
def test_other_plans_are_written_as_their_text(text: str) -> None:
    assert command_of(FusionPlan.parse(text)) == shlex.join(["fuseplan", "run", text])


def test_every_problem_and_letter_has_help() -> None:
    told = driver_command.get_help(click.Context(driver_command))
    assert all(name in told for name in PROBLEMS)
    assert all(f"{flag}" in told for letter in LETTERS for flag in letter.flags)


def test_the_graph_of_a_plan() -> None:
    plan = FusionPlan.parse('f32[1x4x9x8] -> conv2d(6, kernel=3) -> elementwise("x * k", k=2)')
    lines = plan.to_dot().splitlines()
    assert lines[0] == "digraph plan {"
    assert lines[-1] == "}"
    assert '  operator_1 [shape=ellipse, label="elementwise(\\"x * k\\", k=2)"]' in lines
    assert '  weight [shape=box, style=dashed, label="weight: f32[6x4x3x3]"]' in lines
    assert "  src -> operator_0" in lines
    assert '  operator_0 -> operator_1 [label="f32[1x6x7x6]"]' in lines
    assert "  operator_1 -> dst" in lines
    assert FusionPlan("f32[1x4]").to_dot().count("->") == 1
