"""The kernel record: what one launch computes, with nothing about how.

A kernel is `prologue -> centre -> epilogue`: expressions of one element before and after a contraction, a
reduction or attention. A pointwise plan has no centre, and all its stages are the epilogue. Parameter values
are not in the record: they are given at run time, and two plans that differ only there are one kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar

from numpy.typing import NDArray

from fuseplan.kernels.centre import Centre, Reduction, Summary, Unary, listed
from fuseplan.kernels.contraction import Contraction
from fuseplan.kernels.counted import Counted
from fuseplan.kernels.integers import Integers
from fuseplan.kernels.opened import Opened
from fuseplan.language.attend import Attend, AttendGradient
from fuseplan.language.bounds import is_long
from fuseplan.language.dtypes import dtype_of
from fuseplan.language.extents import OPEN
from fuseplan.language.indices import EXACT_IN_F32
from fuseplan.language.parts import Split, part_of
from fuseplan.language.reduction import Statistic
from fuseplan.language.tensor import Dense, TensorSpec
from fuseplan.scalar import CASTS, Scalar, calls, functions, leaves_of, told
from fuseplan.system.locks import cached_property

if TYPE_CHECKING:
    from fuseplan.kernels.lookup import Lookup
    from fuseplan.kernels.packing import Packing

C = TypeVar("C", bound=Centre)
CHANNEL = (1,)  # the axes of an operand per channel


@dataclass(frozen=True)
class Stage:
    """One elementwise operator: `expression` of the leaf `x`, operand keys and parameter keys.

    `op_text` is the operator as the plan writes it, without parameter values; generated code names it in
    comments. `saves` names the value that it makes, where the kernel writes that or later stages read it.
    Where dst is made in parts, `expression` is that of part 0, and `others` are those behind it.
    """

    step: int
    op_text: str
    expression: Scalar
    saves: str = ""
    others: tuple[Scalar, ...] = ()

    @property
    def expressions(self) -> tuple[Scalar, ...]:
        """The formula of each part that the operator makes."""
        return (self.expression, *self.others)

    @property
    def reads_parts(self) -> bool:
        """Whether the formulas read parts of an axis."""
        return any(part_of(name)[1] is not None for name in leaves_of(self.expression))

    def of_part(self, number: int) -> Stage:
        """The stage that makes, or is applied to, one part."""
        return replace(self, expression=self.expressions[number], others=()) if self.others else self


@dataclass(frozen=True)
class KernelOperand:
    """A tensor the kernel reads besides `src`.

    Attributes:
        key: its name in the plan.
        axes: of the tensor that its stage is applied to, those that it has, in the order of `shape`; where
            `shape` is longer, its first extents are one axis. Of a weight, the axes of `shape` in the order
            of `Contraction.weight_shape`, without the kernel's where it has none: all templates order weights
            by this, and none knows what the operator calls transposed.
        role: where it is read: `prologue` (with src), `weight`, `between`, `epilogue` (with dst), or what
            attention calls it; `table` of the rows that src is.
        order: the axes of the caller's tensor in the order of `shape`; () where it has them so.
        strides: elements between neighbours along `axes`, where the kernel's loops go along these: in kernels
            with cells or parts, and of attention. () where its places follow from an element's.
        blocks: neighbours along each of `axes` that have one element together; () where each has its own.
        given: how `shape` is made of the tensor that the caller has, where its axes are others: a weight of a
            transposed convolution.
        packed: it lies dense in the compute dtype; otherwise where the caller has it, as src or dst does.
    """

    key: str
    axes: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    role: str
    order: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    blocks: tuple[int, ...] = ()
    packed: bool = True
    given: Packing | None = None

    @property
    def is_channel(self) -> bool:
        """Whether it has one element for each channel."""
        return self.axes == CHANNEL and self.packed and not (self.strides or self.blocks)

    @property
    def is_inside(self) -> bool:
        """Whether its places are those of an image: it is the same for all images, and not for a channel."""
        is_plain = self.packed and self.role != "weight" and not (self.strides or self.blocks)
        return is_plain and 0 not in (self.axes or (0,)) and not self.is_channel

    @property
    def is_scattered(self) -> bool:
        """Whether an element's place tells its own by division alone: blocks, or some axes with the first."""
        is_plain = self.packed and self.role != "weight"
        return is_plain and bool(self.blocks or (0 in self.axes and not self.strides))

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements; of a table none, as src has those of the rows that are read."""
        return 0 if self.role == "table" else self.size * dtype_of(self.dtype).itemsize

    def told(self, is_open: bool) -> str:
        """All fields in one line; a star for the first axis of an open one."""
        along = (
            f"{listed(self.axes)} in blocks of {listed(self.blocks)}" if self.blocks else listed(self.axes)
        )
        where = "" if self.packed else ", in place"
        where += f", of {self.given}" if self.given else ""
        return f"{self.key}: {self.role} along axes ({along}) {_lies(self, is_open)}{where}"


@dataclass(frozen=True)
class Output:
    """A tensor the kernel writes besides `dst`.

    One that is saved has the value `after` the stage of that step, and lies as dst does, or in kernels with
    cells as its `strides` say. `axes` are those of src that it has.
    Any other is made of statistics: `expression` is over names of reductions, operands that have no more
    elements, parameters and, where the result is `updated`, its own key: the value from before. It lies dense
    in logical order.
    With `over`, `expression` is of one element behind the prologue, and is summed over these axes of src.
    """

    key: str
    axes: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    expression: Scalar
    updated: bool = False
    after: int | None = None
    strides: tuple[int, ...] = ()
    over: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return prod(self.shape) * dtype_of(self.dtype).itemsize

    def told(self, is_open: bool) -> str:
        """All fields in one line; a star for the first axis of an open one."""
        sign = "updated to" if self.updated else "="
        after = "" if self.after is None else f" after operator {self.after}"
        after = f" summed over axes {listed(self.over)}" if self.over else after
        where = f"along axes ({listed(self.axes)}) {_lies(self, is_open)}"
        return f"{self.key} {sign} {told(self.expression)}{after}: {where}"


@dataclass(frozen=True)
class Kernel(Opened, Integers):
    """Everything a template may know of a plan.

    With `parts`, a stage reads an axis in parts: the first of the epilogue, of src or of what `between`
    leaves, and with statistics any stage in front of these or behind them.

    Where dst is a range of the features of a larger tensor, `whole` are the features of that; 0 where it is
    none. Features are innermost then, and `pitch` elements lie from a position of dst to the next.

    With a `lookup`, src's elements are those of a table's rows, and indices lie where the caller has src.
    """

    src: TensorSpec
    dst: TensorSpec
    prologue: tuple[Stage, ...]
    centre: Centre | None
    epilogue: tuple[Stage, ...]
    operands: tuple[KernelOperand, ...]
    parameters: tuple[str, ...]
    outputs: tuple[Output, ...] = ()
    parts: Split | None = None
    between: tuple[Stage, ...] = ()
    open_axis: int | None = None
    open_each: int = 1
    open_keys: tuple[str, ...] = ()
    whole: int = 0
    indices: tuple[Counted, ...] = ()
    lookup: Lookup | None = None

    @cached_property
    def text(self) -> str:
        """A canonical string: equal for two kernels exactly when the same code serves both."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"src: {self.told(self.src)}"
        if self.lookup:
            yield self.lookup.text
        yield from (f"prologue {stage.op_text}: x = {told(stage.expression)}" for stage in self.prologue)
        if self.centre:
            yield self.centre.text
        yield from (f"between {stage.op_text}: x = {told(stage.expression)}" for stage in self.between)
        if self.parts:
            yield self.parts.text
        made = ((stage.op_text, ", ".join(map(told, stage.expressions))) for stage in self.epilogue)
        yield from (f"epilogue {name}: x = {formulas}" for name, formulas in made)
        among = f" among {self.whole} features" if self.whole else ""
        yield f"dst: {self.told(self.dst)}{among}"
        yield from (operand.told(self.has_open(operand)) for operand in self.operands)
        yield from (f"result {output.told(self.has_open(output))}" for output in self.outputs)
        yield from (f"{each.key} of the {each.role} steps {listed(each.steps)}" for each in self.indices)
        if self.parameters:
            yield f"parameters: {', '.join(self.parameters)}"

    @property
    def results(self) -> tuple[Output, ...]:
        """The outputs that are made of statistics."""
        return tuple(output for output in self.outputs if output.after is None and not output.over)

    @property
    def sums(self) -> tuple[Output, ...]:
        """The outputs that are sums over the axes that statistics leave."""
        return tuple(output for output in self.outputs if output.over)

    @cached_property
    def saved(self) -> dict[int, Output]:
        """The outputs that are values of stages, by the step of the stage."""
        return {output.after: output for output in self.outputs if output.after is not None}

    @cached_property
    def compute_dtype(self) -> str:
        """The dtype of expressions and parameters: f64 for f64, long sums of integers and large indices."""
        casts = (CASTS.get(fn) for each in (*self.prologue, *self.epilogue) for fn in calls(each.expression))
        is_exact = is_long(self.largest_sum, self.dst.dtype)
        made = self.reductions
        has_index = made is not None and made.index
        is_exact |= bool(has_index) and self.reduced_count > EXACT_IN_F32
        return "f64" if is_exact or "f64" in (self.src.dtype, self.dst.dtype, *casts) else "f32"

    @cached_property
    def flops(self) -> int:
        """The contraction's, and one for every function of every expression at every element."""
        is_counted = Contraction | Attend | AttendGradient | Unary
        made = self.centre.contraction if isinstance(self.centre, Summary) else self.centre
        centre = made.flops if isinstance(made, is_counted) else 0
        before = sum(functions(stage.expression) for stage in self.prologue) * self.src.size
        behind = (*self.between, *self.between, *self.epilogue)  # gate and value meet those between
        after = sum(functions(stage.expression) for stage in behind) * self.dst.size
        listed = self.reductions.statistics if self.reductions else ()
        reduced = sum(functions(each) + 1 for part in listed for each in part.expressions)
        seen = self.src.size
        if isinstance(self.centre, Summary):
            reduced += sum(functions(stage.expression) for stage in self.between)
            seen = self.contraction.rows * self.contraction.features
        return centre + before + after + reduced * seen

    @property
    def reduced_count(self) -> int:
        """The most elements that one number of the centre is made of; 1 without statistics."""
        if isinstance(self.centre, Unary | Summary):
            return self.centre.count
        over = self.centre.over if isinstance(self.centre, Reduction) else ()
        return prod(self.src.shape[axis] for axis in over)

    @property
    def passes(self) -> int:
        """How often every element has to be seen: a reduction needs all of them before the next step."""
        return len(self.statistics) + 1

    @cached_property
    def read_in_passes(self) -> tuple[dict[str, int], ...]:
        """The tensors as large as src that each pass reads: bytes by key, or `src`. The last writes dst.

        A pass that needs what the prologue gives reads src, and what the prologue does.
        """
        made = {"x"} | {output.key for output in self.saved.values()}
        sizes = {"src": self.src.nbytes}
        sizes |= {operand.key: operand.nbytes for operand in self.operands if not operand.packed}
        before = {"src"}.union(*(leaves_of(stage.expression) for stage in self.prologue))
        passes = [*(each.expressions for each in self.statistics), self.last_formulas]
        used = [frozenset().union(*map(leaves_of, formulas)) for formulas in passes]
        seen = [leaves | before if leaves & made else leaves for leaves in used]
        return tuple({key: size for key, size in sizes.items() if key in leaves} for leaves in seen)

    @property
    def last_formulas(self) -> tuple[Scalar, ...]:
        """The formulas of the last pass: of dst, and of what is saved."""
        saved = (output.expression for output in self.saved.values())
        return (*(stage.expression for stage in self.epilogue), *saved)

    @property
    def pitch(self) -> int:
        """Elements from a position of dst to the next, where features are innermost."""
        return self.whole or self.dst.channels

    @property
    def centre_step(self) -> int | None:
        """The plan's index of the centre's operator, for refusals; None in a pointwise kernel."""
        return len(self.prologue) if self.centre else None

    @cached_property
    def minimum_bytes(self) -> int:
        """What has to move: src and every operand read once, dst and every result written once."""
        read = self.src.nbytes + sum(operand.nbytes for operand in self.operands)
        old = sum(output.nbytes for output in self.outputs if output.updated)
        return read + old + self.written_bytes

    @property
    def written_bytes(self) -> int:
        """Bytes of dst and of all outputs besides it."""
        return self.dst.nbytes + sum(output.nbytes for output in self.outputs)

    def stages(self, role: str) -> tuple[Stage, ...]:
        """Those of a role."""
        return {"prologue": self.prologue, "between": self.between, "epilogue": self.epilogue}[role]

    def operand(self, key: str) -> KernelOperand:
        """The operand of that key; KeyError when the kernel reads none."""
        return {operand.key: operand for operand in self.operands}[key]

    def _centre_of(self, kind: type[C]) -> C:
        if not isinstance(self.centre, kind):
            raise ValueError(f"the kernel's centre is {self.centre}, not a {kind.__name__}")
        return self.centre

    @property
    def contraction(self) -> Contraction:
        """The centre, a contraction, or that whose statistics it has; ValueError in any other kernel."""
        if isinstance(self.centre, Summary):
            return self.centre.contraction
        return self._centre_of(Contraction)

    @property
    def reduction(self) -> Reduction:
        """The centre, a reduction, or that of a contraction's result; ValueError in any other kernel."""
        return self.centre.reduction if isinstance(self.centre, Summary) else self._centre_of(Reduction)

    @property
    def attention(self) -> Attend:
        """The centre, attention, or the attention whose gradient it is; ValueError in any other kernel."""
        return self.centre.attend if isinstance(self.centre, AttendGradient) else self._centre_of(Attend)

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        """The reduction's; none in any other kernel."""
        return self.centre.statistics if isinstance(self.centre, Reduction) else ()

    @property
    def has_cells(self) -> bool:
        """Whether tensors behind statistics have axes of their own: those over any axes."""
        return self.reductions is not None and self.reductions.has_cells

    @property
    def reductions(self) -> Reduction | None:
        """The statistics of src, or of a contraction of it."""
        made = self.centre.reduction if isinstance(self.centre, Summary) else self.centre
        return made if isinstance(made, Reduction) else None

    @property
    def overwrites(self) -> bool:
        """Whether dst may be the memory of src: each element is read once, before its own is written."""
        is_read_once = isinstance(self.centre, Reduction) and self.has_cells and not self.statistics
        return is_read_once and self.src == self.dst

    @property
    def weight(self) -> KernelOperand:
        """The contraction's operand; KeyError in a pointwise kernel, and in a pool's."""
        return {operand.role: operand for operand in self.operands}["weight"]

    def canonical_weight(self, array: NDArray[Any]) -> NDArray[Any]:
        """The weight, an array of its operand's logical shape, as one of `contraction.weight_shape`."""
        logical = array.reshape(self.weight.shape)
        return logical.transpose(self.weight.axes).reshape(self.contraction.weight_shape)

    def shape_of(self, operand: KernelOperand) -> TensorSpec:
        """The tensor that the operand's stage is applied to: src before the contraction, dst after."""
        return self.src if operand.role == "prologue" else self.dst


def _lies(tensor: KernelOperand | Output, is_open: bool) -> str:
    lies = f" strides={listed(tensor.strides)}" if tensor.strides else ""
    return str(Dense((OPEN, *tensor.shape[1:]) if is_open else tensor.shape, tensor.dtype)) + lies
