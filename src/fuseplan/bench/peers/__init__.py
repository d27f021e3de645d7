"""The libraries to compare with, and ourselves.

- `peer`: what a peer is, and what they share.
- `ours`: fuseplan through its public functions; also the same operators one at a time.
- `runtimes`: onnxruntime and openvino, on `onnx_model`.
- `torch_peer`: PyTorch, eager and compiled, in both layouts.
- `ncnn_peer`: ncnn.

`unfused` is what torch and onnxruntime do at their best without fusing.
"""

from __future__ import annotations

from fuseplan.bench.peers.ncnn_peer import Ncnn
from fuseplan.bench.peers.ours import Fuseplan, FuseplanAgain, FuseplanStrict, FuseplanUnfused
from fuseplan.bench.peers.peer import Peer
from fuseplan.bench.peers.runtimes import OnnxRuntime, OpenVino, UnfusedOnnxRuntime
from fuseplan.bench.peers.torch_peer import (
    Torch,
    TorchChannelsLast,
    TorchCompile,
    TorchCompileChannelsLast,
    UnfusedFirst,
    UnfusedLast,
)
from fuseplan.errors import ArgumentError, did_you_mean

PEERS: tuple[type[Peer], ...] = (
    Fuseplan,
    FuseplanAgain,
    FuseplanStrict,
    FuseplanUnfused,
    OnnxRuntime,
    Torch,
    TorchChannelsLast,
    TorchCompile,
    TorchCompileChannelsLast,
    Ncnn,
    OpenVino,
    UnfusedFirst,
    UnfusedLast,
    UnfusedOnnxRuntime,
)
BY_NAME = {peer.name: peer for peer in PEERS}
LIBRARIES = tuple(dict.fromkeys(name.split(":")[0] for name in BY_NAME if not name.startswith("fuseplan")))


def peers_of(libraries: str) -> list[str]:
    """The peers that a list of libraries stands for: `torch,ncnn` is torch in both layouts, and ncnn.

    Raises:
        ArgumentError: there is no such library.
    """
    found: list[str] = []
    for library in (word.strip() for word in libraries.split(",") if word.strip()):
        if library not in LIBRARIES:
            raise ArgumentError(f"no peer is named {library!r}. {did_you_mean(library, LIBRARIES)}")
        found += [name for name in BY_NAME if name.split(":")[0] == library]
    return found
