"""Runs a kernel record on the words of its arguments, by NumPy in float64."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fuseplan.kernels.centre import Reduction, Summary, Unary
from fuseplan.kernels.contracted import KernelTensor
from fuseplan.kernels.contraction import Contraction
from fuseplan.kernels.emit import Source
from fuseplan.kernels.kernel import Kernel, KernelOperand, Output, Stage
from fuseplan.kernels.lookup import Lookup
from fuseplan.language.arithmetic import ARRAYS
from fuseplan.language.attend import Attend, AttendGradient
from fuseplan.language.declarations import lined_up
from fuseplan.language.dtypes import narrow
from fuseplan.language.layouts import dense
from fuseplan.language.reduction import INDEX, indices, reduce
from fuseplan.language.tensor import TensorSpec
from fuseplan.ops.conv import correlation, spread
from fuseplan.ops.matmul import product
from fuseplan.ops.pool import pool
from fuseplan.ops.windows import Window
from fuseplan.scalar import NUMPY, fold
from fuseplan.tensors.arrays import Buffer

Array = NDArray[np.float64]


class Interpreter:
    """A kernel as a callable on the words of its arguments."""

    def __init__(self, kernel: Kernel, source: Source) -> None:
        self.kernel, self.slots = kernel, source.slots

    def at(self, source: Source, extent: int) -> Interpreter:
        """The interpreter of the kernel on that extent of its open axes."""
        return Interpreter(self.kernel.with_extent(extent), source)

    def __call__(self, words: Iterable[int]) -> None:
        """Reads the tensors, computes, writes dst; each element is rounded once."""
        kernel = self.kernel
        places = {str(slot): int(word) for slot, word in zip(self.slots, words, strict=True)}
        leaves: dict[str, Any] = dict(self._parameters(places))
        for operand in (each for each in kernel.operands if each.role != "table"):
            leaves[operand.key] = self._operand(operand, places[f"operand:{operand.key}"])
        for index in kernel.indices:
            shape = (kernel.src if index.role == "prologue" else kernel.dst).shape
            leaves[index.key] = indices(shape, index.steps)
        src = self._rows(kernel.lookup, places) if kernel.lookup else _read(kernel.src, places["src"])
        x = self._applied(kernel.prologue, src, leaves, places, kernel.src)
        match kernel.centre:
            case Contraction():
                x = _contracted(kernel, x, leaves)
            case Attend() | AttendGradient() as attention:
                x = self._attend(attention, x, leaves)
            case Unary() as unary:
                x = unary.op.along(x, unary.op.axis, ARRAYS)
            case Reduction() as reduction:
                leaves |= _reduced(reduction, x, leaves)
            case Summary(_, reduction):
                made = _contracted(kernel, x, leaves)
                made = self._applied(kernel.between, made, leaves, places, KernelTensor(made.shape))
                leaves |= _reduced(reduction, made, leaves)
        for result in (*kernel.results, *kernel.sums):
            self._write(result, places[f"result:{result.key}"], {**leaves, "x": x})
        if kernel.between and not isinstance(kernel.centre, Summary):
            x = self._applied(kernel.between, x, leaves, places, TensorSpec(x.shape))
        in_parts = any(stage.reads_parts for stage in kernel.epilogue)
        spec = KernelTensor(x.shape) if in_parts else kernel.dst
        x = self._applied(kernel.epilogue, x, leaves, places, spec)
        _buffer(_written(kernel), places["dst"]).numpy()[...] = narrow(x, kernel.dst.dtype)

    def _rows(self, lookup: Lookup, places: Mapping[str, int]) -> Array:
        """src, the rows of a table; NaN where it has none."""
        src = self.kernel.src
        at, inside = np.divmod(indices(src.shape, src.element_strides).astype(np.int64), lookup.pitch)
        listed = TensorSpec((src.span // lookup.pitch + 1,), lookup.indices)
        numbers = _buffer(listed, places["src"]).numpy()[at]
        row = np.where(numbers < 0, numbers + lookup.rows * lookup.from_end, numbers)
        is_row = (row >= 0) & (row < lookup.rows)
        table = _read(TensorSpec((lookup.rows, lookup.features), src.dtype), places[f"operand:{lookup.key}"])
        return np.where(is_row, table[np.where(is_row, row, 0), inside], np.nan)

    def _attend(self, attention: Attend | AttendGradient, x: Array, leaves: dict[str, Any]) -> Array:
        """The centre's result with the axes of src; the one besides it becomes a leaf."""
        given = {each.role: leaves[each.key] for each in self.kernel.operands if each.strides}
        given["query"] = x.transpose(0, 2, 3, 1)  # b, h, s, d
        with np.errstate(all="ignore"):
            dst, beside = attention.evaluate(given)
        leaves |= {each.key: beside for each in self.kernel.results}
        return np.asarray(dst).transpose(0, 3, 1, 2)

    def _applied(
        self,
        stages: Sequence[Stage],
        x: Array,
        leaves: dict[str, Any],
        places: Mapping[str, int],
        spec: TensorSpec,
    ) -> Array:
        """Stages on `spec`, one after another; values with names are written, and are leaves from then on."""
        for stage in stages:
            if stage.reads_parts:
                x = self._of_parts(stage, x, leaves)
                spec = self.kernel.dst if x.shape == self.kernel.dst.shape else KernelTensor(x.shape)
            else:
                x = apply(stage, x, leaves, spec.shape)
            if stage.saves:
                leaves[stage.saves] = x
                lying = _lying(spec, self.kernel.saved[stage.step])
                _buffer(lying, places[f"result:{stage.saves}"]).numpy()[...] = narrow(x, lying.dtype)
        return x

    def _of_parts(self, stage: Stage, x: Array, leaves: Mapping[str, Any]) -> Array:
        """What a stage makes of parts of an axis."""
        split = self.kernel.parts
        assert split is not None  # by the stage
        made = np.empty((*x.shape[: split.axis], split.extent * split.makes, *x.shape[split.axis + 1 :]))
        with np.errstate(all="ignore"):
            return np.asarray(split.fill(made, stage.expressions, {**leaves, "x": x}, NUMPY))

    def _parameters(self, places: Mapping[str, int]) -> Mapping[str, np.float64]:
        names = self.kernel.parameters
        kind = ctypes.c_double if self.kernel.compute_dtype == "f64" else ctypes.c_float
        values = (kind * len(names)).from_address(places["parameters"])
        return {name: np.float64(value) for name, value in zip(names, values, strict=True)}

    def _operand(self, operand: KernelOperand, address: int) -> Array:
        """Elements lie as the caller has them, everything else as `pack` left it."""
        if operand.strides and not operand.packed:
            lying = KernelTensor(operand.shape, operand.dtype, strides=operand.strides)
            return self._spread(_read(lying, address), operand)
        if not operand.packed:
            return _read(_lying(self.kernel.shape_of(operand), operand), address)
        steps = dense(operand.shape, range(len(operand.shape)))
        packed = Buffer(address, operand.shape, self.kernel.compute_dtype, steps, True, None).numpy()
        return self._spread(packed.astype(np.float64), operand)

    def _spread(self, values: Array, of: KernelOperand) -> Array:
        """An array with as many axes as src; a weight and what is beside src as they are."""
        if of.role not in ("prologue", "between", "epilogue"):
            return values
        inner = of.shape[len(of.shape) - len(of.axes) + 1 :]  # the extents in front of them are one axis
        ordered = values.reshape(-1, *inner).transpose(np.argsort(of.axes or (0,)))
        shape = self.kernel.shape_of(of).shape
        return np.asarray(lined_up(ordered, shape, sorted(of.axes), max(of.blocks, default=1)))

    def _write(self, result: Output, address: int, leaves: Mapping[str, Any]) -> None:
        """A result from the statistics and, where it is updated, its old value."""
        steps = result.strides or dense(result.shape, range(len(result.shape)))
        lying = Buffer(address, result.shape, result.dtype, steps, False, None).numpy()
        shape = self.kernel.src.shape
        old = {result.key: lined_up(lying.astype(np.float64), shape, result.axes)} if result.updated else {}
        with np.errstate(all="ignore"):
            made = fold(result.expression, {**leaves, **old}, NUMPY)
        if result.over:
            made = np.broadcast_to(made, shape).sum(result.over)
        lying[...] = narrow(made, result.dtype).reshape(result.shape)


def _contracted(kernel: Kernel, x: Array, leaves: Mapping[str, Any]) -> Array:
    """The contraction's result."""
    made = kernel.contraction
    if made.pool:
        return pooled(made, x)
    return convolve(made, x, kernel.canonical_weight(leaves[kernel.weight.key]))


def _reduced(reduction: Reduction, x: Array, leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of the statistics by name, and the index that they read."""
    made: dict[str, Any] = {INDEX: indices(x.shape, reduction.index)} if reduction.index else {}
    listed = [(each, reduction.over) for each in reduction.statistics]
    listed += [(each, reduction.inner_over) for each in reduction.inner]
    for each, over in listed:
        with np.errstate(all="ignore"):
            made |= reduce(each, {**leaves, **made, "x": x}, x.shape, over)
    return made


def apply(stage: Stage, x: Array, leaves: Mapping[str, Any], shape: Sequence[int]) -> Array:
    """An elementwise stage; the result has the shape."""
    with np.errstate(all="ignore"):  # infinities and NaN are results like any other
        return np.broadcast_to(fold(stage.expression, {**leaves, "x": x}, NUMPY), shape)


def convolve(convolution: Contraction, x: Array, weight: Array) -> Array:
    """The operators' own reference; `weight` is in canonical order."""
    with np.errstate(all="ignore"):  # infinities and NaN are results like any other
        if convolution.is_matrix_product and convolution.groups == 1:
            return product(x, weight.reshape(-1, convolution.features, convolution.channels))
        if convolution.is_transposed:
            grouped = weight.reshape(convolution.groups, -1, *weight.shape[1:])
            return np.asarray(spread(x, grouped, _window(convolution), np.zeros))
        return correlation(x, weight, _window(convolution), convolution.groups)


def pooled(convolution: Contraction, x: Array) -> Array:
    """The operators' own reference."""
    assert convolution.pool is not None  # by the caller
    with np.errstate(all="ignore"):
        return pool(x, _window(convolution), convolution.pool.join, convolution.pool.counted)


def _window(of: Contraction) -> Window:
    return Window(of.kernel, of.stride, of.dilation, of.padding, of.dst_spatial)


def _lying(spec: TensorSpec, of: KernelOperand | Output) -> TensorSpec:
    """A tensor per element of an operator that is given `spec`: it lies as the operator's output."""
    lies = spec.with_shape(spec.shape) if spec.layout is None else spec
    return KernelTensor(spec.shape, of.dtype, strides=of.strides or lies.element_strides)


def _written(kernel: Kernel) -> TensorSpec:
    """dst with the strides of the tensor whose range it is."""
    if not kernel.whole:
        return kernel.dst
    shape = (kernel.dst.batch, kernel.whole, *kernel.dst.spatial)
    strides = kernel.dst.with_shape(shape).element_strides
    return TensorSpec(kernel.dst.shape, kernel.dst.dtype, strides=strides)


def _buffer(spec: TensorSpec, address: int) -> Buffer:
    return Buffer(address, spec.shape, spec.dtype, spec.element_strides, False, None)


def _read(spec: TensorSpec, address: int) -> Array:
    return _buffer(spec, address).widened().astype(np.float64)
