"""The open axis of a kernel: how it prints, and the kernel on one extent of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fuseplan.kernels.centre import Centre, Summary
from fuseplan.kernels.contraction import Contraction
from fuseplan.language.attend import Attend
from fuseplan.language.tensor import TensorSpec


class Opened:
    """What `Kernel` has for its open axis.

    Attributes:
        open_axis: the axis of src and dst whose extent every launch says; None where all are known. The
            numbers there are a representative's: estimates and choices are made for it, and no code has it.
        open_each: how many elements of that axis belong to each one along the open axes of the plan.
        open_keys: the keys of the operands and outputs whose first axis is the open one; `src` is among them.
    """

    src: TensorSpec
    dst: TensorSpec
    centre: Centre | None
    operands: tuple[Any, ...]
    outputs: tuple[Any, ...]
    parts: Any
    open_axis: int | None
    open_each: int
    open_keys: tuple[str, ...]

    def told(self, spec: TensorSpec) -> str:
        """A tensor's text, a star for the extent that no code depends on."""
        if self.open_axis is None:
            return str(spec)
        axis, steps = self.open_axis, spec.element_strides
        star = "*" if self.open_each == 1 else f"{self.open_each}*"  # the code multiplies by it
        shape = (*spec.shape[:axis], star, *spec.shape[axis + 1 :])
        order = spec.layout or "strides=" + ":".join(map(str, steps[axis:]))
        return f"{spec.dtype}[{'x'.join(map(str, shape))}, {order}]"

    def with_extent(self, extent: Any) -> Any:
        """The kernel on an extent of its open axis: a number, or where a kernel is written a value."""

        def sized(tensor: Any) -> Any:
            # What is packed lies in order: no place in it depends on the value of an argument.
            is_sized = self.has_open(tensor) and (
                isinstance(extent, int) or not getattr(tensor, "packed", False)
            )
            return replace(tensor, shape=(extent, *tensor.shape[1:])) if is_sized else tensor

        kernel: Any = self
        imaged = self.centre if isinstance(self.centre, Contraction | Attend) else None
        centre: Any = replace(imaged, batch=extent) if imaged else self.centre
        if isinstance(centre, Summary):
            centre = replace(centre, contraction=replace(centre.contraction, batch=extent))
        rows = extent * self.open_each if self.open_each > 1 else extent
        return replace(
            kernel,
            src=resized(self.src, self.open_axis, rows),
            dst=resized(self.dst, self.open_axis, rows),
            centre=centre,
            operands=tuple(map(sized, self.operands)),
            outputs=tuple(map(sized, self.outputs)),
        )

    @property
    def images(self) -> int:
        """The representative's extent; 1 without an open axis."""
        return 1 if self.open_axis is None else self.src.shape[self.open_axis] // self.open_each

    @property
    def representative(self) -> Any:
        """The kernel with the representative's number in the place of the open extent; itself without one."""
        kernel: Any = self
        return kernel if self.open_axis is None else replace(kernel, open_axis=None)

    def has_open(self, tensor: Any) -> bool:
        """Whether the first axis of an operand or output is the open one."""
        return self.open_axis is not None and tensor.key in self.open_keys


def resized(spec: TensorSpec, axis: int | None, extent: Any) -> TensorSpec:
    """The tensor with another outermost extent, on which no stride depends; nothing is checked again."""
    made = object.__new__(TensorSpec)
    shape = tuple(extent if place == axis else known for place, known in enumerate(spec.shape))
    fields = {name: getattr(spec, name) for name in ("dtype", "layout", "strides", "is_layout_said", "names")}
    vars(made).update(fields, shape=shape, element_strides=spec.element_strides)
    return made
