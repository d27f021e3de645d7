"""The libraries to compare with, and ourselves.

- `peer`: the base of all peers.
- `ours`: fuseplan through its public functions; also the same operators one at a time.
- `torch_peer`: PyTorch, eager and compiled, in both layouts.
- `onnx_peer`: onnxruntime, on the model that it makes of a plan.

A checkout has more, in `benchmarks.peers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from fuseplan.bench.peers.onnx_peer import OnnxRuntime
from fuseplan.bench.peers.ours import Fuseplan, FuseplanAgain, FuseplanUnfused
from fuseplan.bench.peers.peer import Peer
from fuseplan.bench.peers.torch_peer import Torch, TorchChannelsLast, TorchCompile, TorchCompileChannelsLast
from fuseplan.errors import ArgumentError, did_you_mean
from fuseplan.system import checkout

OURS = "fuseplan"


@dataclass(frozen=True)
class Known:
    """The peers on a CPU or on a GPU.

    Attributes:
        by_name: all of them.
        usual: the libraries that are measured unless others are asked for, each in all its forms.
        always: the peers that are measured beside any library.
    """

    by_name: Mapping[str, type[Peer]]
    usual: tuple[str, ...]
    always: tuple[str, ...] = ()

    @property
    def libraries(self) -> tuple[str, ...]:
        """The names of libraries: `torch` is `torch` and `torch:nhwc`."""
        return tuple(
            dict.fromkeys(
                name.split(":")[0] for name in self.by_name if name.split(":")[0] not in self.always
            )
        )

    def named(self, asked: str | None, *, is_twice: bool = False, is_unfused: bool = False) -> list[str]:
        """The peers that a list of names stands for, in order.

        Args:
            asked: names with commas between them: a library in all its forms, or one form of ours; the usual
                libraries for None.
            is_twice: measure ourselves twice as well.
            is_unfused: measure our operators one at a time as well.

        Raises:
            ArgumentError: there is no such peer.
        """
        extra = [f"{OURS}:again"] * is_twice + [f"{OURS}:unfused"] * is_unfused
        found = [*self.always, *extra] if self.always else []
        for word in self.usual if asked is None else asked.split(","):
            found += [each for each in self._forms(word.strip()) if each not in found]
        return found

    def _forms(self, name: str) -> list[str]:
        if not name or name in self.always:
            return []
        forms = [each for each in self.by_name if name in (each, each.split(":")[0])]
        if not forms:
            raise ArgumentError(f"no peer is named {name!r}. {did_you_mean(name, self.libraries)}")
        return [name] if name.startswith(OURS) else forms


def by_name(*peers: type[Peer]) -> dict[str, type[Peer]]:
    """A table of peers by their names."""
    return {peer.name: peer for peer in peers}


FORMS = (Fuseplan, FuseplanAgain, FuseplanUnfused)
TORCH = (Torch, TorchChannelsLast, TorchCompile, TorchCompileChannelsLast)
INSTALLED = {
    False: Known(
        by_name(*FORMS, OnnxRuntime, *TORCH), ("onnxruntime", "torch", "torch.compile"), always=(OURS,)
    ),
    True: Known(by_name(*FORMS, *TORCH), (OURS, "torch", "torch.compile")),
}


@cache
def known(is_on_gpu: bool) -> Known:
    """The peers on a GPU, or on a CPU."""
    if not checkout.has_tools():
        return INSTALLED[is_on_gpu]
    found: Known = checkout.tool("peers", "").KNOWN[is_on_gpu]
    return found
