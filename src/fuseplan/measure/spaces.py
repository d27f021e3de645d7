"""The two kinds of tensors that plans are tried on, and all that differs between them.

NumPy's arrays lie in host memory; bf16 and fp8 are held there as their bits. Torch's tensors lie on a device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from fuseplan.language.arithmetic import ARRAYS, Arithmetic
from fuseplan.language.dtypes import DTYPES, HELD, dtype_of, narrow, widen
from fuseplan.language.tensor import Dense, TensorSpec
from fuseplan.language.words import random, rows
from fuseplan.scalar import CASTS
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

    def arithmetic(self, _: Tensor) -> Arithmetic:
        """That of arrays."""
        return ARRAYS

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
        if dtype is not None and DTYPES[dtype].array == array.dtype:
            name = dtype
        bits = array.view(DTYPES[name].array) if name != "f64" else array
        return widen(bits, name).astype(np.float64)

    def copy(self, tensor: Tensor) -> Tensor:
        """A copy that lies alike."""
        return tensor.copy()


def _joined(join: Callable[..., Tensor], values: Tensor, axes: Shape | int, *, keepdims: bool) -> Tensor:
    """Terms joined over axes; of none, torch would take all."""
    return values if axes == () else join(values, axes, keepdims=keepdims)


class Device:
    """Torch's tensors on one device. Random values are drawn in float32."""

    def __init__(self, device: str) -> None:
        import torch

        same = ("add", "sub", "mul", "div", "neg", "abs", "maximum", "minimum", "pow", "exp", "expm1", "log",
                "log1p", "sqrt", "tanh", "erf", "round", "where", "gt", "ge")  # fmt: skip
        self._torch, self._device = torch, device
        table: dict[str, Callable[..., Any]] = {name: getattr(torch, name) for name in same}
        table["const"] = lambda value: torch.tensor(value, dtype=torch.float64, device=device)
        table |= {fn: partial(self._held, dtype) for fn, dtype in CASTS.items()}
        table |= rows(torch.Tensor.long, lambda x: self._held("i32", x).long())
        table |= {"bits": int, "number": torch.Tensor.double, "random": partial(random, table)}
        joins = {"add": torch.sum, "mul": self._product, "maximum": torch.amax, "minimum": torch.amin}
        self._table = table
        self._joins = {name: partial(_joined, join) for name, join in joins.items()}

    def arithmetic(self, like: Tensor) -> Arithmetic:
        """That of tensors, in the dtype of one of them."""
        return Arithmetic(
            "tensors",
            {**self._table, "const": like.new_tensor},
            self._joins,
            self._torch.broadcast_to,
            like.new_empty,
            wide=lambda tensor: tensor.to(like.dtype),
            whole=self._torch.Tensor.long,
            own=lambda tensor: tensor,
        )

    def _held(self, dtype: str, values: Tensor) -> Tensor:
        """Float64 numbers as elements of a dtype hold them; saturated where torch does not define them."""
        row = dtype_of(dtype)
        if dtype == "f8e4m3":
            values = values.clamp(-row.largest, row.largest)
        elif not row.is_float and dtype != "bool":
            values = values.nan_to_num(0.0).clamp(row.least, row.largest)
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


def arithmetic_of(tensor: Tensor) -> Arithmetic:
    """How tensors of its kind and dtype are computed with: of NumPy's, in float64."""
    return space_of(tensor).arithmetic(tensor)


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
    """The value of an element before a kernel writes it: NaN, or an integer at an end of the range."""
    row = dtype_of(dtype)
    return math.nan if row.is_float else row.least or row.largest


def exact(tensor: Tensor, dtype: str | None = None) -> Tensor:
    """A tensor's elements in float64, of the kind that it is.

    In NumPy bf16 and fp8 are of ml_dtypes or bits: uint16, and uint8 where the `dtype` is told.
    """
    return space_of(tensor).exact(tensor, dtype)
