"""Templates for GPUs that are as small as can be: what is around a template is tested with them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from fuseplan.backends.triton.template import GpuTemplate, weight_packing
from fuseplan.kernels.emit import Slot, Source, TensorMap
from fuseplan.kernels.kernel import Kernel, KernelOperand
from fuseplan.kernels.packing import Packing
from fuseplan.kernels.target import Target
from fuseplan.kernels.template import Traffic
from fuseplan.messages.reasons import Claim

HEAD = "import triton\nimport triton.language as tl\n\n\n@triton.jit\n"


@dataclass(frozen=True)
class Toy(GpuTemplate):
    """What the toys have in common: no limits, no cost."""

    body: str = ""

    @classmethod
    def limits(cls, kernel: Kernel, target: Target, accuracy: Any) -> Iterator[Claim]:
        return iter(())

    @classmethod
    def candidates(cls, kernel: Kernel, target: Target, accuracy: Any) -> Iterator[GpuTemplate]:
        yield cls()

    def traffic(self, kernel: Kernel, target: Target) -> Traffic:
        return Traffic(kernel.src.nbytes, kernel.dst.nbytes)

    def seconds(self, kernel: Kernel, target: Target) -> float:
        return 1e-6

    def error_bound(self, kernel: Kernel) -> float:
        return 1e-6

    def packing(self, kernel: Kernel, target: Target, operand: KernelOperand) -> Packing:
        if operand.role == "weight":
            return weight_packing(operand, (0, *range(2, len(operand.shape)), 1))
        return super().packing(kernel, target, operand)


@dataclass(frozen=True)
class ToyScale(Toy):
    """A formula of x and one channel operand `scale`, of an nc tensor, by pointers."""

    name: ClassVar[str] = "toy-scale"
    body: str = "x * scale"
    block: int = 64

    def emit(self, kernel: Kernel, target: Target) -> Source:
        channels, size = kernel.src.channels, kernel.src.size
        (operand,) = kernel.operands
        text = HEAD + (
            f"def toy(src, op_{operand.key}, dst):\n"
            f"    at = tl.program_id(0).to(tl.int64) * {self.block} + tl.arange(0, {self.block})\n"
            f"    inside = at < {size}\n"
            f"    x = tl.load(src + at, mask=inside, other=0.0).to(tl.float32)\n"
            f"    scale = tl.load(op_{operand.key} + at % {channels})\n"
            f"    tl.store(dst + at, ({self.body}).to(dst.dtype.element_ty), mask=inside)\n"
        )
        slots = (Slot("src"), Slot("operand", operand.key), Slot("dst"))
        return Source(text, "toy", slots, language="triton", grid=(-(-size // self.block), 1, 1))


@dataclass(frozen=True)
class ToyProduct(Toy):
    """A 1x1 convolution of an nhwc tensor as one product a program, through tensor maps."""

    name: ClassVar[str] = "toy-product"
    precision: str = "ieee"
    rows: int = 16
    columns: int = 32
    depth: int = 32

    def emit(self, kernel: Kernel, target: Target) -> Source:
        convolution = kernel.contraction
        m, n, k = convolution.rows, convolution.features, convolution.channels
        rows, columns, depth = self.rows, self.columns, self.depth
        text = HEAD + (
            "def toy(src, op_weight, dst):\n"
            f"    row = tl.program_id(0) * {rows}\n"
            f"    column = tl.program_id(1) * {columns}\n"
            f"    total = tl.zeros(({rows}, {columns}), tl.float32)\n"
            f"    for at in range(0, {k}, {depth}):\n"
            "        a = src.load([row, at])\n"
            "        b = op_weight.load([column, at])\n"
            f"        total = tl.dot(a, b.T, total, input_precision='{self.precision}')\n"
            "    dst.store([row, column], total.to(dst.dtype))\n"
        )

        def mapped(shape: tuple[int, int], box: tuple[int, int]) -> TensorMap:
            return TensorMap(kernel.src.dtype, shape, (shape[1], 1), box, (1, 1))

        slots = (
            Slot("src", map=mapped((m, k), (rows, depth))),
            Slot("operand", "weight", mapped((n, k), (columns, depth))),
            Slot("dst", map=mapped((m, n), (rows, columns))),
        )
        return Source(
            text, "toy", slots, language="triton", grid=(-(-m // rows), -(-n // columns), 1),
            options=(("num_warps", 4), ("num_stages", 2)),
        )  # fmt: skip


@dataclass(frozen=True)
class ToySteps(Toy):
    """Every second element of an nhwc tensor along h and w, by a map with steps."""

    name: ClassVar[str] = "toy-steps"

    def emit(self, kernel: Kernel, target: Target) -> Source:
        _, channels, height, width = kernel.src.shape
        steps = kernel.src.element_strides
        strides = (steps[0], steps[2], steps[3], steps[1])
        shape = (kernel.src.batch, height, width, channels)
        out = (kernel.dst.batch, *kernel.dst.spatial, channels)
        text = HEAD + (
            "def toy(src, dst):\n"
            "    image = tl.program_id(0)\n"
            "    x = src.load([image, 0, 0, 0])\n"
            "    dst.store([image, 0, 0, 0], x)\n"
        )
        box = (1, 4, 4, 16)
        dense = (out[1] * out[2] * out[3], out[2] * out[3], out[3], 1)
        slots = (
            Slot("src", map=TensorMap(kernel.src.dtype, shape, strides, box, (1, 2, 2, 1))),
            Slot("dst", map=TensorMap(kernel.dst.dtype, out, dense, box, (1, 1, 1, 1))),
        )
        return Source(text, "toy", slots, language="triton", grid=(kernel.src.batch, 1, 1))
