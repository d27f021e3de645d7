"""All that is measured on a GPU, by name. `peer` says what a peer is."""

from __future__ import annotations

from fuseplan.bench.peers.gpu_fused import CublasLt, Cudnn, CudnnChannelsLast, CudnnFolded
from fuseplan.bench.peers.gpu_torch import (
    GpuTorch,
    GpuTorchChannelsLast,
    GpuTorchCompile,
    GpuTorchCompileChannelsLast,
    GpuTorchCompileDefault,
    GpuTorchSteps,
    GpuUnfusedFirst,
    GpuUnfusedLast,
)
from fuseplan.bench.peers.ours import Fuseplan, FuseplanAgain, FuseplanPlain, FuseplanUnfused
from fuseplan.bench.peers.peer import Peer
from fuseplan.errors import ArgumentError, did_you_mean

GPU_PEERS: tuple[type[Peer], ...] = (
    Fuseplan,
    FuseplanAgain,
    FuseplanPlain,
    FuseplanUnfused,
    Cudnn,
    CudnnChannelsLast,
    CudnnFolded,
    CublasLt,
    GpuTorch,
    GpuTorchChannelsLast,
    GpuTorchSteps,
    GpuUnfusedFirst,
    GpuUnfusedLast,
    GpuTorchCompile,
    GpuTorchCompileDefault,
    GpuTorchCompileChannelsLast,
)
BY_NAME = {peer.name: peer for peer in GPU_PEERS}
USUAL = ("fuseplan", "fuseplan:plain", "cudnn", "cublaslt", "torch", "torch.compile")  # with all their forms


def gpu_peers_of(names: str) -> list[str]:
    """The peers that a list of names stands for: `torch` is also `torch:nhwc` and `torch:steps`.

    Raises:
        ArgumentError: there is no such peer.
    """
    found: list[str] = []
    for name in (word.strip() for word in names.split(",") if word.strip()):
        is_ours = name.startswith("fuseplan") and name in BY_NAME
        forms = [name] if is_ours else [each for each in BY_NAME if name in (each, each.split(":")[0])]
        if not forms:
            raise ArgumentError(f"no peer is named {name!r} on a GPU. {did_you_mean(name, BY_NAME)}")
        found += [each for each in forms if each not in found]
    return found
