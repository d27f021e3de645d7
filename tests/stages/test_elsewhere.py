"""Names of other libraries: each is answered by the name in a plan, or by what there is instead."""

import re
import tomllib
from pathlib import Path

import pytest

from fuseplan.errors import PlanError
from fuseplan.language.dtypes import DTYPES as OURS
from fuseplan.language.fields import fields_of
from fuseplan.messages import elsewhere
from fuseplan.messages.elsewhere import LAYOUTS, answers, folded
from fuseplan.ops import BY_NAME
from fuseplan.ops import OPERATORS as OPERATORS_HERE
from fuseplan.ops.expression import Expression
from fuseplan.plans.plan import FusionPlan
from fuseplan.plans.text import parse_operator
from fuseplan.scalar import Scalar


def said(text: str) -> str:
    with pytest.raises(PlanError) as caught:
        FusionPlan.parse(text)
    return str(caught.value)


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("ReLU", "relu"),
        ("LeakyReLU", "leaky_relu"),
        ("GELU", "gelu"),
        ("BatchNorm2d", "batch_norm"),
        ("InstanceNorm2d", "instance_norm"),
        ("BatchNormalization", "batch_norm"),
        ("Clip", "clamp"),
        ("relu6", "clipped_relu"),
        ("Swish", "silu"),
        ("hard_swish", "hardswish"),
        ("MatMul", "matmul"),
        ("bmm", "matmul"),
        ("Conv2D", "conv2d"),
        ("PRelu", "prelu"),
        ("bacth_nrom", "batch_norm"),
        ("ReduceMean", "mean"),
        ("LogSoftmax", "log_softmax"),
    ],
)
def test_an_operator_is_known_by_its_other_names(word: str, meant: str) -> None:
    assert f"Did you mean `{meant}`?" in said(f"f32[2x3] -> {word}")


@pytest.mark.parametrize(
    "word",
    [
        "LRN", "Dense", "gemm",
        "softmin", "max", "swiglu", "softmax2d", "ReduceL1", "reshape", "permute", "dropout2d",
    ],
)  # fmt: skip
def test_an_operator_that_no_plan_has_is_said_plainly(word: str) -> None:
    printed = said(f"f32[2x3] -> {word}(4) -> relu")
    assert printed.startswith(f"{word} is not in fuseplan\n")
    assert "Did you mean" not in printed
    assert printed.splitlines()[3] == "  " + " " * len("f32[2x3] -> ") + "^" * len(word)
    assert len(printed.splitlines()) > 4, "what there is instead"


def test_a_dense_layer_is_told_by_its_weight() -> None:
    printed = said("f32[256x256] -> dense(256)")
    assert "`linear(N)` for a weight [out, in], as torch.nn.Linear stores it" in printed
    assert "`matmul(N)` for a weight [in, out], as Keras stores it" in printed


def test_a_word_like_no_operator_gets_all_of_them() -> None:
    assert "Known here: conv1d, conv2d" in said("f32[2x3] -> quux")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("half[2x3]", "Did you mean `f16`?"),
        ("float32[2x3]", "Did you mean `f32`?"),
        ("double[2x3]", "Did you mean `f64`?"),
        ("bfloat16[2x3]", "Did you mean `bf16`?"),
        ("F32[2x3]", "Did you mean `f32`?"),
        ("f32[2x3x4x4, NHWC]", "Did you mean `nhwc`?"),
        ("f32[2x3x4x4, channels_last]", "Did you mean `nhwc`?"),
        ("f32[2x3x4, channels_first]", "Did you mean `ncw`?"),
        ("f32[2x3x4, nlc]", "Did you mean `nwc`?"),
        ("f32[2x3] -> matmul(4, bias=True)", "Write it as the next operator: `-> bias`"),
        ("f32[2x3x8x8] -> conv2d(4, kernel_size=3)", "Did you mean `kernel`?"),
        ("f32[2x3x8x8] -> conv2d(filters=4, kernel=3)", "Did you mean `features`?"),
        ("f32[2x3] -> relu(inplace=True)", "Leave it out"),
        ("f32[2x3] -> batch_norm(eps=1e-3)", "Did you mean `epsilon`?"),
    ],
)
def test_dtypes_layouts_and_fields_are_known_by_their_other_names(text: str, says: str) -> None:
    assert says in said(text)


MISUSED = [
    ("Conv2d(16, kernel_size=3)", "conv2d has no field 'kernel_size'\n\n  Did you mean `kernel`?"),
    ("Relu(inplace=True)", "relu has no field 'inplace'\n\n  Leave it out"),
    ("Matmul(4, bias=True)", "Write it as the next operator: `-> bias`"),
    (
        "Conv2d(16, 32, 3)",
        "conv2d takes 2 values without a name\n\n  got 3; want such as Conv2d(7, kernel=1)",
    ),
    ("Conv2d(16, 32, 3)", "PyTorch's Conv2d(16, 32, 3) is Conv2d(32, kernel=3) here"),
    ("Conv2d(16)", "conv2d needs kernel\n\n  want such as Conv2d(7, kernel=1)"),
    ("Clamp(0)", "clamp needs max"),
    ("Clamp(0, min=1)", "clamp: min is given twice"),
    ("Relu(True)", "relu takes 0 values without a name\n\n  got 1; want such as Relu()"),
    ("LeakyRelu(alpha=0.1)", "Did you mean `negative_slope`?"),
]


@pytest.mark.parametrize(("call", "says"), MISUSED)
def test_a_constructor_says_what_is_wrong_with_its_fields(call: str, says: str) -> None:
    with pytest.raises(PlanError) as caught:
        eval(call, {kind.__name__: kind for kind in OPERATORS_HERE})
    assert says in str(caught.value)


def test_an_operators_own_type_error_is_not_hidden() -> None:
    def broken(x: Scalar) -> Scalar:
        raise TypeError("its own")

    with pytest.raises(TypeError, match="its own"):
        Expression(broken)


def parted(kind: str) -> tuple[dict[str, str], dict[str, str]]:
    """The answers that are names here, and those that are sentences."""
    told = answers(kind).items()
    named = {name: answer for name, answer in told if " " not in answer}
    return named, {name: answer for name, answer in told if " " in answer}


OPERATORS, LACKING = parted("operators")
DTYPES, FIELDS = answers("dtypes"), answers("fields")


def test_no_name_has_two_answers() -> None:
    place = Path(elsewhere.__file__).with_suffix(".toml")
    told = tomllib.loads(place.read_text(encoding="utf-8"))
    for kind in ("operators", "fields", "dtypes"):
        lists = [*told[kind].values(), *(names for names, _ in told["lacking"].get(kind, ()))]
        listed = [name for names in lists for name in names.split()]
        assert len(listed) == len(set(listed)) == len(answers(kind))


def test_keys_are_folded_and_answers_are_names_here() -> None:
    tables = (OPERATORS, LACKING, FIELDS, DTYPES, LAYOUTS)
    assert all(folded(key) == key for table in tables for key in table)
    assert set(OPERATORS.values()) <= BY_NAME.keys()
    assert set(DTYPES.values()) == OURS.keys()
    names = {name for kind in BY_NAME.values() for name in fields_of(kind)[0]}
    assert {answer for answer in FIELDS.values() if " " not in answer} <= names


def test_no_operator_is_called_lacking() -> None:
    assert not {folded(name) for name in BY_NAME} & LACKING.keys()


def test_what_an_answer_quotes_is_an_operator() -> None:
    quoted = [piece for answer in LACKING.values() for piece in re.findall(r"`([a-z].*?)`", answer)]
    for piece in quoted:
        if piece == "weight.T":
            continue
        for operator in piece.replace("(N", "(4").split(" -> "):
            word = operator.partition("(")[0]
            assert word in BY_NAME
            if "(" in operator:
                parse_operator(operator)
