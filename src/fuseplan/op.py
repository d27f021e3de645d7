"""What an operator is: one class body that says its arithmetic and everything given to it.

The fields of an operator's class are of four kinds. An operand is a tensor given at run time; a result is one
that it gives besides its output; a parameter is a number given at run time, with a default that the plan
writes down; anything else is an attribute, fixed in the plan. An attribute may be an operator: an activation,
whose parameters are then the outer operator's. Parser, printer, checks, arguments and documentation all read
this one declaration.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, ClassVar, TypeVar, cast, dataclass_transform

import numpy as np

from fuseplan.errors import PlanError
from fuseplan.language.arithmetic import ARRAYS, Arithmetic
from fuseplan.language.declarations import (
    IN_SRC_DTYPE,
    PER,
    SAMPLE_TENSORS,
    Along,
    Array,
    Beside,
    Operand,
    OperandField,
    Parameter,
    Result,
    ResultField,
    count,
    extents,
    inner,
    lined_up,
    operand,
    parameter,
    result,
    word,
)
from fuseplan.language.dtypes import dtype_of
from fuseplan.language.extents import numbers
from fuseplan.language.fields import Record, checked, declared_fields, explained, refused
from fuseplan.language.indices import check_indices, evaluated
from fuseplan.language.tensor import MAX_BYTES, Dense, TensorSpec
from fuseplan.messages.excerpt import shown
from fuseplan.scalar import Scalar, indices_of, leaf
from fuseplan.system.locks import cached_property

# What a module of operators needs.
__all__ = ["Array", "Elementwise", "Given", "Op", "inner", "operand", "operator", "parameter", "result"]


@dataclass(frozen=True)
class Given:
    """The arguments of `Op.evaluate`: arrays in float64, their arithmetic, and how src's axes are named."""

    src: Array
    spec: TensorSpec
    operands: Mapping[str, Array]
    parameters: Mapping[str, float]
    slip: float = 0.0
    by: Arithmetic = ARRAYS


class Op(Record, ABC):
    """An operator: its operands, parameters and results, and its meaning in float64.

    Attributes:
        name: its word in a plan's text, PyTorch's where PyTorch has one; made from the class's name.
        kind: `elementwise`, or the name of the rule whose centre it is, such as `contraction`.
        onnx: ONNX's name of the operator; None where ONNX has none.
        torch: PyTorch's, in torch.nn.functional or torch.
        has_parts: its formula reads an axis of src in parts.
        looks_up: src has indices of rows of its weight, which a kernel reads as src.
        integers: the dtypes of whole numbers that it computes with.
        is_gradient: of a weight; operators beside it in a kernel have no tensors.
    """

    name: ClassVar[str]
    kind: ClassVar[str]
    onnx: ClassVar[str | None] = None
    torch: ClassVar[str | None] = None
    has_parts: ClassVar[bool] = False
    looks_up: ClassVar[bool] = False
    integers: ClassVar[tuple[str, ...]] = ()
    is_gradient: ClassVar[bool] = False
    operand_fields: ClassVar[Mapping[str, OperandField]] = {}
    result_fields: ClassVar[Mapping[str, ResultField]] = {}

    @property
    def reads(self) -> str | None:
        """The axis that it takes for c: `channels`, axis 1, or `rows`, the last; None: that of the plan."""
        return None

    def check_dtype(self, src: TensorSpec) -> None:
        """Checks that it takes elements of src's dtype.

        Raises:
            PlanError: it does not.
        """
        if not dtype_of(src.dtype).is_float and src.dtype not in self.integers:
            remedy = "Convert them before: `cast(f32)`, or `dequantize` with a scale"
            raise PlanError(f"{self.name} computes with floating-point numbers", got=src.dtype, remedy=remedy)

    def __post_init__(self) -> None:
        for declared in declared_fields(type(self)):
            value, when = getattr(self, declared.name), declared.metadata.get("parameter")
            self._set(declared.name, checked(self.name, declared, value, applies=not when or when(self)))
        for name in self.inner_names():
            self._check_inner(name)
        for name, saved in self.again.items():
            if not isinstance(saved, str):
                raise refused(self.name, name, "must be the name of a saved value", got=shown(saved))

    def _check_inner(self, name: str) -> None:
        """Checks that the field holds an activation, and that the names of its parameters are free."""
        value: Any = getattr(self, name)
        taken = value.operand_fields.items() if isinstance(value, Op) else ()
        listed = [key for key, made in taken if made.when(value)]
        if isinstance(value, Elementwise) and not value.has_parts:
            listed += indices_of(value.formula())
            own = {each.name: each for each in declared_fields(type(self))}[name]
            if (own.metadata["operands"] or not listed) and not (value.results_made or value.again):
                self._check_apart(name, value)
                return
        got = value.name if isinstance(value, Op) else shown(value)
        raise refused(
            self.name, name, "must be an activation: an elementwise operator without operands",
            got=f"{got}, which takes {' and '.join(listed)}" if listed else got,
            want="such as relu or leaky_relu(0.1); in Python Relu() or LeakyRelu(0.1)",
        )  # fmt: skip

    def _check_apart(self, name: str, activation: Op) -> None:
        own = {*self.operand_fields, *self.result_fields, "x"}
        own |= {each.name for each in declared_fields(type(self))}
        for each in activation.parameters():
            if each.name in own:
                problem = f"has a parameter {each.name!r}, a name that {self.name} has already"
                raise refused(self.name, name, problem, remedy="Give it another name")

    def _set(self, name: str, value: object) -> None:
        """Sets a field to its canonical form, as only construction may."""
        object.__setattr__(self, name, value)

    def views(self, src: TensorSpec) -> dict[str, tuple[slice, ...]]:
        """The parts of its output that a plan gives too: their indices, by name."""
        return {}

    def removes(self, src: TensorSpec) -> tuple[int, ...]:
        """The axes of src that its output does not have."""
        return ()

    def operands(self, src: TensorSpec) -> tuple[Operand, ...]:
        """The tensors it takes besides `src`, in the order of their declaration."""
        return tuple(each for each in self._operands(src) if each.name not in self.again)

    def _operands(self, src: TensorSpec) -> tuple[Operand, ...]:
        declared = self.operand_fields.items()
        return tuple(self._operand(name, made, src) for name, made in declared if made.when(self))

    @property
    def again(self) -> dict[str, str]:
        """The operands that are earlier values of the plan: the name of the saved value, by the operand's."""
        fields = (each.name for each in declared_fields(type(self)) if "again" in each.metadata)
        return {name: saved for name in fields if (saved := getattr(self, name)) is not None}

    def _operand(self, name: str, declared: OperandField, src: TensorSpec) -> Operand:
        per: Any = declared.per(self, src) if callable(declared.per) else declared.per
        block = cast(int, getattr(self, "block", 1)) if per == "block" else 1
        spec: TensorSpec | Dense | None = None
        axes, word, shape = tuple[int, ...](), "weight", per
        if isinstance(per, str):
            axes, word, shape = PER[per](src), per, extents(src, per, block)
        elif isinstance(per, Along):
            axes, word, shape = per.axes, "axes", per.shape
        elif isinstance(per, Beside):
            axes, word, shape, spec = per.axes, "beside", per.spec.shape, per.spec
        own = per.spec.dtype if word == "beside" else src.dtype if word in IN_SRC_DTYPE else src.compute_dtype
        dtype = declared.dtype(self, src) if declared.dtype else own
        spec = self.output(src).with_dtype(dtype) if per == "element" else spec
        if prod(numbers(shape)) * dtype_of(dtype).itemsize > MAX_BYTES:
            raise PlanError(
                f"{self.name}: its {name} is larger than memory can be",
                got=f"{'x'.join(map(str, shape))} elements of {dtype}",
                want="at most 2^63 - 1 bytes",
            )
        return Operand(name, shape, dtype, word, axes, block, spec=spec)

    def results(self, src: TensorSpec) -> tuple[Result, ...]:
        """The tensors it gives besides its output, in the order of their declaration."""
        return tuple(self._result(name, made, src) for name, made in self.results_made.items())

    @property
    def results_made(self) -> Mapping[str, ResultField]:
        """The declarations of its results, by name."""
        return {name: made for name, made in self.result_fields.items() if made.when(self)}

    def _result(self, name: str, declared: ResultField, src: TensorSpec) -> Result:
        per: Any = declared.per(self, src) if callable(declared.per) else declared.per
        if isinstance(per, Beside):
            return Result(name, per.spec.shape, per.spec.dtype, "beside", declared.updated, (), per.spec)
        axes, block = PER[per](src), cast(int, getattr(self, "block", 1)) if per == "block" else 1
        shape, dtype = extents(src, per, block), src.dtype if per in IN_SRC_DTYPE else src.compute_dtype
        spec = self.output(src) if per == "element" else Dense(shape, dtype)
        return Result(name, shape, dtype, per, declared.updated, axes, spec)

    def leaf_values(self, given: Given) -> dict[str, Any]:
        """The values of a formula's leaves: src, parameters, and operands with as many axes as src."""
        spec, known, const = given.spec, given.parameters, given.by.table["const"]
        declared: tuple[Operand | Result, ...] = (*self._operands(spec), *self.results(spec))
        found = {each.name: (each.axes, getattr(each, "block", 1)) for each in declared}
        numbers = {each.name: const(known.get(each.name, each.value)) for each in self.parameters()}
        spread = {name: lined_up(each, spec.shape, *found[name]) for name, each in given.operands.items()}
        return {"x": given.src, **numbers, **spread}

    def parameters(self) -> tuple[Parameter, ...]:
        """The numbers it takes at run time, with the plan's values: its own, then its activation's."""
        declared = declared_fields(type(self))
        own = [each.name for each in declared if each.metadata.get("parameter", lambda _: False)(self)]
        return (
            *(Parameter(name, getattr(self, name)) for name in own),
            *(each for name in self.inner_names() for each in getattr(self, name).parameters()),
        )

    @classmethod
    def inner_names(cls) -> tuple[str, ...]:
        """The attributes that are activations."""
        return tuple(each.name for each in declared_fields(cls) if "inner" in each.metadata)

    def attributes(self) -> dict[str, object]:
        """What is fixed in the plan, in the order of declaration."""
        declared = declared_fields(type(self))
        fixed = [each.name for each in declared if not {"parameter", "again"} & each.metadata.keys()]
        return {name: getattr(self, name) for name in fixed}

    def written(self) -> Iterator[tuple[str, object, bool]]:
        """Name, value and whether that is the default, of each field a plan's text may write.

        They come as declared: attributes, parameters, names of earlier values. The first may stand without
        its name, but for those of earlier values.
        """
        for each in declared_fields(type(self)):
            value = getattr(self, each.name)
            yield each.name, value, value == each.default

    def output(self, src: TensorSpec) -> TensorSpec:
        """The tensor it makes of `src`: of its shape, in its layout or the named one nearest to its strides.

        Raises:
            PlanError: it makes none.
        """
        return src if src.layout is not None else src.with_shape(src.shape)

    @abstractmethod
    def meaning(self, given: Given) -> tuple[Array, dict[str, Array]]:
        """The output and the results by name, in float64."""

    def reference(
        self,
        src: Array,
        operands: Mapping[str, Array],
        parameters: Mapping[str, float],
        names: str | None = None,
    ) -> Array:
        """The output that `evaluate` gives."""
        return self.evaluate(src, operands, parameters, names=names)[0]

    def evaluate(
        self,
        src: Array,
        operands: Mapping[str, Array],
        parameters: Mapping[str, float],
        slip: float = 0.0,
        names: str | None = None,
        by: Arithmetic = ARRAYS,
    ) -> tuple[Array, dict[str, Array]]:
        """The meaning in float64, all arrays in logical order.

        Args:
            src: of the plan's shape.
            operands: by the operand's name, of the operand's shape; and old values of updated results.
            parameters: by name; the plan's values replace missing ones.
            slip: numbers computed of many elements, means and sums, are taken (1 + slip) times.
            names: of src's axes; n, c and the spatial ones unless given.
            by: the arithmetic of the arrays, where they are not NumPy's.

        Returns:
            The output, and the results by name.
        """
        wide, x = {name: by.wide(each) for name, each in operands.items()}, by.wide(src)
        spec = TensorSpec(tuple(x.shape), "f64", names)
        with np.errstate(all="ignore"):  # infinities and NaN are results like any other
            return self.meaning(Given(x, spec, wide, parameters, slip, by))

    @classmethod
    @abstractmethod
    def samples(cls) -> Iterator[tuple[str, Op]]:
        """Tensors, as text, and operators that take them: tests and documentation are made from these."""


class Elementwise(Op):
    """An operator that makes each element of its output from the same element of src.

    A class has the method `apply(self, x, **leaves) -> Scalar`: the formula of one element. Its arguments
    after `x` are its operands and parameters, by name.
    """

    kind = "elementwise"
    apply: ClassVar[Callable[..., Any]]

    def output(self, src: TensorSpec) -> TensorSpec:
        check_indices(self.formula(), src)
        return super().output(src)

    def formula(self, keys: Mapping[str, str] | None = None) -> Scalar:
        """The formula over `x`, its operands and its parameters; `keys` gives some of them other names."""
        return self._plain if keys is None else type(self).apply(self, leaf("x"), **self.leaves(keys))

    @cached_property
    def _plain(self) -> Scalar:
        return self.formula({})

    def formulas(self, src: TensorSpec, keys: Mapping[str, str] | None = None) -> tuple[Scalar, ...]:
        """The formula of each part of dst that has its own: one, unless an axis of src is read in parts."""
        return (self.formula(keys),)

    def leaves(self, keys: Mapping[str, str] | None = None) -> dict[str, Scalar]:
        """Operands and parameters by name, as leaves; `keys` gives some of them other names."""
        names = [name for name, declared in self.operand_fields.items() if declared.when(self)]
        names += [each.name for each in self.parameters()]
        return {name: leaf((keys or {}).get(name, name)) for name in names}

    def meaning(self, given: Given) -> tuple[Array, dict[str, Array]]:
        """The formula; operands are broadcast over src."""
        made = evaluated(self.formula(), self.leaf_values(given), given.spec, given.by.table)
        return given.by.own(given.by.broadcast(made, given.src.shape)), {}

    @classmethod
    def samples(cls) -> Iterator[tuple[str, Op]]:
        """One operator with its defaults, on a tensor of each rank; odd sizes, both orders of the axes."""
        yield from ((text, cls()) for text in SAMPLE_TENSORS)


OpClass = TypeVar("OpClass", bound=type[Op])


@dataclass_transform(frozen_default=True, field_specifiers=(parameter, inner, operand, word, count))
def operator(cls: OpClass) -> OpClass:
    """Makes an operator of a class: frozen, compared by value, named after the class, its operands gathered.

    Raises:
        TypeError: the class has no docstring, a parameter before an attribute, or an `apply` that takes
            something else than the class declares.
    """
    if not (cls.__dict__.get("__doc__") or "").strip():
        raise TypeError(f"{cls.__name__} has no docstring: its first line is the operator's formula")
    if "name" not in vars(cls):
        cls.name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()
    operands = {name: value for name, value in vars(cls).items() if isinstance(value, OperandField)}
    results = {name: value for name, value in vars(cls).items() if isinstance(value, ResultField)}
    cls.operand_fields = dict(cls.operand_fields) | operands
    cls.result_fields = dict(cls.result_fields) | results
    for name in (*operands, *results):
        delattr(cls, name)
        annotated = vars(cls).get("__annotations__", {})
        if annotated.pop(name, None):
            annotated[name] = "str | None"  # behind all other fields
            setattr(cls, name, field(default=None, kw_only=True, metadata={"again": True}))
    made = cast(OpClass, dataclass(frozen=True, eq=False, repr=False)(cls))
    made.__init__ = explained(made.__init__)  # type: ignore[method-assign]
    kinds = ["parameter" in each.metadata for each in declared_fields(made) if "again" not in each.metadata]
    if kinds != sorted(kinds):
        raise TypeError(f"{cls.__name__}: attributes come before parameters")
    if issubclass(made, Elementwise):
        _check_apply(made)
        _check_samples(made)
    return made


def _check_apply(cls: type[Elementwise]) -> None:
    declared = set(cls.operand_fields)
    declared |= {each.name for each in declared_fields(cls) if "parameter" in each.metadata}
    taken = inspect.signature(cls.apply).parameters.values()
    named = {each.name for each in list(taken)[2:] if each.kind is not inspect.Parameter.VAR_KEYWORD}
    is_open = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in taken)
    if named - declared or (declared - named and not is_open):
        raise TypeError(f"{cls.__name__}.apply takes x and {sorted(named)}; declared are {sorted(declared)}")


def _check_samples(cls: type[Elementwise]) -> None:
    """Messages and tests show an operator by its samples: the inherited ones are made without arguments."""
    required = [each.name for each in declared_fields(cls) if each.default is dataclasses.MISSING]
    if required and cls.samples.__func__ is Elementwise.samples.__func__:  # type: ignore[attr-defined]
        raise TypeError(f"{cls.__name__}: {required[0]} has no default, so the class needs its own `samples`")
