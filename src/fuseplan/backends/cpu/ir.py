"""Writes LLVM IR as text: values with Python operators, loops as `with` blocks.

A `Builder` writes one function. Its vectors have the width of the target and the type in which a plan
computes (`float` or `double`), so a template reads the same for AVX2, AVX-512 and NEON. Index arithmetic
accepts Python integers and folds what is known when the kernel is written.

Floating point keeps IEEE meaning: no fast-math flags but `contract` on a multiply and an add written as one
`fma`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from fuseplan.backends.cpu.ir_text import (
    BITS,
    I1,
    I64,
    PTR,
    Module,
    compared,
    element_of,
    folded,
    is_floating,
    lanes_of,
    literal,
    number_of,
    vector,
)


def _operator(integer: str, floating: str) -> Callable[[Value, Operand], Value]:
    """Python's operator that writes one of LLVM's, by the type of the left operand."""

    def apply(left: Value, other: Operand) -> Value:
        right = left.builder.const(other, left.type)
        known = folded(integer, left.name, right.name) if left.type == I64 else None
        if known is not None:
            return Value(left.builder, I64, known)
        word = floating if is_floating(left.type) else integer
        return left.builder.op(left.type, f"{word} {left.type} {left.name}, {right.name}")

    return apply


@dataclass(frozen=True, slots=True)
class Value:
    """A value of the function being written: its type and its name in the text."""

    builder: Builder
    type: str
    name: str

    __add__ = __radd__ = _operator("add", "fadd")
    __sub__ = _operator("sub", "fsub")
    __mul__ = __rmul__ = _operator("mul", "fmul")
    __truediv__ = _operator("sdiv", "fdiv")
    __floordiv__ = _operator("udiv", "fdiv")
    __mod__ = _operator("urem", "frem")

    def __rsub__(self, other: Operand) -> Value:
        return self.builder.const(other, self.type) - self

    def __rtruediv__(self, other: Operand) -> Value:
        return self.builder.const(other, self.type) / self

    def __neg__(self) -> Value:
        if self.type == I64:
            raise TypeError("division is unsigned: `loops.ceil_div` rounds up")
        return self.builder.op(self.type, f"fneg {self.type} {self.name}")


Index = Value | int
Operand = Value | int | float


@dataclass(frozen=True, slots=True)
class Variable:
    """A place that is assigned more than once; LLVM turns it into a register."""

    builder: Builder
    type: str
    place: str

    def get(self) -> Value:
        """What was assigned last."""
        return self.builder.op(self.type, f"load {self.type}, ptr {self.place}")

    def set(self, value: Operand) -> None:
        """Assigns."""
        stored = self.builder.const(value, self.type)
        self.builder.line(f"store {self.type} {stored.name}, ptr {self.place}")


class Builder:
    """Writes one function into a module.

    Args:
        module: where the function goes when it is finished.
        parameters: (type, name) of each; pointers are declared not to alias one another.
        element: the type in which the plan computes, `float` or `double`.
        lanes: elements in a vector register.
        linkage: `internal` for a function that only this module calls.
    """

    def __init__(
        self,
        module: Module,
        name: str,
        parameters: Sequence[tuple[str, str]],
        *,
        element: str = "float",
        lanes: int = 8,
        linkage: str = "",
        noalias: bool = True,
    ) -> None:
        self.module, self.name = module, name
        self.element = element
        self.lanes = lanes
        self.vector = vector(lanes, element)
        self.block = "entry"
        self._lines: list[str] = []
        self._places: list[str] = []
        self._counts: dict[str, int] = {}
        restrict = " noalias" if noalias else ""
        written = ", ".join(f"{kind}{restrict if kind == PTR else ''} %{word}" for kind, word in parameters)
        self._signature = f"define {linkage + ' ' if linkage else ''}void @{name}({written}) #0 {{"
        self.parameters = [Value(self, kind, f"%{word}") for kind, word in parameters]

    # ---- text

    def fresh(self, hint: str) -> str:
        """A name not used before in this function."""
        count = self._counts.get(hint, 0)
        self._counts[hint] = count + 1
        return f"{hint}.{count}"

    def line(self, text: str) -> None:
        """One instruction without a result."""
        self._lines.append("  " + text)

    def comment(self, text: str) -> None:
        """A remark in the generated text."""
        self._lines.append(f"  ; {text}")

    def op(self, kind: str, text: str, hint: str = "v") -> Value:
        """One instruction with a result of type `kind`."""
        name = "%" + self.fresh(hint)
        self._lines.append(f"  {name} = {text}")
        return Value(self, kind, name)

    def label(self, name: str) -> None:
        """Begins a block; the block before must have ended with a branch."""
        self._lines.append(f"{name}:")
        self.block = name

    def finish(self) -> None:
        """Ends the function and puts it into the module."""
        self.line("ret void")
        self.module.functions.append("\n".join([self._signature, "entry:", *self._places, *self._lines, "}"]))

    # ---- constants

    def const(self, value: Operand, kind: str) -> Value:
        """`value` as type `kind`: a number becomes a constant, a scalar is spread over a vector."""
        if isinstance(value, Value):
            if value.type != kind and element_of(kind) == value.type:
                return self.splat(value, lanes_of(kind))
            return value
        written = literal(value, element_of(kind))
        if kind[0] == "<":
            written = "splat (" + element_of(kind) + " " + written + ")"
        return Value(self, kind, written)

    def number(self, value: float) -> Value:
        """A vector with `value` in every lane."""
        return self.const(value, self.vector)

    def splat(self, value: Value, lanes: int | None = None) -> Value:
        """A scalar in every lane of a vector."""
        kind = vector(lanes or self.lanes, value.type)
        first = self.op(kind, f"insertelement {kind} poison, {value.type} {value.name}, i32 0", "s")
        zeros = f"<{lanes_of(kind)} x i32> zeroinitializer"
        return self.op(kind, f"shufflevector {kind} {first.name}, {kind} poison, {zeros}", "s")

    # ---- memory

    def at(self, pointer: Value, index: Index, element: str | None = None) -> Value:
        """The address `index` elements after `pointer`."""
        where = self.const(index, I64)
        if where.name == "0":
            return pointer
        return self.op(
            PTR, f"getelementptr {element or self.element}, ptr {pointer.name}, i64 {where.name}", "p"
        )

    def load(self, pointer: Value, kind: str | None = None, *, align: int | None = None) -> Value:
        """The value at an address; a vector needs only an element's alignment unless told otherwise."""
        kind = kind or self.vector
        align = align or BITS[element_of(kind)] // 8
        return self.op(kind, f"load {kind}, ptr {pointer.name}, align {align}", "x")

    def store(self, value: Value, pointer: Value, *, align: int | None = None, stream: bool = False) -> None:
        """Writes a value; `stream` goes past the caches and needs a vector's alignment."""
        align = align or BITS[element_of(value.type)] // 8
        hint = ", !nontemporal !0" if stream else ""
        self.line(f"store {value.type} {value.name}, ptr {pointer.name}, align {align}{hint}")

    def load_first(self, pointer: Value, count: int, kind: str) -> Value:
        """The first `count` lanes of a vector in memory, zero in the others; the rest is not touched."""
        if count == lanes_of(kind):
            return self.load(pointer, kind)
        return self.load_where(pointer, self._mask(count, lanes_of(kind)), kind)

    def load_where(self, pointer: Value, mask: str, kind: str) -> Value:
        """The lanes of a vector in memory for which a mask holds, zero in the others."""
        word, align = f"llvm.masked.load.{self._suffix(kind)}.p0", BITS[element_of(kind)] // 8
        self.module.declarations.add(f"declare {kind} @{word}(ptr, i32, <{lanes_of(kind)} x i1>, {kind})")
        call = f"call {kind} @{word}(ptr {pointer.name}, i32 {align}, {mask}, {kind} zeroinitializer)"
        return self.op(kind, call, "x")

    def store_first(self, value: Value, pointer: Value, count: int) -> None:
        """Writes the first `count` lanes of a vector and leaves what lies behind alone."""
        kind = value.type
        if count == lanes_of(kind):
            return self.store(value, pointer)
        if count == 1:
            # LLVM 22 for x86 turns a masked store of one truncated lane into a store twice as wide.
            lane = self.op(element_of(kind), f"extractelement {kind} {value.name}, i32 0")
            return self.store(lane, pointer)
        align = BITS[element_of(kind)] // 8
        word = f"llvm.masked.store.{self._suffix(kind)}.p0"
        self.module.declarations.add(f"declare void @{word}({kind}, ptr, i32, <{lanes_of(kind)} x i1>)")
        mask = self._mask(count, lanes_of(kind))
        self.line(f"call void @{word}({kind} {value.name}, ptr {pointer.name}, i32 {align}, {mask})")
        return None

    def keep_loads(self) -> None:
        """Keeps loads of what follows behind this place; it is no instruction.

        LLVM moves the loads of all steps of a loop to its front, where they do not fit the registers: a 3x3
        convolution of 3 channels spilled 17 vectors in its loop, and took 232 us, not 196, on a Zen 4.
        """
        self.line('call void asm sideeffect "", "~{memory}"()')

    def prefetch(self, pointer: Value) -> None:
        """Begins to bring the line at an address, which need not be readable, into the second cache."""
        self.module.declarations.add("declare void @llvm.prefetch.p0(ptr, i32, i32, i32)")
        self.line(f"call void @llvm.prefetch.p0(ptr {pointer.name}, i32 0, i32 2, i32 1)")

    def broadcast(self, pointer: Value, index: Index = 0) -> Value:
        """The element at an address, in every lane."""
        return self.splat(self.load(self.at(pointer, index), self.element))

    def variable(self, kind: str, initial: Operand | None = None) -> Variable:
        """A place for a value that changes."""
        place = "%" + self.fresh("var")
        self._places.append(
            f"  {place} = alloca {kind}, align {max(8, BITS[element_of(kind)] * lanes_of(kind) // 8)}"
        )
        variable = Variable(self, kind, place)
        if initial is not None:
            variable.set(initial)
        return variable

    def buffer(self, elements: int, element: str | None = None) -> Value:
        """Room on the stack, aligned to a cache line."""
        place = "%" + self.fresh("buffer")
        self._places.append(f"  {place} = alloca [{elements} x {element or self.element}], align 64")
        return Value(self, PTR, place)

    # ---- arithmetic

    def intrinsic(self, word: str, kind: str, *arguments: Value, flags: str = "") -> Value:
        """A call of one of LLVM's intrinsics; `word` carries no type suffix."""
        return self.call(f"{word}.{self._suffix(kind)}", kind, *arguments, flags=flags)

    def call(self, name: str, kind: str, *arguments: Value, flags: str = "") -> Value:
        """A call of a function by its whole name."""
        self.module.declarations.add(f"declare {kind} @{name}({', '.join(a.type for a in arguments)})")
        given = ", ".join(f"{a.type} {a.name}" for a in arguments)
        return self.op(kind, f"call {flags}{kind} @{name}({given})")

    def fma(self, a: Operand, b: Operand, c: Operand) -> Value:
        """a*b + c, rounded once."""
        kind = next(x.type for x in (a, b, c) if isinstance(x, Value) and x.type[0] == "<")
        return self.intrinsic("llvm.fma", kind, self.const(a, kind), self.const(b, kind), self.const(c, kind))

    def compare(self, how: str, a: Value, b: Operand) -> Value:
        """A comparison as LLVM names it: `slt`, `eq` and so on for integers, `ogt`, `uno` for floats."""
        right = self.const(b, a.type)
        known = compared(how, a.name, right.name) if a.type == I64 else None
        if known is not None:
            return Value(self, I1, str(known).lower())
        word = "fcmp" if is_floating(a.type) else "icmp"
        kind = vector(lanes_of(a.type), I1) if a.type[0] == "<" else I1
        return self.op(kind, f"{word} {how} {a.type} {a.name}, {right.name}", "c")

    def select(self, condition: Value, a: Operand, b: Operand) -> Value:
        """`a` where the condition holds, else `b`; one of them is a Value."""
        kind = next(x.type for x in (a, b) if isinstance(x, Value))
        left, right = self.const(a, kind), self.const(b, kind)
        if condition.name in ("true", "false"):
            return left if condition.name == "true" else right
        test = f"{condition.type} {condition.name}"
        return self.op(kind, f"select {test}, {kind} {left.name}, {kind} {right.name}")

    def smaller(self, a: Index, b: Index) -> Index:
        """The smaller of two indices."""
        if isinstance(a, int) and isinstance(b, int):
            return min(a, b)
        left, right = self.const(a, I64), self.const(b, I64)
        return self.select(self.compare("slt", left, right), left, right)

    def convert(self, word: str, value: Value, element: str) -> Value:
        """A conversion as LLVM names it (`fpext`, `bitcast`, `zext`) to vectors or scalars of `element`."""
        kind = vector(lanes_of(value.type), element) if value.type[0] == "<" else element
        return self.op(kind, f"{word} {value.type} {value.name} to {kind}")

    def shuffle(self, a: Value, b: Value, lanes: Sequence[int]) -> Value:
        """Lanes of a followed by b, picked by number."""
        picked = ", ".join(f"i32 {lane}" for lane in lanes)
        kind = vector(len(lanes), element_of(a.type))
        text = f"shufflevector {a.type} {a.name}, {b.type} {b.name}, <{len(lanes)} x i32> <{picked}>"
        return self.op(kind, text)

    # ---- control

    @contextmanager
    def loop(self, start: Index, stop: Index, step: int = 1, name: str = "i") -> Iterator[Value]:
        """Counts from `start` up to, not including, `stop`; a single step needs no loop."""
        first, last = self.const(start, I64), self.const(stop, I64)
        x, y = number_of(first.name), number_of(last.name)
        if x is not None and y is not None and x + step >= y:
            with self._straight(runs=x < y):
                yield first
            return
        tag, before = self.fresh(name), self.block
        counter = Value(self, I64, f"%{tag}")
        self.line(f"br label %{tag}.head")
        self.label(f"{tag}.head")
        self.line(f"%{tag} = phi i64 [ {first.name}, %{before} ], [ %{tag}.next, %{tag}.latch ]")
        self.line(f"%{tag}.more = icmp slt i64 %{tag}, {last.name}")
        self.line(f"br i1 %{tag}.more, label %{tag}.body, label %{tag}.end")
        self.label(f"{tag}.body")
        yield counter
        self.line(f"br label %{tag}.latch")
        self.label(f"{tag}.latch")
        self.line(f"%{tag}.next = add i64 %{tag}, {step}")
        self.line(f"br label %{tag}.head")
        self.label(f"{tag}.end")

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        """Runs its block where the condition holds."""
        if condition.name in ("true", "false"):
            with self._straight(runs=condition.name == "true"):
                yield
            return
        tag = self.fresh("when")
        self.line(f"br i1 {condition.name}, label %{tag}.then, label %{tag}.end")
        self.label(f"{tag}.then")
        yield
        self.line(f"br label %{tag}.end")
        self.label(f"{tag}.end")

    @contextmanager
    def _straight(self, *, runs: bool) -> Iterator[None]:
        """A block without a branch around it; what never runs is not kept."""
        length, before = len(self._lines), self.block
        yield
        if not runs:
            del self._lines[length:]
            self.block = before

    def both(self, conditions: Sequence[Value]) -> Value:
        """Whether all of several conditions hold; without any, true."""
        found = Value(self, I1, "true")
        for each in conditions:
            if "false" in (found.name, each.name):
                return Value(self, I1, "false")
            if "true" in (found.name, each.name):
                found = each if found.name == "true" else found
            else:
                found = self.op(I1, f"and i1 {found.name}, {each.name}")
        return found

    # ---- names of types

    @staticmethod
    def _mask(count: int, lanes: int) -> str:
        bits = ", ".join(f"i1 {'true' if lane < count else 'false'}" for lane in range(lanes))
        return f"<{lanes} x i1> <{bits}>"

    @staticmethod
    def _suffix(kind: str) -> str:
        short = {"float": "f32", "double": "f64", "half": "f16"}.get(element_of(kind), element_of(kind))
        return f"v{lanes_of(kind)}{short}" if kind[0] == "<" else short
