"""Models of the transformers library, with random weights and the shapes of their papers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

TOKENS = 128
LLAMA = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12}
WIDE = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}


@dataclass(frozen=True)
class Entry:
    """A class of the library, its configuration's class and fields, and the kind of its input."""

    model: str
    config: str
    reads: str
    fields: Mapping[str, Any] = field(default_factory=dict)


MODELS = {
    "resnet50": Entry("ResNetForImageClassification", "ResNetConfig", "images"),
    "mobilenet_v2": Entry("MobileNetV2ForImageClassification", "MobileNetV2Config", "images"),
    "efficientnet_b0": Entry(
        "EfficientNetForImageClassification", "EfficientNetConfig", "images",
        {"image_size": 224, "width_coefficient": 1.0, "depth_coefficient": 1.0, "hidden_dim": 1280},
    ),
    "convnext_t": Entry("ConvNextForImageClassification", "ConvNextConfig", "images"),
    "vit_b16": Entry("ViTForImageClassification", "ViTConfig", "images"),
    "bert_base": Entry("BertModel", "BertConfig", "tokens"),
    "gpt2": Entry("GPT2LMHeadModel", "GPT2Config", "tokens", {"use_cache": False}),
    "llama_160m": Entry(
        "LlamaForCausalLM", "LlamaConfig", "tokens",
        LLAMA | {"num_key_value_heads": 4, "vocab_size": 32000, "use_cache": False},
    ),
    "llama_4x2048": Entry("LlamaForCausalLM", "LlamaConfig", "tokens", WIDE | {"use_cache": False}),
    "qwen3_4x2048": Entry(
        "Qwen3ForCausalLM", "Qwen3Config", "tokens", WIDE | {"head_dim": 64, "use_cache": False}
    ),
    "gemma2_4x2048": Entry(
        "Gemma2ForCausalLM", "Gemma2Config", "tokens", WIDE | {"head_dim": 64, "use_cache": False}
    ),
}  # fmt: skip
EIGHT = tuple(MODELS)[:8]  # for one image or sentence on a CPU
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # two libraries draw two masks
TRAINED = {
    "bert_base": replace(MODELS["bert_base"], model="BertForMaskedLM", fields=NO_DROPOUT),
    "llama_4x2048": MODELS["llama_4x2048"],
}


class First(nn.Module):  # type: ignore[misc]
    """A model of one input and one output: the first of the library's results."""

    def __init__(self, model: nn.Module, reads: str) -> None:
        super().__init__()
        self.model, self.name = model, "pixel_values" if reads == "images" else "input_ids"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The logits, or the last hidden state."""
        made: torch.Tensor = self.model(**{self.name: x}, return_dict=False)[0]
        return made


class Loss(nn.Module):  # type: ignore[misc]
    """A model of language and its loss: each word is to be told at its place, or at the place before it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The mean of the losses."""
        made: torch.Tensor = self.model(input_ids=x, labels=x, return_dict=False)[0]
        return made


def made(entry: Entry) -> nn.Module:
    """A model with random weights."""
    import transformers  # noqa: PLC0415 - a peer's package

    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, entry.model)(getattr(transformers, entry.config)(**entry.fields))
    return model


def trained(entry: Entry, batch: int, tokens: int) -> tuple[Loss, torch.Tensor]:
    """A model in training mode with its loss, and its input."""
    return Loss(made(entry)).train(), torch.randint(0, 1000, (batch, tokens))


def built(name: str, batch: int = 1) -> tuple[nn.Module, torch.Tensor]:
    """A model in evaluation mode and its input.

    Statistics and factors of batch normalizations are drawn: as they are made, they would change nothing.
    """
    entry = MODELS[name]
    model = made(entry).eval()
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.normal_(0, 0.1)
            layer.running_var.uniform_(0.5, 1.5)
            nn.init.uniform_(layer.weight, 0.5, 1.5)
            nn.init.normal_(layer.bias, 0, 0.1)
    is_image = entry.reads == "images"
    x = torch.randn(batch, 3, 224, 224) if is_image else torch.randint(0, 1000, (batch, TOKENS))
    return First(model, entry.reads).eval(), x
