"""The two kinds of tensors that plans are tried on, and all that differs between them.

NumPy's arrays lie in host memory; bf16 and fp8 are held there as their bits. Torch's tensors lie on a device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from fuseplan.language.declarations import lined_up
from fuseplan.language.dtypes import DTYPES, HELD, STORED, dtype_of, narrow, widen
from fuseplan.language.reduction import NUMPY_JOINS
from fuseplan.language.tensor import Dense, TensorSpec
from fuseplan.language.words import random, rows
from fuseplan.plans.step import Step
from fuseplan.scalar import CASTS, NUMPY
from fuseplan.tensors import arrays

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
        bits = tensor.view(dtype_of(spec.dtype).array)
        bits[...] = narrow(np.asarray(values, np.float64), spec.dtype)
        return tensor

    def rounded(self, values: Tensor, dtype: str, _: str) -> Tensor:
        """The values in a dtype."""
        return narrow(values, dtype)

    def exact(self, tensor: Tensor, dtype: str | None = None) -> Tensor:
        """The elements in float64; of bits that may be of several dtypes, `dtype` says of which."""
        array = np.asarray(tensor)
        name = HELD.get(array.dtype.name, "f64")
        if dtype is not None and array.dtype.name not in STORED and DTYPES[dtype].array == array.dtype:
            name = dtype
        bits = array.view(DTYPES[name].array) if name != "f64" else array
        return widen(bits, name).astype(np.float64)

    def copy(self, tensor: Tensor) -> Tensor:
        """A copy that lies alike."""
        return tensor.copy()


class Device:
    """Torch's tensors on one device. Random values are drawn in float32."""

    def __init__(self, device: str) -> None:
        import torch

        same = ("add", "sub", "mul", "div", "neg", "abs", "maximum", "minimum", "pow", "exp", "expm1", "log",
                "log1p", "sqrt", "tanh", "erf", "round", "where", "gt", "ge")  # fmt: skip
        self._torch, self._device = torch, device
        self.meanings: dict[str, Callable[..., Any]] = {name: getattr(torch, name) for name in same}
        self.meanings["const"] = lambda value: torch.tensor(value, dtype=torch.float64, device=device)
        self.meanings |= {fn: partial(self._held, dtype) for fn, dtype in CASTS.items()}
        self.meanings |= rows(torch.Tensor.long, lambda x: self._held("i32", x).long())
        self.meanings |= {
            "bits": int,
            "number": torch.Tensor.double,
            "random": partial(random, self.meanings),
        }
        self.broadcast = torch.broadcast_to
        self.joins: dict[str, Callable[..., Any]] = {
            "add": torch.sum,
            "mul": self._product,
            "maximum": torch.amax,
            "minimum": torch.amin,
        }

    def _held(self, dtype: str, values: Tensor) -> Tensor:
        """Float64 numbers as elements of a dtype hold them; saturated where torch does not define them."""
        row = dtype_of(dtype)
        if not row.is_float and dtype != "bool":
            values = values.nan_to_num(0.0).clamp(-row.largest - 1, row.largest)
        return values.to(torch_dtype(dtype)).double()

    def _product(self, values: Tensor, axes: Shape, *, keepdims: bool) -> Tensor:
        """The product over axes, which stay; torch takes one at a time."""
        assert keepdims
        for axis in axes:
            values = self._torch.prod(values, axis, keepdim=True)
        return values

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

    def exact(self, tensor: Tensor, _: str | None = None) -> Tensor:
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

    return getattr(torch, dtype_of(name).package)


def empty(spec: TensorSpec | Dense, device: Any = None, fill: float | None = None) -> Tensor:
    """A new tensor that lies as the spec says, each element `fill`: on torch's device, or a NumPy array."""
    space = space_on(None if device is None else str(device))
    made = space.empty(spec)
    return made if fill is None else space.fill(made, spec, fill)


def unwritten(dtype: str) -> float:
    """What an element holds before a kernel writes it: NaN, or the least integer where there is none."""
    row = dtype_of(dtype)
    return math.nan if row.is_float else -row.largest - 1


def exact(tensor: Tensor, dtype: str | None = None) -> Tensor:
    """A tensor's elements in float64, of the kind that it is.

    In NumPy bf16 and fp8 are of ml_dtypes or bits: uint16, and uint8 of the `dtype`, f8e4m3 unless told.
    """
    return space_of(tensor).exact(tensor, dtype)


def leaves_of(
    step: Step, x: Tensor, tensors: Tensors, values: Mapping[str, float] | None = None, dtype: Any = None
) -> dict[str, Tensor]:
    """The leaves of a step's formulas by key, each to be broadcast over x.

    Args:
        step: the operator at its place.
        x: its src.
        tensors: operands, earlier values and old values of updated results, by key.
        values: parameters by key, in the place of the plan's own.
        dtype: torch's, of the leaves; float64 unless told.
    """
    space = space_of(x)
    leaves: dict[str, Tensor] = {"x": x}
    found = {held.key: (held.axes, held.block) for held in step.operands}
    found |= {each.key: (each.axes, 1) for each in step.results if each.updated}
    for key, (axes, block) in found.items():
        value = space.exact(tensors[key]) if dtype is None else tensors[key].to(dtype)
        leaves[key] = lined_up(value, x.shape, axes, block)
    leaves |= {key: tensors[key] for key in step.op.again.values()}
    const, given = space.meanings["const"] if dtype is None else x.new_tensor, values or {}
    return leaves | {each.key: const(given.get(each.key, each.value)) for each in step.parameters}
