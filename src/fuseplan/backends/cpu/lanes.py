"""A vector's lanes: one of them, or some of them."""

from __future__ import annotations

from fuseplan.backends.cpu.ir import Builder, Value
from fuseplan.backends.cpu.ir_text import element_of, literal


def lane(b: Builder, value: Value, number: int) -> Value:
    """One lane, as a scalar."""
    return b.op(element_of(value.type), f"extractelement {value.type} {value.name}, i32 {number}")


def lane_numbers(b: Builder, step: int) -> Value:
    """0, step, 2 * step and so on."""
    listed = ", ".join(f"{b.element} {literal(step * number, b.element)}" for number in range(b.lanes))
    return Value(b, b.vector, f"<{listed}>")


def with_lane(b: Builder, value: Value, number: int, one: Value) -> Value:
    """The vector with a scalar in one lane."""
    text = f"insertelement {value.type} {value.name}, {one.type} {one.name}, i32 {number}"
    return b.op(value.type, text)


def chosen_lanes(b: Builder, value: Value, chosen: list[bool], other: float = 0.0) -> Value:
    """Some lanes, and zero or another number in the others, whatever these hold."""
    bits = ", ".join(f"i1 {str(each).lower()}" for each in chosen)
    mask = Value(b, f"<{len(chosen)} x i1>", f"<{bits}>")
    return b.select(mask, value, other)


def widened(b: Builder, value: Value) -> Value:
    """In float64."""
    return value if element_of(value.type) == "double" else b.convert("fpext", value, "double")
