"""A vector's lanes: one of them, or some of them."""

from __future__ import annotations

from fuseplan.backends.cpu.ir import Builder, Index, Value
from fuseplan.backends.cpu.ir_text import I64, element_of, literal, vector


def lane(b: Builder, value: Value, number: int) -> Value:
    """One lane, as a scalar."""
    return b.op(element_of(value.type), f"extractelement {value.type} {value.name}, i32 {number}")


def lane_numbers(b: Builder, step: int, element: str = "") -> Value:
    """0, step, 2 * step and so on, of the compute type unless told."""
    kind = element or b.element
    listed = ", ".join(f"{kind} {literal(step * number, kind)}" for number in range(b.lanes))
    return Value(b, vector(b.lanes, kind), f"<{listed}>")


def places_from(b: Builder, first: Index, step: int) -> Value:
    """Whole numbers of 64 bits: the place of lane 0, and of the others so many apart."""
    return b.splat(b.const(first, I64)) + lane_numbers(b, step, I64)


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
