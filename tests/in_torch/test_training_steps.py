"""The benchmark of training steps, in small, on a CPU."""

from __future__ import annotations

import argparse
from dataclasses import replace

import pytest
import torch

from benchmarks import training
from benchmarks.zoo import TRAINED
from fuseplan.measure.clock import Protocol

pytest.importorskip("transformers")

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}


@pytest.mark.parametrize("name", TRAINED)
def test_a_step_is_measured_and_its_gradients_are_right(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "PROTOCOL", Protocol(rounds=1, block_seconds=0.001))
    more = {"num_key_value_heads": 2} if "llama" in name else {}
    entry = replace(TRAINED[name], fields={**TRAINED[name].fields, **SMALL, **more, "vocab_size": 1000})
    given = argparse.Namespace(
        device="cpu", dtype="float32", tokens=8, threads=1, peers=["torch", "fuseplan:torch"]
    )
    row = training.measured(entry, 2, given)
    assert row["right"] == {"fuseplan:torch": True}
    assert 0 < row["errors"]["torch"] < 1e-4
    assert min(row["seconds"].values()) > 0


def test_an_error_is_of_the_worst_gradient_that_is_one() -> None:
    exact = {"a": torch.ones(3), "b": torch.full((2,), 1e-9)}
    got = {"a": torch.ones(3) * 1.5, "b": torch.ones(2)}
    assert training.error(got, exact) == pytest.approx(0.5)
