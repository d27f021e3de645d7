"""The contraction of a kernel: a window that moves over src, and what is made of the elements under it."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, prod
from operator import floordiv

from fuseplan.language.reduction import JOINS


@dataclass(frozen=True)
class Pool:
    """What a contraction makes of the elements under its window in the place of a sum of products.

    Attributes:
        join: how two of them become one: a function of `JOINS`.
        counted: for a mean, along each axis: the first position of src whose taps count, and that behind the
            last; () for anything else.
    """

    join: str
    counted: tuple[tuple[int, int], ...] = ()

    @property
    def fill(self) -> float:
        """The value of padding."""
        return JOINS[self.join]


@dataclass(frozen=True)
class Contraction:
    """dst[n, f, o] = sum over c, k of src[n, c, o*stride + k*dilation - low] * weight[f, c, k].

    Sizes are elements; `padding` is one (low, high) pair a spatial axis. A matrix product is a convolution
    of one tap: `kernel` is 1 along each spatial axis of src, or () where src has none. The weight's axes are
    what the operator says; its `KernelOperand` has their order.

    Attributes:
        weight_per_batch: each image has a weight of its own: (batch, features, channels / groups, *kernel).
        precision: of the products: `full`, or `tf32`, which allows factors of f32 rounded to 10 bits.
        pool: no product and no weight: dst[n, c, o] is made of the elements under the window alone. Each
            channel is a group.
        written: the operator as the plan writes it, where it is no convolution: a gradient of a weight.
        factor: the dtype of the elements that the weight multiplies, where it is another integer.
        is_transposed: the other way round: an element of src times each tap is added where the window has it.
    """

    batch: int
    channels: int
    features: int
    groups: int
    src_spatial: tuple[int, ...]
    dst_spatial: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    weight_per_batch: bool = False
    precision: str = "full"
    pool: Pool | None = None
    written: str = ""
    is_transposed: bool = False
    factor: str = ""

    @property
    def fill(self) -> float:
        """The value of padding."""
        return self.pool.fill if self.pool else 0.0

    @property
    def channels_per_group(self) -> int:
        """Channels of src that one feature reads."""
        return self.channels // self.groups

    @property
    def features_per_group(self) -> int:
        """Features that read the same channels."""
        return self.features // self.groups

    @property
    def taps(self) -> int:
        """Positions of the kernel: 9 of a 3x3; those that meet in one output of a transposed convolution."""
        if not self.is_transposed:
            return prod(self.kernel)
        apart = map(floordiv, self.stride, map(gcd, self.stride, self.dilation))
        return prod(-(-taps // step) for taps, step in zip(self.kernel, apart, strict=True))

    @property
    def depth(self) -> int:
        """Products summed into one output element."""
        return self.taps * self.channels_per_group

    @property
    def rows(self) -> int:
        """Output positions over the batch."""
        return self.batch * prod(self.dst_spatial)

    @property
    def flops(self) -> int:
        """Two a product, padding counted as data."""
        if self.is_transposed:
            met = self.batch * prod(self.src_spatial) * prod(self.kernel)
            return 2 * met * self.features * self.channels_per_group
        return 2 * self.rows * self.features * self.depth

    @property
    def is_depthwise(self) -> bool:
        """Each feature reads one channel."""
        return self.groups == self.channels and (self.groups > 1 or self.pool is not None)

    @property
    def is_matrix_product(self) -> bool:
        """One tap, stride 1, no padding: rows of src times a matrix."""
        return (
            self.taps == 1
            and not self.is_transposed
            and self.src_spatial == self.dst_spatial
            and not any(map(any, self.padding))
        )

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """The weight in canonical order: batch if per batch, features, channels of a group, *kernel."""
        images = (self.batch,) if self.weight_per_batch else ()
        return (*images, self.features, self.channels_per_group, *self.kernel)

    @property
    def text(self) -> str:
        """All fields in one line; how the weight lies and the precision only where they are not as usual."""
        padding = ",".join(f"{low}:{high}" for low, high in self.padding)
        sizes = (("kernel", self.kernel), ("stride", self.stride), ("dilation", self.dilation))
        listed = "".join(f" {name}={'x'.join(map(str, value))}" for name, value in sizes)
        line = f"convolution {self.channels}->{self.features} groups={self.groups}"
        if self.kernel:
            line += f"{listed} padding={padding}"
        unusual = (
            ("weight_per_batch", self.weight_per_batch),
            (f"precision={self.precision}", self.precision != "full"),
            (str(self.pool), self.pool is not None),
            (f"of {self.written}", bool(self.written)),
            ("transposed", self.is_transposed),
            (f"multiplies {self.factor}", bool(self.factor)),
        )
        return " ".join([line, *(words for words, applies in unusual if applies)])
