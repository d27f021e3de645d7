"""A product of matrices as the convolution loops see it: rows are the positions of one image."""

from __future__ import annotations

from dataclasses import replace

from fuseplan.backends.cpu.staging import LINE
from fuseplan.kernels.centre import Summary
from fuseplan.kernels.contraction import Contraction
from fuseplan.kernels.counted import Counted
from fuseplan.kernels.kernel import Kernel, KernelOperand
from fuseplan.language.layouts import dense
from fuseplan.language.tensor import TensorSpec


def as_rows(kernel: Kernel) -> Kernel:
    """The same kernel with two spatial axes, where src has none.

    n rows of c become one image of n positions, so that tiles lie over the rows whatever their strides.
    Where each row has a weight of its own, or a call says how many there are, they stay images, of one
    position. Storage is the same. Of a product whose rows have statistics, dst is the product's result.
    """
    kernel = _product_of(kernel) if isinstance(kernel.centre, Summary) else kernel
    conv = kernel.centre
    if not isinstance(conv, Contraction) or conv.kernel:
        return kernel
    rows = 1 if conv.weight_per_batch or kernel.open_axis is not None else conv.batch
    spatial, once = _lines(rows, dense=kernel.src.element_strides[1] == 1), (1, 1)
    product = replace(
        conv,
        batch=conv.batch // rows,
        src_spatial=spatial,
        dst_spatial=spatial,
        kernel=once,
        stride=once,
        dilation=once,
        padding=((0, 0), (0, 0)),
    )
    dst = _with_axes(kernel.dst, spatial)
    return replace(
        kernel,
        src=_with_axes(kernel.src, spatial),
        dst=dst,
        centre=product,
        operands=tuple(_in_lines(each, dst.shape) for each in kernel.operands),
        indices=tuple(_index_in_lines(each, spatial) for each in kernel.indices),
    )


def _product_of(kernel: Kernel) -> Kernel:
    """The product without its statistics: features are innermost in dst, which no memory holds."""
    conv = kernel.contraction
    shape, order = (conv.batch, conv.features, *conv.dst_spatial), (0, *range(2, kernel.src.rank), 1)
    dst = TensorSpec(shape, kernel.compute_dtype, strides=dense(shape, order))
    return replace(kernel, centre=conv, dst=dst, epilogue=())


def _lines(rows: int, *, dense: bool) -> tuple[int, int]:
    """Lines, and rows in each: as many as divide all rows, but whole squares where they lie side by side."""
    width = max(width for width in range(1, min(rows, LINE) + 1) if rows % width == 0)
    return (rows // width, width) if dense or width >= LINE // 4 else (1, rows)


def _with_axes(spec: TensorSpec, spatial: tuple[int, int]) -> TensorSpec:
    """(n, c) as (n / rows, c, lines, rows of a line)."""
    lines, width = spatial
    row, channel = spec.element_strides
    shape = (spec.batch // (lines * width), spec.channels, lines, width)
    return TensorSpec(shape, spec.dtype, strides=(row * lines * width, channel, row * width, row))


def _index_in_lines(index: Counted, spatial: tuple[int, int]) -> Counted:
    (lines, width), (row, channel) = spatial, index.steps
    return replace(index, steps=(row * lines * width, channel, row * width, row))


def _in_lines(operand: KernelOperand, shape: tuple[int, ...]) -> KernelOperand:
    """A row has three axes."""
    if not operand.is_scattered:
        return operand
    images, _, *lines = shape
    return replace(
        operand,
        shape=(images, *lines, *operand.shape[1:]),
        axes=(0, 2, 3, *operand.axes[1:]),
        blocks=operand.blocks and (1, 1, *operand.blocks),
    )
