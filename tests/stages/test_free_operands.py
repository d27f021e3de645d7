"""Operands that each call gives: checked once, then by how they look."""

import numpy as np
import pytest
import torch

import fuseplan
from fuseplan.errors import ArgumentError
from fuseplan.measure.data import deviation, random_arrays

TEXT = "f32[2x5x9x7, nhwc] -> conv2d(6, kernel=3, padding=1) -> bias -> add -> leaky_relu(0.1)"


@pytest.mark.parametrize("target", ["cpu", "reference"])
def test_operands_that_look_like_those_before_are_read_anew(target: str) -> None:
    compiled = fuseplan.compile(TEXT, target, threads=2)
    arrays = random_arrays(compiled.plan, seed=5)
    given = {key: value for key, value in arrays.items() if key not in ("src", "other")}
    src, other, bound = arrays["src"], arrays["other"], compiled.bind(**given)
    out = np.empty((2, 9, 7, 6), np.float32).transpose(0, 3, 1, 2)
    strided = np.zeros((*other.shape[:-1], 2 * other.shape[-1]), other.dtype)[..., ::2]
    exact = {key: np.asarray(value, np.float64) for key, value in given.items()}

    def right(factor: float) -> np.ndarray:
        return compiled.plan.reference(np.float64(src), exact | {"other": factor * np.float64(other)})

    def refused(*ends: object, **named: object) -> str:
        with pytest.raises(ArgumentError) as met:
            bound(*ends, **named)
        return str(met.value)

    for factor in (1.0, -2.0):  # the first call checks all, later ones how tensors look
        assert deviation(bound(src, other=np.float32(factor) * other), right(factor)) < 1e-5
        assert "`other`" in refused(src, other=other[:1])
        assert "`other`" in refused(src, other=strided)
        assert "`other`" in refused(src, other=other.astype(np.float64))
        assert "1 operand missing" in refused(src)
        assert "overlap" in refused(src, other=other, out=other)
        assert deviation(bound(src, other=np.float32(factor) * other, out=out), right(factor)) < 1e-5
    tensors = torch.from_numpy(src), torch.from_numpy(other)
    for _ in range(2):
        assert deviation(bound(tensors[0], other=tensors[1]).numpy(), right(1.0)) < 1e-5
    assert "gradient" in refused(tensors[0], other=tensors[1].requires_grad_())


def test_an_operand_along_an_axis_is_read_where_it_lies_if_it_is_aligned() -> None:
    bound = fuseplan.compile("f32[3x64] -> scale", "cpu").bind()
    src, memory = torch.randn(3, 64), torch.randn(4, 80)
    for begin in (0, 0, 1, 16, 0, 3):
        for given in (memory[0, begin : begin + 64], memory.t()[begin : begin + 64, 0].clone()):
            torch.testing.assert_close(bound(src, scale=given), src * given)
            out = torch.empty_like(src)
            torch.testing.assert_close(bound(src, scale=given, out=out), src * given)
        with pytest.raises(ArgumentError, match="overlap"):
            bound(src, scale=out[0], out=out)
