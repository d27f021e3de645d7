"""Fused modules whose tensors two GPUs share."""

from pathlib import Path

import pytest
import torch

import meshes


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_each_gpu_computes_its_share(tmp_path: Path) -> None:
    assert meshes.told(tmp_path, "cuda") == {check: [plans] * 2 for check, plans in meshes.CHECKS.items()}
