"""A training step of a small Llama on a GPU: operators of attention and of the loss, and right gradients."""

from __future__ import annotations

import argparse
from dataclasses import replace

import pytest
import torch

from benchmarks import training
from benchmarks.zoo import TRAINED
from fuseplan.measure.clock import Protocol
from fuseplan.plans.plan import FusionPlan
from fuseplan.torch import texts, trained

pytest.importorskip("transformers")

SMALL = {
    "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "vocab_size": 8192, "use_cache": False,
}  # fmt: skip


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="the operator of attention is Hopper's",
)
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch.compile's advice about TF32 is no failure
def test_a_step_with_grouped_heads_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """And keeps less memory than torch.compile's."""
    taken: list[str] = []
    text_of = texts.operators_text

    def kept(plan: FusionPlan) -> str:
        taken.append(text_of(plan))
        return taken[-1]

    monkeypatch.setattr(trained, "operators_text", kept)
    monkeypatch.setattr(training, "PROTOCOL", Protocol(rounds=1, block_seconds=0.001))
    torch._dynamo.reset()
    entry = replace(TRAINED["llama_4x2048"], fields=SMALL)
    peers = ["torch", "torch.compile", "fuseplan"]
    given = argparse.Namespace(device="cuda", dtype="bfloat16", tokens=512, threads=1, peers=peers)
    with torch.enable_grad():  # tests of this folder have none otherwise
        row = training.measured(entry, 8, given)
    assert row["right"] == {"fuseplan": True}
    assert row["bytes"]["fuseplan"] < row["bytes"]["torch.compile"]
    assert any("key_heads=2" in text for text in taken)
