from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np
import pytest

from fuseplan.errors import PlanError
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import RULES, match
from fuseplan.language.declarations import Operand, Parameter, operand, parameter
from fuseplan.language.tensor import TensorSpec
from fuseplan.op import Elementwise, operator
from fuseplan.ops import BY_NAME, OPERATORS
from fuseplan.ops.activation import Clamp, Elu, LeakyRelu, Relu
from fuseplan.ops.affine import Add, BatchNorm, Bias, Prelu
from fuseplan.ops.embedding import Embedding
from fuseplan.plans.plan import FusionPlan
from fuseplan.scalar import Scalar, leaf, text

IMAGE = TensorSpec((2, 3, 4, 5), "f16", "nhwc")


def test_a_class_body_declares_an_operator() -> None:
    @operator
    class HalfOfShifted(Elementwise):
        """(x + shift)/2 or, with `late`, x/2 + shift"""

        shift = operand("channel")
        late: bool = False
        divisor: float = parameter(default=2)

        def apply(self, x: Scalar, shift: Scalar, divisor: Scalar) -> Scalar:
            return x / divisor + shift if self.late else (x + shift) / divisor

    op = HalfOfShifted(late=True)
    assert (op.name, op.kind) == ("half_of_shifted", "elementwise")
    assert op.operands(IMAGE) == (Operand("shift", (3,), "f32", "channel", (1,)),)
    assert op.parameters() == (Parameter("divisor", 2.0),)
    assert op.attributes() == {"late": True}
    assert text(op.formula()) == "x / divisor + shift"
    assert text(op.formula({"shift": "shift_2"})) == "x / divisor + shift_2"
    result = op.reference(np.ones((1, 2, 3)), {"shift": np.array([10.0, 20.0])}, {"divisor": 4.0})
    np.testing.assert_array_equal(result, np.broadcast_to([[[10.25], [20.25]]], (1, 2, 3)))


def test_a_formula_takes_what_its_class_declares() -> None:
    with pytest.raises(TypeError, match=r"apply takes x and \['bias'\]; declared are \['shift'\]"):

        @operator
        class Wrong(Elementwise):
            """x + shift"""

            shift = operand("channel")

            def apply(self, x: Scalar, bias: Scalar) -> Scalar:
                return x + bias


def test_a_formula_is_made_once_for_an_operator_and_once_for_its_place_in_a_plan() -> None:
    made: list[str] = []

    @operator
    class Counted(Elementwise):
        """x + 1"""

        def apply(self, x: Scalar) -> Scalar:
            made.append("x")
            return x + 1

    op = Counted()
    plan = FusionPlan("f32[2x3x5x7]", op, op)
    lower(match(plan))
    assert len(made) == 3
    assert [step.formulas for step in plan] == [(leaf("x") + 1,)] * 2
    assert len(made) == 3


def test_an_operator_that_cannot_be_made_without_arguments_gives_samples() -> None:
    with pytest.raises(TypeError, match=r"Wide: width has no default, so the class needs its own `samples`"):

        @operator
        class Wide(Elementwise):
            """y = x * width"""

            width: float = parameter()

            def apply(self, x: Scalar, width: Scalar) -> Scalar:
                return x * width


def test_an_operator_is_documented() -> None:
    with pytest.raises(TypeError, match="no docstring"):

        @operator
        class Wrong(Elementwise):
            def apply(self, x: Scalar) -> Scalar:
                return x


def test_parameters_follow_attributes() -> None:
    with pytest.raises(TypeError, match="attributes come before parameters"):

        @operator
        class Wrong(Elementwise):
            """x * slope"""

            slope: float = parameter(default=1)
            shared: bool = False

            def apply(self, x: Scalar, slope: Scalar) -> Scalar:
                return x * slope


def test_operators_are_values() -> None:
    assert Elu(2) == Elu(alpha=2.0)
    assert hash(Elu(2)) == hash(Elu(2.0))
    assert len({Elu(), LeakyRelu()}) == 2
    assert {Relu(), Relu()} == {Relu()}
    assert pickle.loads(pickle.dumps(BatchNorm(inverse=True))) == BatchNorm(inverse=True)
    with pytest.raises(AttributeError):
        Elu().alpha = 3.0  # type: ignore[misc]


def test_operands_say_their_shape_and_dtype() -> None:
    assert Bias().operands(IMAGE) == (Operand("bias", (3,), "f32", "channel", (1,)),)
    assert Add().operands(IMAGE) == (
        Operand("other", (2, 3, 4, 5), "f16", "element", (0, 1, 2, 3), spec=IMAGE),
    )
    assert Prelu(shared=True).operands(IMAGE) == (Operand("slope", (1,), "f32", "shared"),)
    per_activation = BatchNorm("per_activation").operands(TensorSpec((2, 3, 4, 5), "f64"))
    assert per_activation[0] == Operand("mean", (3, 4, 5), "f64", "activation", (1, 2, 3))
    assert [each.name for each in per_activation] == ["mean", "variance", "scale", "shift"]
    inverse = BatchNorm(inverse=True)
    assert [each.name for each in inverse.operands(IMAGE)] == ["mean", "inverse_variance", "scale", "shift"]
    assert inverse.parameters() == ()


def test_operators_have_words_of_their_own() -> None:
    assert len(BY_NAME) == len(OPERATORS)
    assert {kind.name for kind in OPERATORS} >= {"conv2d", "bias", "batch_norm", "leaky_relu", "elementwise"}


@pytest.mark.parametrize("kind", OPERATORS, ids=lambda kind: kind.name)
def test_every_operator_is_complete(kind: Any) -> None:
    samples = list(kind.samples())
    assert samples, "samples are what tests and documents are made of"
    assert kind.kind in {"elementwise", *RULES}
    assert all(isinstance(op, kind) for _, op in samples)
    for tensor, op in samples:
        src = TensorSpec.parse(tensor)
        more = isinstance(op, Embedding)
        assert op.is_gradient or op.output(src).rank <= src.rank + more, "sums and their kin remove axes"
    assert all(str(FusionPlan(tensor, op)).startswith(f"{tensor} -> ") for tensor, op in samples)


@pytest.mark.parametrize(
    ("name", "fields", "blamed", "says"),
    [
        ("elu", {"alpha": math.nan}, "alpha", "got nan"),
        ("elu", {"alpha": True}, "alpha", "got True"),
        ("elu", {"alpha": "1"}, "alpha", "got '1'"),
        ("elu", {"alpha": None}, "alpha", "got None"),
        ("elu", {"alpha": 10**400}, "alpha", "fits in a float"),
        ("elu", {"alpha": 1j}, "alpha", "got 1j"),
        ("gelu", {"approximate": "tan"}, "approximate", "Did you mean `tanh`?"),
        ("gelu", {"approximate": 3}, "approximate", "none or tanh"),
        ("batch_norm", {"mode": "spacial"}, "mode", "Did you mean `spatial`?"),
        ("batch_norm", {"inverse": 1}, "inverse", "got 1"),
        ("batch_norm", {"inverse": True, "epsilon": 1e-3}, "epsilon", "no meaning here"),
        ("prelu", {"shared": "yes"}, "shared", "got 'yes'"),
    ],
)
def test_what_no_operator_can_have_is_refused_by_field(
    name: str, fields: dict[str, Any], blamed: str, says: str
) -> None:
    with pytest.raises(PlanError) as caught:
        BY_NAME[name](**fields)
    assert caught.value.field == blamed
    assert says in str(caught.value)


def test_parameters_may_be_infinite_and_zero_has_no_sign() -> None:
    assert Clamp(0, math.inf).max == math.inf
    assert math.copysign(1, Elu(-0.0).alpha) == 1
    half: Any = np.float32(0.5)
    assert repr(Elu(half).alpha) == "0.5"


def test_operands_larger_than_memory_are_refused() -> None:
    src = TensorSpec((1, 2**30, 2**30), "f16")
    with pytest.raises(PlanError, match="its mean is larger than memory"):
        BatchNorm("per_activation").operands(TensorSpec((1, 2**31, 2**31 - 1), "f16"))
    assert BatchNorm("per_activation").operands(src)[0].dtype == "f32"


def test_a_result_owns_its_memory() -> None:
    src = np.ones((2, 3))
    result = BY_NAME["identity"]().reference(src, {}, {})
    result[...] = 2
    assert src.max() == 1
