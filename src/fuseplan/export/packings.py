"""How an exported kernel's operands are packed: for tensors of known extents alone; and a packing in C.

A function in C is a loop over the packed elements, each of which it reads from its place in the operand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod

from fuseplan.errors import BuildError
from fuseplan.execution.runner import Packings, packings_of
from fuseplan.execution.stages import Records
from fuseplan.kernels.packing import (
    Join,
    Packing,
    Pad,
    Product,
    Reshape,
    Step,
    Take,
    Thirds,
    Tiles,
    Transpose,
    shape_after,
)
from fuseplan.language.dtypes import dtype_of

Shape = tuple[int, ...]


def exported_packings(records: Records) -> Packings:
    """How the kernel reads each operand.

    Raises:
        BuildError: one is packed and has an open axis, for which there are no numbers to write.
    """
    found = packings_of(records.kernel, records.choice.template, records.target)
    for operand in records.kernel.operands:
        if found[operand.key] is not None and records.kernel.has_open(operand):
            raise BuildError(
                f"operand `{operand.key}` is packed, and has the open axis of {records.plan.src}: no number "
                "says how\n  Export plan.with_extents(...), or save the plan: a saved plan packs it"
            )
    return found


@dataclass
class _Element:
    """One packed element, walked back to the operand: `index` are C expressions of the loops' variables.

    Attributes:
        index: the place along each axis of the array that the walk has come to.
        inside: what holds where the element is none of the zeros.
        matrix: of the product, if there is one; its row is the loops' first variable.
        third: which of three numbers of bf16 is packed; empty for the element itself.
    """

    index: list[str]
    inside: list[str] = field(default_factory=list)
    matrix: tuple[tuple[float, ...], ...] = ()
    row: str = ""
    third: str = ""

    def back(self, step: Step, before: Shape, after: Shape) -> None:
        """Walks over a step, which made an array of shape `after` of one of shape `before`."""
        index = self.index
        if isinstance(step, Transpose):
            places = sorted(range(len(index)), key=step.axes.__getitem__)
            self.index = [index[place] for place in places]
        elif isinstance(step, Reshape):
            self.index = _reshaped(index, after, before)
        elif isinstance(step, Pad):
            grown = zip(index, before, after, strict=True)
            self.inside += [f"{place} < {own}" for place, own, whole in grown if own < whole]
        elif isinstance(step, Take):
            table = ", ".join(map(str, step.places))
            taken = f"((const int64_t[]){{{table}}})[{index[step.axis]}]"
            self.index = [*index[: step.axis], taken, *index[step.axis + 1 :]]
        elif isinstance(step, Tiles):
            tile, place = index[step.axis : step.axis + 2]
            begin, last = f"{tile} * {step.extent}", before[step.axis] - step.extent
            merged = f"(({begin} < {last} ? {begin} : {last}) + {place})"
            self.index = [*index[: step.axis], merged, *index[step.axis + 2 :]]
        elif isinstance(step, Product):
            self.matrix, self.row = step.matrix, index[0]
            self.index = ["k", *index[1:]]
        elif isinstance(step, Thirds):
            self.third = index[step.axis]
            self.index = [*index[: step.axis], *index[step.axis + 1 :]]
        else:
            raise ValueError(f"{step} has no code in C")


# As `Thirds` has it: LARGE and more are in the last alone.
_THIRD = """\
    {{
        union {{ float number; uint32_t bits; }} whole = {{{value}}}, left = whole, made = {{0}};
        for (int64_t k = 0; k <= {third}; ++k) {{
            left.number -= made.number;
            made.bits = (left.bits + (left.bits >> 16 & 1) + 0x7fff) & 0xffff0000;
        }}
        if ((whole.bits & 0x7fffffff) >= 0x7f7f8000) {{
            made.bits = {third} < 2 ? 0 : whole.number != whole.number ? whole.bits | 0x400000 :
                        (whole.bits & 0x80000000) | 0x7f800000;
        }}
        *to++ = (uint16_t)(made.bits >> 16);
    }}"""


def pack_function(name: str, packing: Packing) -> str:
    """A C function that packs an operand: `void name(const float *from, float *to)`, in its dtypes."""
    ctype, made = dtype_of(packing.dtype).c, dtype_of(packing.made).c
    lines = [f"static inline void {name}(const {ctype} *from, {made} *to) {{"]
    lines += _chain(packing.steps, packing.shape, ctype)
    return "\n".join([*lines, "}"])


def _chain(steps: Sequence[Step], shape: Shape, ctype: str) -> Iterator[str]:
    """The loops that write the packed elements of a chain in their order."""
    if steps and isinstance(steps[-1], Join):
        for chain in steps[-1].chains:
            yield from _chain((*steps[:-1], *chain), shape, ctype)
        return
    extents = shape_after(steps, shape)
    loops = [(f"i{axis}", extent) for axis, extent in enumerate(extents) if extent > 1]
    element = _Element([f"i{axis}" if extent > 1 else "0" for axis, extent in enumerate(extents)])
    for count in range(len(steps), 0, -1):
        before = shape_after(steps[: count - 1], shape)
        element.back(steps[count - 1], before, shape_after(steps[:count], shape))
    if element.matrix:
        yield from _matrix(element.matrix)
    for name, extent in loops:
        yield f"    for (int64_t {name} = 0; {name} < {extent}; ++{name})"
    yield from _written(element, _flat(element.index, shape), ctype)


def _matrix(matrix: tuple[tuple[float, ...], ...]) -> Iterator[str]:
    yield f"    static const double matrix[{len(matrix)}][{len(matrix[0])}] = {{"
    yield from (f"        {{{', '.join(map(repr, row))}}}," for row in matrix)
    yield "    };"


def _written(element: _Element, place: str, ctype: str) -> Iterator[str]:
    place = place[1:-1] if place.startswith("(") else place
    condition = " && ".join(element.inside)
    value = f"{condition} ? from[{place}] : 0" if condition else f"from[{place}]"
    if element.third:
        yield _THIRD.format(value=value, third=element.third)
        return
    if not element.matrix:
        yield f"        *to++ = {value};"
        return
    yield "    {"
    yield "        double sum = 0;"
    yield f"        for (int64_t k = 0; k < {len(element.matrix[0])}; ++k)"
    guard = f"if ({condition}) " if condition else ""
    yield f"            {guard}sum += matrix[{element.row}][k] * (double)from[{place}];"
    yield f"        *to++ = ({ctype})sum;"
    yield "    }"


def _reshaped(index: Sequence[str], shape: Shape, wanted: Shape) -> list[str]:
    """The place in an array of shape `wanted`; axes that both shapes have keep their places."""
    made: list[str] = []
    begin = end = first = last = 0
    while last < len(wanted):
        last, end = last + 1, min(end + 1, len(shape))
        while prod(shape[begin:end]) != prod(wanted[first:last]):  # the shortest runs of equal size
            if prod(shape[begin:end]) < prod(wanted[first:last]):
                end += 1
            else:
                last += 1
        made += _split(_flat(index[begin:end], shape[begin:end]), wanted[first:last])
        begin, first = end, last
    return made


def _flat(index: Sequence[str], shape: Shape) -> str:
    """The place of an element in row-major order: one term, as all places are."""
    strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    terms = [(place, stride) for place, stride in zip(index, strides, strict=True) if place != "0"]
    if not terms:
        return "0"
    if len(terms) == 1 and terms[0][1] == 1:
        return terms[0][0]
    return f"({' + '.join(place if stride == 1 else f'{place} * {stride}' for place, stride in terms)})"


def _split(flat: str, shape: Shape) -> list[str]:
    """The place along each axis of an element that stands at `flat` in row-major order."""
    index = []
    for axis, extent in enumerate(shape):
        stride = prod(shape[axis + 1 :])
        divided = flat if stride == 1 else f"({flat} / {stride})"
        is_outermost = all(each == 1 for each in shape[:axis])
        index.append("0" if extent == 1 else divided if is_outermost else f"({divided} % {extent})")
    return index
