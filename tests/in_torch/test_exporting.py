"""An export takes no more of torch's time than its graph needs."""

import contextlib
from typing import Any

import pytest
import torch
from torch import nn
from torch._export import utils
from torch.export import exported_program

from fuseplan.torch import exporting, overrides


@pytest.mark.parametrize("name", overrides.KEYS)
def test_torchs_operators_are_looked_up_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch itself looks them up for each of its namespaces, and for devices of all kinds."""
    looked: list[Any] = []
    real, keys = vars(utils)[overrides.LOOK], vars(exported_program)[name]

    def look() -> None:
        looked.append(vars(exported_program)[name])
        real()

    monkeypatch.setattr(utils, overrides.LOOK, look)
    module, x = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout()).eval(), torch.randn(3, 4)
    few = exporting._exported(module, (x,), {}, x.device).graph.code
    (used,) = looked
    assert {key.name.removeprefix("Autograd") for key in used} == {"CPU", "Meta"}
    assert vars(exported_program)[name] is keys
    monkeypatch.setattr(overrides, "few", lambda _: contextlib.nullcontext())
    assert exporting._exported(module, (x,), {}, x.device).graph.code == few
    assert len(looked) > 1
