"""ONNX's Attention as a plan, beside onnxruntime."""

from typing import Any

import numpy as np
import pytest
from onnx import helper

from from_onnx.test_model import RNG, check, plans
from onnx_models import model


@pytest.mark.parametrize(
    ("shapes", "fields", "plan"),
    [
        (
            ((2, 4, 9, 8), (2, 2, 13, 8), (2, 2, 13, 6)),
            {"is_causal": 1},
            "f32[2x4x9x8] -> attention(is_causal=True, keys=13, key_heads=2, features=6)",
        ),
        (
            ((2, 9, 32), (2, 9, 32), (2, 9, 32), (9, 9)),
            {"q_num_heads": 4, "kv_num_heads": 4},
            "f32[2x4x9x8, bshc of bhsc] -> attention(bias_axes=st)",
        ),
        (
            ((2, 4, 9, 8),) * 3,
            {"softcap": 0.5, "scale": 0.25},
            "f32[2x4x9x8] -> attention(scale=0.25, softcap=0.5)",
        ),
        (((2, 4, 9, 8),) * 3 + ((9, 9),), {"softcap": 0.5}, ""),
    ],
)  # fmt: skip
def test_attention(shapes: tuple[tuple[int, ...], ...], fields: dict[str, Any], plan: str) -> None:
    named = dict(zip("qkvm", shapes, strict=False))
    node = helper.make_node("Attention", list(named), ["y"], **fields)
    proto = model([node], named, ["y"], {}, 23)
    given = {name: RNG.standard_normal(shape).astype(np.float32) for name, shape in named.items()}
    assert plans(check(proto, given), given) == [plan] * bool(plan)
