"""What a kernel template declares; selection, explanation and documentation read this one declaration."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from decimal import ROUND_CEILING, Context
from typing import TYPE_CHECKING, Any, ClassVar

from fuseplan.kernels.centre import Summary, Unary
from fuseplan.kernels.contraction import Contraction
from fuseplan.kernels.emit import Source
from fuseplan.kernels.kernel import Kernel, KernelOperand, Stage
from fuseplan.kernels.target import Target
from fuseplan.language.dtypes import dtype_of
from fuseplan.language.indices import EXACT_IN_F32
from fuseplan.messages.reasons import Claim, Reason, claim
from fuseplan.ops.scan import UnaryOp
from fuseplan.scalar import leaves_of

if TYPE_CHECKING:
    from fuseplan.kernels.packing import Packing

Accuracy = str | float  # "default", "strict", or the largest `error_bound` allowed

_TWO_DIGITS_UP = Context(prec=2, rounding=ROUND_CEILING)


@dataclass(frozen=True)
class Traffic:
    """Bytes a kernel moves through memory: read and written, and workspace (written and read again)."""

    read: int
    written: int
    workspace: int = 0

    @property
    def total(self) -> int:
        """All bytes moved."""
        return self.read + self.written + 2 * self.workspace


def moved_once(kernel: Kernel, workspace: int = 0) -> Traffic:
    """src, operands and outputs once each; `workspace` bytes written and read again."""
    written = kernel.written_bytes
    return Traffic(kernel.minimum_bytes - written, written, workspace)


def accuracy_claim(bound: float, accuracy: Accuracy) -> Claim:
    """A template's error bound against the one the caller set, where it is a number."""
    allowed = float("inf") if isinstance(accuracy, str) else accuracy
    # Rounded up: what the message says would do has to.
    got = float(_TWO_DIGITS_UP.create_decimal_from_float(bound))
    return claim(bound <= allowed, Reason.ACCURACY, got=f"{got:.1e}", want=f"at most {allowed:g}")


def unit_roundoff(kernel: Kernel) -> float:
    """Half the distance from 1 to the next number of the compute type."""
    return 2.0**-53 if kernel.compute_dtype == "f64" else 2.0**-24


def summation_bound(kernel: Kernel) -> float:
    """The error bound of a sum of products, in any order: one rounding a product, depth * u.

    Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 3.1. A mean is a sum over a count,
    two roundings more; a maximum is exact.
    """
    conv = kernel.contraction
    roundings = conv.depth if conv.pool is None else (conv.depth + 2) * bool(conv.pool.counted)
    return roundings * unit_roundoff(kernel)


def sum_claim(kernel: Kernel) -> Claim:
    """Sums of integers are exact in the compute dtype."""
    is_exact = kernel.compute_dtype == "f64" or kernel.largest_sum <= EXACT_IN_F32
    got = f"sums of integers up to {kernel.largest_sum:.1e}"
    return claim(is_exact, Reason.ACCURACY, got=got, want="up to 2^24", operator=kernel.centre_step)


def pointwise_claims(kernel: Kernel) -> Iterator[Claim]:
    """The kernel has no centre, and tensors that elementwise stages can read where they lie."""
    yield claim(kernel.centre is None, Reason.CENTRE_IN_POINTWISE, operator=kernel.centre_step)
    yield from layout_claims(kernel)


def contraction_claims(kernel: Kernel, *, pools: bool = False, transposes: bool = False) -> Iterator[Claim]:
    """The kernel has a contraction whose result is written: products with a weight, or `pools`.

    `transposes`: the template computes transposed convolutions with a stride.
    """
    yield claim(isinstance(kernel.centre, Contraction | Summary), Reason.NO_CONTRACTION)
    summed = kernel.epilogue[:1] if isinstance(kernel.centre, Summary) else ()
    yield none_claim(summed, Reason.CONTRACTION_AND_NORMALIZATION)
    is_taken = pools or kernel.contraction.pool is None
    got = None if is_taken else kernel.contraction.text
    yield claim(is_taken, Reason.POOL, got=got, operator=kernel.centre_step)
    is_taken = transposes or not kernel.contraction.is_transposed
    got = None if is_taken else kernel.contraction.text
    yield claim(is_taken, Reason.TRANSPOSED, got=got, operator=kernel.centre_step)


def summary_claims(kernel: Kernel) -> Iterator[Claim]:
    """The kernel has statistics of a matrix product's rows, without operands as large as the result."""
    yield claim(isinstance(kernel.centre, Summary), Reason.NO_SUMMARY)
    conv, step = kernel.contraction, kernel.centre_step
    is_product = conv.pool is None and conv.is_matrix_product and conv.groups == 1
    is_product = is_product and not conv.weight_per_batch
    yield claim(is_product, Reason.SUMMED_PRODUCT, got=None if is_product else conv.text, operator=step)
    yield from layout_claims(kernel)
    large = _large_between(kernel)
    met = (each for each in kernel.between if large & leaves_of(each.expression))
    yield none_claim(met, Reason.OPERANDS_BETWEEN)
    yield block_claim(kernel)


def _large_between(kernel: Kernel) -> set[str]:
    """Operands between that are neither per channel nor shared: those of a vector's elements are neither."""
    return {op.key for op in kernel.operands if op.role == "between" and op.axes and not op.is_channel}


def _parts_claims(kernel: Kernel, *, gated: bool) -> Iterator[Claim]:
    """Parts behind a contraction are gate and value of ungrouped features, in a template that takes these."""
    split, conv = kernel.parts, kernel.contraction
    is_gate = gated and split is not None and (split.axis, split.reads, split.makes) == (1, 2, 1)
    is_gate = is_gate and conv.groups == 1 and not conv.weight_per_batch
    yield none_claim(kernel.epilogue[: bool(split and not is_gate)], Reason.PARTS_OF_FEATURES)
    large = _large_between(kernel)
    met = (each for each in kernel.between if each.saves or large & leaves_of(each.expression))
    yield none_claim(met, Reason.OPERANDS_BETWEEN)


def layout_claims(kernel: Kernel, *, gated: bool = False) -> Iterator[Claim]:
    """Nothing in front of a contraction is saved; operands there that lie as src does need a dense src.

    So it is in front of parts. `gated`: the template computes gated products behind a contraction.
    """
    if isinstance(kernel.centre, Contraction):
        yield from _parts_claims(kernel, gated=gated)
    yield none_claim((stage for stage in kernel.prologue if stage.saves), Reason.SAVED_PROLOGUE)
    early_operands = (each for each in kernel.operands if each.role == "prologue")
    inner = {each.key for each in early_operands if each.is_inside or not each.packed}
    readers = (stage.step for stage in kernel.prologue if inner & leaves_of(stage.expression))
    yield claim(
        not inner or kernel.src.layout is not None,
        Reason.STRIDED_PROLOGUE,
        got=str(kernel.src),
        operator=next(readers, None),
    )


def none_claim(stages: Iterable[Stage], reason: Reason) -> Claim:
    """There are no such stages; the first is to blame."""
    first = next(iter(stages), None)
    at, text = (None, None) if first is None else (first.step, first.op_text)
    return claim(first is None, reason, got=text, operator=at)


def unary_claims(kernel: Kernel, kind: type[UnaryOp]) -> Iterator[Claim]:
    """The centre is that operator; nothing in front of it is saved, and no operand has blocks."""
    centre = kernel.centre
    yield claim(isinstance(centre, Unary) and isinstance(centre.op, kind), kind.missing)
    yield none_claim((stage for stage in kernel.prologue if stage.saves), Reason.SAVED_PROLOGUE)
    yield block_claim(kernel)


def block_claim(kernel: Kernel) -> Claim:
    """No operand has one element for a block of neighbours."""
    keys = {each.key for each in kernel.operands if each.is_scattered}
    stages = (*kernel.prologue, *kernel.epilogue)
    readers = (stage.step for stage in stages if keys & leaves_of(stage.expression))
    return claim(not keys, Reason.BLOCKS, got=", ".join(sorted(keys)) or None, operator=next(readers, None))


def dst_claim(kernel: Kernel) -> Claim:
    """The output's axes lie as a layout of n, c and spatial axes has them: rows of a product may not."""
    return claim(
        kernel.dst.layout is not None, Reason.UNNAMED_DST, got=str(kernel.dst), operator=kernel.centre_step
    )


def result_claim(kernel: Kernel) -> Claim:
    """Results besides the output have the compute dtype, whichever dtypes an operator casts to."""
    others = [each for each in kernel.results if each.dtype != kernel.compute_dtype]
    got = f"{others[0].dtype}, computed in {kernel.compute_dtype}" if others else None
    behind = (kernel.centre_step or 0) + (kernel.src.dtype != "f64")  # the first operator not to be with it
    return claim(not others, Reason.RESULT_DTYPE, got=got, operator=behind)


@dataclass(frozen=True)
class Template(ABC):
    """A way to run a kernel. A class is a search space; an instance is a choice, and its fields are knobs.

    `limits` may be called with any kernel; every other method only with a kernel that `limits` lets pass.
    `error_scale` says in words what the error bound is a share of. With `opens`, a kernel may have an open
    axis; with `ranges`, dst may be a range of a larger tensor's features.
    """

    name: ClassVar[str]
    error_scale: ClassVar[str] = "the sum of |src||weight| of an output element"
    opens: ClassVar[bool] = False
    ranges: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def limits(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Claim]:
        """What must hold for this template to compute the kernel; the first that fails is the refusal."""

    @classmethod
    def claims(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Claim]:
        """`limits`, and what holds for every template."""
        yield from cls.limits(kernel, target, accuracy)
        yield claim(kernel.open_axis is None or cls.opens, Reason.KNOWN_EXTENTS)
        packed = (each for each in kernel.operands if each.packed and kernel.has_open(each))
        moved = next((each.key for each in packed if each.order), None)
        told = f"`{moved}` is packed in another order of its axes"
        yield claim(moved is None, Reason.OPEN_AXES, got=told)
        is_range = cls.ranges and kernel.dst.is_channels_last and kernel.dst.channels > 1
        centre, places = kernel.centre, (kernel.dst.batch, kernel.dst.spatial)
        if isinstance(centre, Contraction):  # a weight gradient's features are no features of dst
            is_range &= (centre.batch, centre.dst_spatial) == places
        is_taken = not kernel.whole or is_range
        got = None if is_taken else f"{kernel.dst} among {kernel.whole} features"
        yield claim(is_taken, Reason.RANGE, got=got)

    @classmethod
    @abstractmethod
    def candidates(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Template]:
        """Knobs worth considering, the best guess first; at least one."""

    @classmethod
    def estimated(
        cls, kernel: Kernel, target: Target, accuracy: Accuracy
    ) -> Iterator[tuple[float, Template]]:
        """The candidates, each with its `seconds`: for templates whose order needs them anyway."""
        for each in cls.candidates(kernel, target, accuracy):
            yield each.seconds(kernel, target), each

    def traffic(self, kernel: Kernel, target: Target) -> Traffic:
        """Bytes read, written and kept in the workspace by one launch; all tensors once, and no workspace."""
        return moved_once(kernel)

    def flops(self, kernel: Kernel) -> int:
        """Operations that this template does; fewer than the kernel's where an algorithm saves some."""
        return kernel.flops

    @abstractmethod
    def seconds(self, kernel: Kernel, target: Target) -> float:
        """The cost model's estimate for one launch."""

    def error_bound(self, kernel: Kernel) -> float:
        """A number b such that |error| <= b * `error_scale`, before the result is rounded to dst's dtype.

        It is `bound` where all choices of a template have the same.
        """
        return self.bound(kernel)

    @staticmethod
    def bound(kernel: Kernel) -> float:
        """The error bound of every choice; a template has this, or an `error_bound` that its knobs decide."""
        raise NotImplementedError

    @abstractmethod
    def emit(self, kernel: Kernel, target: Target) -> Source:
        """The kernel's source; the same text for the same arguments, in every process."""

    @abstractmethod
    def packing(self, kernel: Kernel, target: Target, operand: KernelOperand) -> Packing:
        """How the kernel reads an operand that is not per element: those, it reads where the caller has them.

        The base class of each backend's templates says it for all operands but weights.
        """

    def packing_seconds(self, kernel: Kernel, target: Target) -> float:
        """The estimate of the time to pack weights for one launch, where each has other ones."""
        weights = [each for each in kernel.operands if each.role == "weight"] if target.repacks else []
        return sum(self.packing(kernel, target, each).seconds for each in weights)

    @property
    def text(self) -> str:
        """The choice as a person writes it: `winograd(tile=4, block=24)`."""
        knobs = ", ".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))
        return f"{self.name}({knobs})"

    @property
    def knobs(self) -> dict[str, Any]:
        """The fields by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def lanes(kernel: Kernel, target: Target) -> int:
    """Elements of the compute dtype in one vector of the target."""
    return target.vector_bytes // dtype_of(kernel.compute_dtype).array.itemsize
