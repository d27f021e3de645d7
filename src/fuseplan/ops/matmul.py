"""Products with a matrix: a convolution without taps, over the last axis."""

from __future__ import annotations

from collections.abc import Iterator

from fuseplan.language.declarations import Array, Shape, count, operand, word
from fuseplan.language.tensor import TensorSpec
from fuseplan.op import Given, Op, operator
from fuseplan.ops.conv import INTEGERS, PRECISIONS, check_precision, factor, summed


class Product(Op):
    """What products with a matrix share: the sum over src's last axis, and an output with `features` there.

    Attributes:
        transposed: the weight's last axis is the one that is summed over.
        batched: each element of src's first axis has a weight of its own.
    """

    kind = "contraction"
    reads = "rows"
    integers = INTEGERS
    features: int
    precision: str
    transposed: bool
    batched: bool

    def output(self, src: TensorSpec) -> TensorSpec:
        """The axes of src, the last one of `features` elements; of integers the sums are i32.

        Raises:
            PlanError: the precision is not for src's dtype.
        """
        check_precision(self.name, self.precision, src)
        shape = list(src.shape)
        shape[src.channel_axis] = self.features
        return summed(src.with_shape(shape))

    def depth(self, src: TensorSpec) -> int:
        """Products that are summed into one element."""
        return src.channels

    def meaning(self, given: Given) -> tuple[Array, dict[str, Array]]:
        weight, axis = given.operands["weight"], given.spec.channel_axis
        matrix, rows = weight if self.transposed else weight.swapaxes(-2, -1), given.src.swapaxes(axis, -1)
        images = rows.shape[0] if rows.ndim > 1 else 1  # one row is a tensor of one axis
        made = product(rows.reshape(images, -1, rows.shape[-1]).swapaxes(1, 2), matrix).swapaxes(1, 2)
        return made.reshape(*rows.shape[:-1], self.features).swapaxes(axis, -1), {}


def _weight(op: Matmul, src: TensorSpec) -> Shape:
    matrix = (op.features, src.channels) if op.transposed else (src.channels, op.features)
    return (src.batch, *matrix) if op.batched else matrix


@operator
class Matmul(Product):
    """dst[.., f] = sum over c of src[.., c] * weight[c, f]

    src: (.., c), any rank; dst: (.., features). weight: (c, features); `transposed`: (features, c);
    `batched`: one for each element of the first axis, (n, c, features) or (n, features, c). The sum is over
    the last axis, as in torch.matmul: PyTorch's batch of matrices [B, M, K] is f32[BxMxK]. Of integers
    of 8 and 16 bits, the weight is i8, and dst i32 and exact.

    `precision` is `full`, or `tf32`: then the factors of f32 may be rounded to 10 bits.
    """

    onnx = "MatMul"
    torch = "matmul"

    weight = operand(_weight, dtype=factor)
    features: int = count()
    transposed: bool = False
    batched: bool = False
    precision: str = word(PRECISIONS, default="full")

    @classmethod
    def samples(cls) -> Iterator[tuple[str, Op]]:
        yield "f32[7x5]", cls(9)
        yield "f32[3x5]", cls(4, transposed=True)
        yield "f32[2x7x5]", cls(3, batched=True)
        yield "f32[3x5x4, bcs of bsc]", cls(6, transposed=True, batched=True)
        yield "f32[2x3x7x5]", cls(11)
        yield "f32[1x3x2x5x3]", cls(2)


@operator
class Linear(Product):
    """dst[.., f] = sum over c of src[.., c] * weight[f, c]

    src: (.., c), any rank; dst: (.., features). weight: (features, c), as torch.nn.Linear stores it; `bias`
    after it adds that of torch.nn.Linear. Of integers of 8 and 16 bits, the weight is i8, and
    dst i32 and exact.

    `precision` is `full`, or `tf32`: then the factors of f32 may be rounded to 10 bits.
    """

    torch = "linear"
    transposed = True
    batched = False

    weight = operand(lambda op, src: (op.features, src.channels), dtype=factor)
    features: int = count()
    precision: str = word(PRECISIONS, default="full")

    @classmethod
    def samples(cls) -> Iterator[tuple[str, Op]]:
        yield "f32[7x5]", cls(9)
        yield "f32[2x7x5]", cls(3)
        yield "f32[2x3x7x5]", cls(11)
        yield "f32[1x3x2x5x3]", cls(2)


def product(src: Array, weight: Array) -> Array:
    """src (n, c, ..) times weight (features, c), or (n, features, c), in float64."""
    made: Array = weight @ src.reshape(*src.shape[:2], -1)
    return made.reshape(src.shape[0], weight.shape[-2], *src.shape[2:])
