"""The two kinds of tensors that plans are tried on, and all that differs between them.

NumPy's arrays lie in host memory; bf16 is held there as its bits. Torch's tensors lie on a device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from fuseplan import arrays
from fuseplan.declarations import aligned
from fuseplan.dtypes import STORED
from fuseplan.reduction import NUMPY_JOINS
from fuseplan.scalar import NUMPY
from fuseplan.step import Step
from fuseplan.tensor import Dense, TensorSpec

Tensor = Any  # a NumPy array, or a torch.Tensor; torch is optional, and imported when first used
Tensors = Mapping[str, Tensor]
Shape = tuple[int, ...]


class Draws(NamedTuple):
    """Random values of a shape: `normal` has mean 0 and variance 1, `spread` goes from exp(-8) to exp(8)."""

    normal: Callable[[Shape], Tensor]
    spread: Callable[[Shape], Tensor]


class Host:
    """NumPy's arrays. Random values are drawn in float64 and rounded once."""

    meanings: Mapping[str, Callable[..., Any]] = NUMPY
    joins: Mapping[str, Callable[..., Any]] = NUMPY_JOINS
    broadcast = staticmethod(np.broadcast_to)

    def draws(self, seed: int | None) -> Draws:
        """Random values; without a seed, other values each time."""
        generator = np.random.default_rng(seed)
        return Draws(generator.standard_normal, lambda shape: np.exp(generator.uniform(-8, 8, shape)))

    def empty(self, spec: TensorSpec | Dense) -> Tensor:
        """A new tensor that lies as the spec says."""
        return arrays.empty(spec)

    def fill(self, tensor: Tensor, spec: TensorSpec | Dense, values: Any) -> Tensor:
        """The tensor, of that spec, with the values."""
        bits = tensor.view(np.uint16) if spec.dtype == "bf16" else tensor
        bits[...] = arrays.narrow(np.asarray(values, np.float64), spec.dtype)
        return tensor

    def rounded(self, values: Tensor, dtype: str, _: str) -> Tensor:
        """The values in a dtype."""
        return arrays.narrow(values, dtype)

    def exact(self, tensor: Tensor) -> Tensor:
        """The elements in float64."""
        array = np.asarray(tensor)
        plain = array.view(np.uint16) if array.dtype.name == "bfloat16" else array
        return arrays.widen(plain, "bf16" if plain.dtype == np.uint16 else "f64").astype(np.float64)

    def copy(self, tensor: Tensor) -> Tensor:
        """A copy that lies alike."""
        return tensor.copy()


class Device:
    """Torch's tensors on one device. Random values are drawn in float32."""

    def __init__(self, device: str) -> None:
        import torch

        same = ("add", "sub", "mul", "div", "neg", "abs", "maximum", "minimum", "pow", "exp", "expm1", "log",
                "log1p", "sqrt", "tanh", "erf", "where", "gt", "ge")  # fmt: skip
        self._torch, self._device = torch, device
        self.meanings: dict[str, Callable[..., Any]] = {name: getattr(torch, name) for name in same}
        self.meanings["const"] = lambda value: torch.tensor(value, dtype=torch.float64, device=device)
        self.broadcast = torch.broadcast_to
        self.joins: dict[str, Callable[..., Any]] = {
            "add": torch.sum,
            "maximum": torch.amax,
            "minimum": torch.amin,
        }

    def draws(self, seed: int | None) -> Draws:
        """Random values; without a seed, other values each time."""
        torch, device = self._torch, self._device
        generator = torch.Generator(device=device)
        generator.seed() if seed is None else generator.manual_seed(seed)

        def spread(shape: Shape) -> Tensor:
            return torch.empty(shape, device=device).uniform_(-8, 8, generator=generator).exp()

        return Draws(lambda shape: torch.randn(shape, generator=generator, device=device), spread)

    def empty(self, spec: TensorSpec | Dense) -> Tensor:
        """A new tensor that lies as the spec says."""
        flat = self._torch.empty(spec.span, dtype=torch_dtype(spec.dtype), device=self._device)
        return flat.as_strided(spec.shape, spec.element_strides)

    def fill(self, tensor: Tensor, _: TensorSpec | Dense, values: Any) -> Tensor:
        """The tensor with the values."""
        tensor[...] = values
        return tensor

    def rounded(self, values: Tensor, dtype: str, first: str) -> Tensor:
        """The values in a dtype, rounded to `first` before: a library that takes them in it gets the same."""
        return values.to(torch_dtype(first)).to(torch_dtype(dtype))

    def exact(self, tensor: Tensor) -> Tensor:
        """The elements in float64."""
        return tensor.double()

    def copy(self, tensor: Tensor) -> Tensor:
        """A copy that lies alike."""
        return tensor.clone()


Space = Host | Device
HOST = Host()


@cache
def space_on(device: str | None) -> Space:
    """The kind of tensors on a device, by torch's name for it; of NumPy's arrays for None."""
    return HOST if device is None else Device(device)


def space_of(tensor: Tensor) -> Space:
    """The kind that a tensor is of."""
    return space_on(str(tensor.device)) if arrays.is_torch(tensor) else HOST


def torch_dtype(name: str) -> Any:
    """torch's dtype of ours."""
    import torch

    return getattr(torch, next(theirs for theirs, ours in STORED.items() if ours == name))


def empty(spec: TensorSpec | Dense, device: Any = None, fill: float | None = None) -> Tensor:
    """A new tensor that lies as the spec says, each element `fill`: on torch's device, or a NumPy array."""
    space = space_on(None if device is None else str(device))
    made = space.empty(spec)
    return made if fill is None else space.fill(made, spec, fill)


def exact(tensor: Tensor) -> Tensor:
    """A tensor's elements in float64, of the kind that it is; bf16 in NumPy as uint16 or of ml_dtypes."""
    return space_of(tensor).exact(tensor)


def leaves_of(step: Step, x: Tensor, tensors: Tensors) -> dict[str, Tensor]:
    """The leaves of a step's formulas by key, float64, each to be broadcast over x."""
    space = space_of(x)
    leaves: dict[str, Tensor] = {"x": x}
    axes = {held.key: held.axes for held in step.operands}
    axes |= {each.key: each.axes for each in step.results if each.updated}
    for key in axes:
        value = space.exact(tensors[key])
        leaves[key] = value.reshape(aligned(value.shape, axes[key], x.ndim))
    leaves |= {key: tensors[key] for key in step.op.again.values()}
    const = space.meanings["const"]
    return leaves | {each.key: const(each.value) for each in step.parameters}
