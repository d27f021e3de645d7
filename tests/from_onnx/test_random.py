"""Random models beside ONNX Runtime: operators with random attributes, most of them behind the last one.

python -m pytest tests/from_onnx/test_random.py --cases 3000 --first 100000
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fuseplan.onnx
from drawn_onnx import Drawing, distance, is_float, rounded
from onnx_deep_steps import DEEP
from onnx_steps import STEPS

OPSETS = (13, 24)
RANKS = (0, 1, 2, 3, 3, 4, 4, 4, 5)
NODES = 9
WITHIN = 20  # times what rounding moves one operator's result


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    first, cases = map(metafunc.config.getoption, ("first", "cases"))
    metafunc.parametrize("seed", range(first, first + cases))


def drawn(seed: int) -> Drawing:
    """A model of three inputs, one of them perhaps without elements."""
    drawing = Drawing(seed, OPSETS[0] + seed % (OPSETS[1] + 1 - OPSETS[0]))
    rng = drawing.rng
    shapes = [[rng.randint(1, 7) for _ in range(rng.choice(RANKS))] for _ in range(2)]
    if shapes[0] and rng.random() < 0.05:
        shapes[0][rng.randrange(len(shapes[0]))] = 0
    drawing.given["x"] = drawing.values(
        *shapes[0], dtype=rng.choice((np.float32,) * 6 + (np.float64, np.float16))
    )
    drawing.given["k"] = drawing.values(
        *shapes[1], dtype=rng.choice((np.int64, np.int32, np.float32, np.uint8))
    )
    drawing.given["t"] = drawing.values(*shapes[rng.randint(0, 1)], dtype=np.bool_)
    drawing.found = dict(drawing.given)
    for _ in range(60):
        drawing.attempt(rng.choice(DEEP if rng.random() < 0.3 else STEPS))
        if len(drawing.found) > NODES + len(drawing.given):
            break
    return drawing


def coarsest(drawing: Drawing) -> float:
    """How far the coarsest dtype of a model's values is rounded."""
    return max(map(rounded, drawing.found.values()))


def compare(drawing: Drawing, outputs: list[str], got: Any) -> None:
    for name, one in zip(outputs, got, strict=True):
        other = drawing.found[name]
        assert (one.shape, one.dtype) == (other.shape, other.dtype), name
        far = distance(one, other)
        allowed = WITHIN * max(coarsest(drawing), 1e-5) if is_float(other) else 0
        assert far <= allowed, f"{name}: {far:.2g} away, of {allowed:.2g}\n{one}\n{other}"


def test_random_models(seed: int) -> None:
    """Each value is an output in one run, so that plans end everywhere, and the last one alone in another."""
    drawing = drawn(seed)
    every = [name for name in drawing.found if name not in drawing.given]
    if not every:
        return
    opened = [name for name in ("x", "k") if drawing.rng.random() < 0.3 and drawing.shape(name)]
    for outputs in (every, every[-1:]):
        model = fuseplan.onnx.load(drawing.proto(outputs, opened), threads=1)
        compare(drawing, outputs, model.run(None, drawing.given))
