"""A program: two processes that share the tensors of fused modules; `meshes.told` runs it.

Each check compares with torch's layers in float64, unshared, and tells which plans a process ran.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fuseplan.torch as fused
from fuseplan.errors import ArgumentError
from fuseplan.torch import arenas, kernels, operator
from fuseplan.torch.dynamo import compile_graph

COUNT, WIDTH, HIDDEN = 2, 16, 64
BOUND = 3e-5  # of the largest value, in f32


class Block(nn.Module):  # type: ignore[misc]
    """A feed-forward block: each run of layers that is a plan is a module of its own, or torch's layers."""

    def __init__(self, run: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            run(nn.LayerNorm(WIDTH)),
            run(nn.Linear(WIDTH, HIDDEN), nn.GELU()),
            run(nn.Linear(HIDDEN, WIDTH)),
        )

    def forward(self, src: torch.Tensor) -> torch.Tensor:
        return self.norm(self.down(self.up(src)) + src)


def _made(mesh: DeviceMesh, run: Callable[..., nn.Module]) -> tuple[nn.Module, nn.Module, torch.Tensor]:
    """The module, torch's own layers with its parameters in float64, and an input, alike in each process."""
    torch.manual_seed(0)
    module, exact = Block(run).to(mesh.device_type), Block(nn.Sequential).to(mesh.device_type)
    exact.load_state_dict(module.state_dict())
    return module, exact.double(), torch.randn(3, 4, WIDTH).to(mesh.device_type)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.shape == want.shape
    away = float((_whole(got).double() - want).abs().max() / want.abs().max())
    assert away <= BOUND, away


def _compare(module: nn.Module, exact: nn.Module, src: torch.Tensor) -> None:
    """The value, and the gradients of all parameters."""
    wide = _whole(src).double()
    want, got = exact(wide), module(src)
    _close(got.detach(), want.detach())
    (want**3).sum().backward()  # squares of normalized rows have a constant sum
    (got**3).sum().backward()
    for one, other in zip(module.parameters(), exact.parameters(), strict=True):
        _close(one.grad, other.grad)


@contextmanager
def _plans() -> Iterator[set[str]]:
    """The plans that this process runs, each as the last extent of its input and its operators."""
    seen, kernel_on = set[str](), kernels.kernel_on

    def watched(operators: str, src: torch.Tensor) -> Any:
        seen.add(f"{src.shape[-1]} -> {operators.rpartition('] -> ')[2]}")
        return kernel_on(operators, src)

    with patch.object(operator, "kernel_on", watched), patch.object(arenas, "kernel_on", watched):
        yield seen


def _shared(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    """The first product's features, and the second one's channels, are shared out."""
    for path, kind, places in (
        ("up", "weight", Shard(0)),
        ("up", "bias", Shard(0)),
        ("down", "weight", Shard(1)),
    ):
        if name.startswith(path) and isinstance(module, nn.Linear):
            whole = getattr(module, kind).detach()
            setattr(module, kind, nn.Parameter(distribute_tensor(whole, mesh, [places])))


def dtensors(mesh: DeviceMesh, fuses: bool = False) -> set[str]:
    """A module whose parameters and inputs are DTensors."""
    module, exact, src = _made(mesh, nn.Sequential if fuses else fused.Fused)
    module = distribute_module(fused.fuse(module, src) if fuses else module, mesh, _shared)
    with _plans() as seen:
        _compare(module, exact, distribute_tensor(src, mesh, [Replicate()]))
    return seen


def whole_modules(mesh: DeviceMesh) -> set[str]:
    """A module that was fused as a whole, likewise."""
    return dtensors(mesh, fuses=True)


def rows(mesh: DeviceMesh) -> set[str]:
    """Inputs of which each process has some rows, and whole parameters."""
    module, exact, src = _made(mesh, fused.Fused)
    module = distribute_module(module, mesh)
    with _plans() as seen:
        _compare(module, exact, distribute_tensor(src, mesh, [Shard(1)]))
    try:
        module(src)
    except ArgumentError as error:
        assert "a plan takes DTensors of one mesh, or torch's tensors" in str(error)  # noqa: PT017 - no pytest here
    else:
        raise AssertionError("parameters are DTensors, and the input is none")
    return seen


def compiled(mesh: DeviceMesh) -> set[str]:
    """torch.compile of torch's layers in torch's parallel styles."""
    module, exact, src = _made(mesh, nn.Sequential)
    module = parallelize_module(module, mesh, {"up.0": ColwiseParallel(), "down.0": RowwiseParallel()})
    with _plans() as seen, torch.no_grad():
        _close(torch.compile(module, backend=compile_graph)(src), exact(src.double()))
    return seen


def fully_sharded(mesh: DeviceMesh, fuses: bool = False) -> set[str]:
    """FSDP2 around a fused run of layers, and around the module."""
    module, exact, src = _made(mesh, nn.Sequential if fuses else fused.Fused)
    if fuses:
        module = fused.fuse(module, src)
    else:
        fully_shard(module.up, mesh=mesh)
    fully_shard(module, mesh=mesh)
    with _plans() as seen:
        module(src)  # the first call that records gradients is torch's
        _compare(module, exact, src)
    return seen


def fully_sharded_whole(mesh: DeviceMesh) -> set[str]:
    """FSDP2 around a module that was fused as a whole."""
    return fully_sharded(mesh, fuses=True)


CHECKS = (dtensors, whole_modules, rows, compiled, fully_sharded, fully_sharded_whole)


def _process(rank: int, folder: Path, device: str) -> None:
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{folder}/store", rank=rank, world_size=COUNT, timeout=timedelta(seconds=60),
    )  # fmt: skip
    mesh, told = init_device_mesh(device, (COUNT,)), dict[str, Any]()
    for check in CHECKS:
        try:
            told[check.__name__] = sorted(check(mesh))
        except Exception:
            told[check.__name__] = traceback.format_exc()
    (folder / f"{rank}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


def main(folder: Path, device: str) -> None:
    """Forks the processes, so that torch is imported once."""
    children = []
    for rank in range(COUNT):
        children.append(os.fork())
        if not children[-1]:
            _process(rank, folder, device)
            os._exit(0)
    if any(os.waitpid(child, 0)[1] for child in children):
        sys.exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
