"""The benchmark of training steps, in small, on a CPU."""

from __future__ import annotations

import argparse
from dataclasses import replace

import pytest
import torch

from benchmarks import training
from benchmarks.zoo import TRAINED
from fuseplan.measure.clock import Protocol
from fuseplan.torch import heads, trained

pytest.importorskip("transformers")

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own, of Inductor's imports
@pytest.mark.parametrize(("name", "dtype"), [*zip(TRAINED, ("float32", "bfloat16"), strict=True)])
def test_a_step_is_measured_and_its_gradients_are_right(
    name: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the operators of attention and of the loss, which small models on a CPU would not have."""
    monkeypatch.setattr(heads, "FEWEST", 1)
    monkeypatch.setattr(trained, "is_fast", lambda *_: True)
    torch._dynamo.reset()
    monkeypatch.setattr(training, "PROTOCOL", Protocol(rounds=1, block_seconds=0.001))
    more = {"num_key_value_heads": 2} if "llama" in name else {}
    entry = replace(TRAINED[name], fields={**TRAINED[name].fields, **SMALL, **more, "vocab_size": 1000})
    given = argparse.Namespace(
        device="cpu", dtype=dtype, tokens=32, threads=1, peers=["torch", "fuseplan", "fuseplan:torch"]
    )
    row = training.measured(entry, 2, given)
    assert row["right"] == {"fuseplan": True, "fuseplan:torch": True}
    assert 0 < row["errors"]["torch"] < {"float32": 1e-4, "bfloat16": 0.1}[dtype]
    assert min(row["seconds"].values()) > 0


def test_an_error_is_of_the_worst_gradient_that_is_one() -> None:
    exact = {"a": torch.ones(3), "b": torch.full((2,), 1e-9)}
    got = {"a": torch.ones(3) * 1.5, "b": torch.ones(2)}
    assert training.error(got, exact) == pytest.approx(0.5)
