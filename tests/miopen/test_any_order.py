"""Calls in any order, on any objects: every one returns a status, and none raises."""

from __future__ import annotations

import inspect
import random
from enum import IntEnum
from typing import Any

import numpy as np
import pytest

from fuseplan import miopen
from fuseplan.compat.miopen.functions import FUNCTIONS
from fuseplan.miopen import Ref
from miopen_calls import TAKES, activation, convolution, handle, tensor

# Tuning takes its seconds whatever the plan; the rest of Find 2.0 is measured in test_solutions.
LEFT_OUT = ("miopenSetFindOptionTuning", "miopenFindSolutions")
CHOSEN = [name for name in FUNCTIONS if name not in LEFT_OUT]
CALLS = 1500
SHAPES = ((2, 4, 5, 6),) * 4 + ((1, 4, 1, 1),) * 3 + ((4, 4, 1, 1), (4, 4, 3, 3), (2, 4), (4,))
FULL, CHANNEL, WEIGHT = 0, 4, 7  # places in SHAPES
PLACES = {
    **dict.fromkeys(("x", "y", "z", "dx", "dy", "input", "output", "reserved"), FULL),
    **dict.fromkeys(("xDesc", "yDesc", "zDesc", "dxDesc", "dyDesc", "inputDesc", "outputDesc"), FULL),
    **dict.fromkeys(("w", "wDesc", "filterDesc"), WEIGHT),
}
ODD = (None, "x", "reference", -1, 10**12, 0.5, True, (1, 1), object())


class Play:
    """A pool of objects, and calls on what fits, or does not, from it."""

    def __init__(self, seed: int) -> None:
        self.choose = random.Random(seed)
        leaky = activation(miopen.miopenActivationLEAKYRELU, 0.5)
        self.described = [tensor(*shape) for shape in SHAPES[:-1]]
        self.cells: list[Ref] = [handle(), convolution(), leaky]
        self.succeeded: set[str] = set()

    def value(self, name: str, hint: Any) -> Any:
        """What fits a parameter, nearly always."""
        choose, is_odd = self.choose.choice, self.choose.random() < 0.01
        if hint is Ref:
            self.cells.append(Ref())
            return self.cells[-1]
        if is_odd and name != "target":
            return choose(ODD)
        if inspect.isclass(hint) and issubclass(hint, IntEnum):
            return choose(list(hint)[:2] if self.choose.random() < 0.7 else list(hint))
        is_read = name not in ("tensorDesc", "derivedBnDesc", "descriptor")
        if hint is miopen.miopenTensorDescriptor_t and is_read and self.choose.random() < 0.95:
            return self.described[PLACES.get(name, CHANNEL)]
        if inspect.isclass(hint) and hint.__name__.startswith("miopen"):
            return choose(self.fitting(hint) or self.cells)
        if name.startswith(("alpha", "beta")):
            return float(name.startswith("alpha"))
        known = {
            "int": (1, 1, 2, 4, 5, 6),
            "float": (1.0, 0.5, 0.0),
            "bool": (True, False),
            "Extents": SHAPES,
        }
        if hint in known:
            return choose(known[hint])
        if name in ("target", "workspace"):
            return "cpu" if name == "target" else None
        shape = SHAPES[PLACES.get(name, CHANNEL)] if self.choose.random() < 0.9 else choose(SHAPES)
        return np.ones(shape, np.float32)

    def fitting(self, kind: Any) -> list[Ref]:
        """The oldest and the newest objects of a kind."""
        found = [cell for cell in self.cells if isinstance(cell.value, kind)]
        alive = [cell for cell in found if getattr(cell.value, "is_alive", True)]
        return alive[:8] + alive[-8:]

    def call(self, name: str) -> Any:
        values = [self.value(key, kind) for key, (kind, _) in TAKES[name].items()]
        status = FUNCTIONS[name](*values)
        assert isinstance(status, miopen.miopenStatus_t), name
        if status == 0:
            self.succeeded.add(name)
        else:
            assert miopen.miopenGetLastErrorMessage().startswith(f"{name}: ")
        return status


@pytest.mark.parametrize("seed", range(3))
def test_every_call_returns_a_status(seed: int) -> None:
    play = Play(seed)
    usual = [name for name in CHOSEN if not name.startswith(("miopenDestroy", "miopenGet"))]
    for _ in range(CALLS):
        pool = usual if play.choose.random() < 0.95 else CHOSEN
        play.call(play.choose.choice(pool))
    assert len(play.succeeded) > 50
