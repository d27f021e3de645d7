"""The passes of a model that torch.compile gives, forward and backward: plans have all of them, or torch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch

from fuseplan.graph.choose import left_whole
from fuseplan.graph.why import Reason, Why
from fuseplan.torch.cutting import Fusion
from fuseplan.torch.reporting import is_view, report_of, trace

# On a Zen 5: seconds that AOT autograd takes around a call, and around each operator of torch's in it, beside
# torch without it, by the number of passes. Around steps it was 0.22 ms with one operator, 0.52 with
# 144 in a row, and 0.9 to 1.8 with 100 to 430 of an MLP-mixer, an LSTM and a U-Net.
TAKEN = {1: (10e-6, 2e-6), 2: (400e-6, 4e-6)}


class Passes:
    """What is known of the passes, of which the backward one may be compiled in its first call.

    Args:
        lost: why the framework has all of them; None where that is not known before.
        is_printed: whether the reports are printed, and nothing is compiled.
    """

    def __init__(self, lost: Reason | None, is_printed: bool) -> None:
        self._lost, self._is_printed, self._is_told = lost, is_printed, False
        self._made: list[tuple[Fusion, torch.device]] = []
        self._left = 0  # operators of torch's in each call

    def add(self, made: Fusion, device: torch.device, own: Collection[int] = ()) -> None:
        """Notes a pass; `own` are the places of those inputs that are the module's own tensors."""
        self._made.append((made, device))
        self._left += _left(made, own)
        if self._is_told:
            self._tell(made, device)

    def decided(self, count: int) -> Reason | None:
        """Why torch has the graphs, of which there are so many; tells the reports of those that are known.

        A graph without plans, or whose plans save less than AOT autograd takes, is torch's: a training step
        of two layers of splines (64 rows of 16 features) took 3.8 times as long with plans, and takes 1.1.
        """
        self._lost, self._is_told = self._lost or self._slower(count), True
        for made, device in self._made:
            self._tell(made, device)
        return self._lost

    def _slower(self, count: int) -> Reason | None:
        fusions = [made for made, _ in self._made]
        saved = [made.saved for made in fusions if made.saved is not None]
        if len(saved) != count or any(map(_has_own, fusions)):
            return None
        call, operator = TAKEN[count]
        taken = call + operator * self._left
        told = f"all plans save {sum(saved) * 1e6:.1f} us, torch's compiler takes {taken * 1e6:.1f}"
        return Reason(Why.HOST, told) if sum(saved) < taken else None

    def _tell(self, made: Fusion, device: torch.device) -> None:
        graph = made.given.owning_module
        if self._lost and graph is not None:
            made = replace(made, module=graph, cut=left_whole(made.cut, self._lost))
        if self._is_printed:
            print(report_of(made, device))
        else:
            trace(lambda: report_of(made, device))


def _has_own(made: Fusion) -> bool:
    """Whether a graph has operators of ours that stand for several of torch's, such as losses of products."""
    return any(getattr(node.target, "namespace", "") == "fuseplan" for node in made.given.nodes)


def _left(made: Fusion, own: Collection[int]) -> int:
    """The operators that torch computes in each call, but for views."""
    graph, count = made.module.graph, 0
    late = {node for place, node in enumerate(graph.find_nodes(op="placeholder")) if place not in own}
    for node in graph.nodes:
        if node.op == "call_function" and not late.isdisjoint(node.all_input_nodes):
            late.add(node)
            count += not is_view(node)
    return count
