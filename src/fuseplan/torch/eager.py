"""Both ways to compute a site of a graph of torch's: torch's own operators, and the plan's operator."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.fx.node import map_aggregate

from fuseplan.graph.cut import Site
from fuseplan.graph.trial import launch
from fuseplan.graph.write import aligned, names_in
from fuseplan.language.declarations import Operand, Result
from fuseplan.torch import sites as calls
from fuseplan.torch.operator import launched
from fuseplan.torch.reader import ReadGraph
from fuseplan.torch.texts import given_of, operators_text


class Eager:
    """Torch's operators, as the graph has them; `fuseplan.graph.trial.Framework` tells the methods.

    Attributes:
        name: torch and its version.

    Args:
        module: the graph.
        read: what was read of it.
        device: of its tensors.
        inputs: the graph's, of an example call; none where there is no example.
        is_called: a CPU's plans are called as in a step of training, which takes the host 10 us, not 1.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        read: ReadGraph,
        device: torch.device,
        inputs: Sequence[Any] = (),
        is_called: bool = False,
    ) -> None:
        self._is_called = is_called and device.type == "cpu"
        self.name = f"torch {torch.__version__}{' beside calls' if self._is_called else ''}"
        self._module, self._read, self._device, self._inputs = module, read, device, inputs

    def example(self, names: Collection[str]) -> Mapping[str, Any]:
        """The values of these names as torch's operators make them of the example's inputs."""
        if not self._inputs:
            return {}
        kept = _Kept(self._module, {self._read.makers[name]: name for name in names})
        with torch.no_grad():
            kept.run(*self._inputs)
        return kept.values

    def own(self, site: Site, values: Mapping[str, Any]) -> Callable[[], Any]:
        """A call of the operators between the site's values, on tensors that lie as torch has them there.

        Raises:
            LookupError: they read another value.
        """
        graph, places = self._between(site, values.keys())
        given = [self._as(values[name], node.meta["val"]) for node, name in places.items()]
        run = self.ready(fx.GraphModule(self._module, graph), given)

        def call() -> Any:
            with torch.no_grad():
                return run(*given)

        return call

    def exact(self, site: Site, values: Mapping[str, Any]) -> list[torch.Tensor]:
        """The results of the operators between the site's values, in float64.

        Raises:
            LookupError: they read another value.
        """
        graph, places = self._between(site, values.keys())
        for node in graph.nodes:
            node.args, node.kwargs = map_aggregate((node.args, node.kwargs), _widened)
        run = fx.GraphModule(self._module, graph)
        given = [self._as(values[name], node.meta["val"]) for node, name in places.items()]
        with torch.no_grad():
            made: list[torch.Tensor] = run(
                *(each.double() if each.is_floating_point() else each for each in given)
            )
        return [each.double() for each in made]

    def ready(self, module: fx.GraphModule, given: Sequence[torch.Tensor]) -> Callable[..., Any]:
        """The operators of a site, to be called on tensors like these."""
        made: Callable[..., Any] = module.forward
        return made

    def fused(self, site: Site, values: Mapping[str, Any]) -> Callable[[], Any]:
        """A call of the plan on tensors that lie as it has them; on a CPU as models launch it."""
        if self._device.type == "cpu" and site.plan.src.is_dense and not self._is_called:
            return launch(site, values)
        text, read = operators_text(site.plan, (), site.joins, site.records.accuracy), site.beside
        names = read.names if read else (site.src,)
        tensors = [self._tensor(values[name], site.plan.src.dtype) for name in names]
        src = torch.cat(tensors, read.axis) if read else tensors[0]
        given = [each for key in given_of(site.plan) for each in self._operand(site, key, values)]
        run = calls.Site() if self._is_called else launched

        def call() -> Any:
            with torch.no_grad():
                return run(text, src, given)[0]

        return call

    def _between(self, site: Site, names: Any) -> tuple[fx.Graph, dict[fx.Node, str]]:
        """The nodes from the values of these names to the site's results, and those that give the values."""
        known, heads = self._read.values, [self._read.makers[name] for name in site.results]
        needed, places, ahead = set[fx.Node](), dict[fx.Node, str](), [*heads]
        while ahead:
            node = ahead.pop()
            if known.get(node) in names:
                places[node] = known[node]
            elif node.op != "call_function":
                raise LookupError(f"{node.name} is read besides")
            elif node not in needed:
                needed.add(node)
                ahead += node.all_input_nodes
        made: fx.Graph = fx.Graph()
        copies = {node: made.placeholder(node.name) for node in places}
        for node in self._module.graph.nodes:
            if node in needed:
                copies[node] = made.node_copy(node, copies.__getitem__)
        made.output([copies[head] for head in heads])
        return made, places

    def _operand(
        self, site: Site, operand: Operand | Result, values: Mapping[str, Any]
    ) -> Iterator[torch.Tensor]:
        value = site.operands[operand.key]
        for name in names_in(value):
            tensor = self._tensor(values[name], self._read.graph.types[name].dtype)
            yield tensor.reshape(operand.shape) if isinstance(value, str) else tensor
        if not names_in(value):
            yield self._tensor(aligned(value), None)

    def _tensor(self, value: Any, dtype: str | None) -> torch.Tensor:
        """A tensor of NumPy's or torch's as torch's on the device; the bits of bf16 as what they are."""
        if not isinstance(value, torch.Tensor):
            # Once a package registers NumPy's bfloat16 arrays have it, which torch does not take.
            value = torch.from_numpy(value.view(np.int16) if value.dtype.name == "bfloat16" else value)
        made: torch.Tensor = value
        return (made.view(torch.bfloat16) if dtype == "bf16" and made.dtype != torch.bfloat16 else made).to(
            self._device
        )

    def _as(self, value: Any, like: torch.Tensor) -> torch.Tensor:
        """The elements, as torch has them in the model; where it repeats one, those given, in order."""
        shape, steps = tuple(like.shape), like.stride()
        if not all(step or extent == 1 for step, extent in zip(steps, shape, strict=True)):
            steps = torch.empty(shape, device="meta").stride()
        made = torch.empty_strided(shape, steps, dtype=like.dtype, device=self._device)
        word = str(like.dtype).removeprefix("torch.")
        return made.copy_(self._tensor(value, "bf16" if word == "bfloat16" else None).reshape(like.shape))


class _Kept(fx.Interpreter):  # type: ignore[misc]
    """Runs a graph, and keeps the values of some of its nodes.

    Attributes:
        values: by the names that the values are to have; of a CPU as NumPy's arrays.
    """

    def __init__(self, module: fx.GraphModule, names: Mapping[fx.Node, str]) -> None:
        super().__init__(module)
        self._names = names
        self.values: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        made = super().run_node(n)
        if n in self._names:
            self.values[self._names[n]] = made if made.is_cuda else _array(made)
        return made


def _widened(value: Any) -> Any:
    """An argument of an operator; the dtype of floats is float64."""
    return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value


def _array(tensor: torch.Tensor) -> Any:
    """The elements in NumPy; those of bf16 as their bits."""
    plain = tensor.detach().resolve_neg()
    return plain.view(torch.int16).numpy().view(np.uint16) if plain.dtype == torch.bfloat16 else plain.numpy()
