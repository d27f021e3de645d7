"""What `fuseplan.measure.data` does, on a GPU and with torch: random tensors, float64, and the distance.

The meaning in float64 comes from the operators' own formulas; the sums of convolutions and products are
written here once more, as products of float64 matrices: no library's convolution is trusted with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import product
from math import prod, sqrt
from typing import Any

from fuseplan.measure.data import HALF, STATISTICS_OF_SQUARES, check_inputs, terms
from fuseplan.measure.edges import at_edges, edged
from fuseplan.op import Elementwise, Operand
from fuseplan.ops.conv import Conv
from fuseplan.ops.matmul import Matmul
from fuseplan.ops.normalization import Normalization, reduced_axes
from fuseplan.plan import FusionPlan, Step
from fuseplan.reduction import Reduction
from fuseplan.scalar import fold
from fuseplan.tensor import Dense, TensorSpec

Tensor = Any  # a torch.Tensor; torch is optional, and imported when first used
Tensors = Mapping[str, Tensor]

TORCH_DTYPES = {"f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16"}
TEMPORARY_BYTES = 1 << 30  # of one product's float64 operand: larger ones are made of fewer images at once


def torch_dtype(name: str) -> Any:
    """torch's dtype of ours."""
    import torch

    return getattr(torch, TORCH_DTYPES[name])


def empty(spec: TensorSpec | Dense, device: Any = "cuda", fill: float | None = None) -> Tensor:
    """A new tensor that lies as the spec says; every element of its storage is `fill`, where one is given."""
    import torch

    flat = torch.empty(spec.span, dtype=torch_dtype(spec.dtype), device=device)
    if fill is not None:
        flat.fill_(fill)
    return flat.as_strided(spec.shape, spec.element_strides)


def random_tensors(
    plan: FusionPlan, seed: int = 0, device: Any = "cuda", *, gain: float = 1.0, inputs: str = "normal"
) -> dict[str, Tensor]:
    """`src`, every operand and the old value of every updated result by key, as `random_arrays` draws them.

    Operands in the compute dtype are rounded to src's dtype first, so that a library which takes them in that
    dtype is given the same numbers.

    Args:
        plan: whose tensors.
        seed: the same seed gives the same tensors on the same device.
        device: where.
        gain: a factor on the weights.
        inputs: what `src` looks like, as `random_arrays` says.

    Raises:
        ArgumentError: there is no such kind of input.
    """
    import torch

    check_inputs(inputs)

    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    tensors = {"src": empty(plan.src, device)}
    tensors["src"].copy_(_looking(normal(plan.src.shape), inputs, generator))
    for step in plan.steps:
        for held in step.operands:
            values = _shaped(normal(held.operand.shape), step, held.operand, gain)
            tensors[held.key] = _stored(step, held.operand, values.to(torch_dtype(plan.src.dtype)))
        for old in (each for each in step.results if each.result.updated):
            values = _sized(normal(old.result.shape), old.result.name)
            tensors[old.key] = values.to(torch_dtype(old.result.dtype))
    _settle(plan, tensors)
    return tensors


def _looking(values: Tensor, inputs: str, generator: Any) -> Tensor:
    """Normal numbers made into what `inputs` says."""
    if inputs == "after relu":
        return values.relu()
    if inputs == "large mean":
        return values + 100.0
    if inputs == "large range":
        return values * values.new_empty(values.shape).uniform_(-8, 8, generator=generator).exp()
    return values


def _shaped(values: Tensor, step: Step, operand: Operand, gain: float) -> Tensor:
    if operand.per == "weight":
        return values * (gain / sqrt(terms(step, operand)))
    return _sized(values, operand.name)


def _sized(values: Tensor, name: str) -> Tensor:
    return values.abs() + HALF if name in STATISTICS_OF_SQUARES else values


def _stored(step: Step, operand: Operand, values: Tensor) -> Tensor:
    if operand.per != "element":
        return values.to(torch_dtype(operand.dtype))
    made = empty(step.dst, values.device)
    return made.copy_(values)


def reference(plan: FusionPlan, tensors: Tensors) -> Tensor:
    """What the plan makes of the tensors, in float64 and logical order, on their device."""
    return evaluated(plan, tensors)[0]


def evaluated(plan: FusionPlan, tensors: Tensors, slip: float = 0.0) -> tuple[Tensor, dict[str, Tensor]]:
    """`reference`, and the plan's results by key; old values of those that are updated are in `tensors`.

    Statistics are off by `slip`, relative.
    """
    x = tensors["src"].double()
    results: dict[str, Tensor] = {}
    for step in plan.steps:
        if isinstance(step.op, Normalization):
            x, made = _normalized(step, step.op, x, tensors, slip)
            results |= made
        else:
            x = applied(step, x, tensors)
    return x, results


def applied(step: Step, x: Tensor, tensors: Tensors) -> Tensor:
    """One step's result, in float64.

    Raises:
        TypeError: there is no such sum here.
    """
    operands = {held.operand.name: tensors[held.key].double() for held in step.operands}
    if isinstance(step.op, Elementwise):
        return _elementwise(step, x, tensors)
    if isinstance(step.op, Conv):
        return convolved(step.op, step.src, x, operands["weight"])
    if isinstance(step.op, Matmul):
        return _multiplied(step.op, x, operands["weight"])
    raise TypeError(f"the float64 reference on a GPU does not support {step.op.name!r}")


def _elementwise(step: Step, x: Tensor, tensors: Tensors) -> Tensor:
    leaves = _leaves(step, x, tensors)
    return fold(step.formula, leaves, _meanings(x.device)).expand(x.shape)


def _leaves(step: Step, x: Tensor, tensors: Tensors) -> dict[str, Tensor]:
    """What a step's formulas are over, by key, each to be broadcast over x."""
    import torch

    leaves: dict[str, Tensor] = {"x": x}
    old = [each.key for each in step.results if each.result.updated]
    for key in (*(held.key for held in step.operands), *old):
        value = tensors[key].double()
        is_vector = value.dim() == 1
        leaves[key] = value.reshape(-1, *[1] * (x.dim() - 2)) if is_vector else value
    for each in step.parameters:
        leaves[each.key] = torch.tensor(each.parameter.value, dtype=torch.float64, device=x.device)
    return leaves


def _normalized(
    step: Step, op: Normalization, x: Tensor, tensors: Tensors, slip: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """The output of an operator with statistics, and its results by key; every sum is of all elements."""
    leaves, meanings = _leaves(step, x, tensors), _meanings(x.device)
    for each in op.reductions(step.leaves, step.src):
        leaves |= {name: (1 + slip) * number for name, number in _reduced(each, leaves, step, op).items()}
    formulas = op.result_formulas(step.leaves, step.src)
    shapes = {each.result.name: (each.key, each.result.shape) for each in step.results}
    results = {
        shapes[name][0]: fold(formula, leaves, meanings).reshape(shapes[name][1])
        for name, formula in formulas.items()
    }
    return fold(op.formula(step.leaves, step.src), leaves, meanings).expand(x.shape), results


def _reduced(reduction: Reduction, leaves: Tensors, step: Step, op: Normalization) -> dict[str, Tensor]:
    """The numbers of a reduction by name."""
    axes, meanings = reduced_axes(op.per, step.src.rank), _meanings(leaves["x"].device)
    parts = [fold(part, leaves, meanings).expand(step.src.shape) for part in reduction.expressions]
    if reduction.kind == "sums":
        numbers = [part.sum(axes, keepdim=True) for part in parts]
    else:
        mean = parts[0].mean(axes, keepdim=True)
        numbers = [mean, (parts[0] - mean).square().mean(axes, keepdim=True)]
    return dict(zip(reduction.names, numbers, strict=True))


def _settle(plan: FusionPlan, tensors: Tensors) -> None:
    """Makes gradients 0 where rounding decides what becomes of them."""
    step = edged(plan)
    if step is None or not isinstance(step.op, Normalization):
        return
    op, one = step.op, tensors["src"].new_ones((1,)).double()
    leaves = {**_leaves(step, tensors["src"], tensors), "x": one}
    mask = at_edges(step, leaves, _meanings(one.device), lambda each, known: _reduced(each, known, step, op))
    tensors["src"].masked_fill_(mask.expand(step.src.shape), 0)


def _meanings(device: Any) -> dict[str, Callable[..., Tensor]]:
    """Each scalar function in torch; `fuseplan.scalar.NUMPY` has them in NumPy."""
    import torch

    same = ("add", "sub", "mul", "div", "neg", "abs", "maximum", "minimum", "pow", "exp", "expm1", "log",
            "log1p", "sqrt", "tanh", "erf", "where", "gt", "ge")  # fmt: skip
    named = {name: getattr(torch, name) for name in same}
    return {**named, "const": lambda value: torch.tensor(value, dtype=torch.float64, device=device)}


def _multiplied(op: Matmul, src: Tensor, weight: Tensor) -> Tensor:
    """src (n, c, ..) times the weight along c."""
    matrix = weight if op.transposed else weight.mT
    rows = src.reshape(*src.shape[:2], -1)
    return (matrix @ rows).reshape(src.shape[0], -1, *src.shape[2:])


def convolved(op: Conv, spec: TensorSpec, src: Tensor, weight: Tensor) -> Tensor:
    """The convolution of float64 tensors: for each tap of the kernel, one product of matrices.

    Args:
        op: the convolution.
        spec: its src.
        src: (n, c, *spatial).
        weight: (features, c/groups, *kernel).
    """
    import torch

    window = op.window(spec)
    dst = torch.zeros((spec.batch, op.features, *window.dst), dtype=torch.float64, device=src.device)
    sides = [side for pair in reversed(window.padding) for side in pair]
    images = max(1, TEMPORARY_BYTES // (8 * prod(spec.shape[1:])))
    for begin in range(0, spec.batch, images):
        some = torch.nn.functional.pad(src[begin : begin + images], sides)
        for tap, under in _taps(window.kernel, window.stride, window.dilation, window.dst):
            seen = some[(slice(None), slice(None), *under)]
            dst[begin : begin + images] += _product(seen, weight[(slice(None), slice(None), *tap)], op.groups)
    return dst


def _taps(
    kernel: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...], dst: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
    """Each position of a kernel, and where it meets the padded src."""
    axes = list(zip(stride, dilation, dst, strict=True))
    for tap in product(*map(range, kernel)):
        yield (
            tap,
            tuple(
                slice(at * apart, at * apart + (extent - 1) * step + 1, step)
                for at, (step, apart, extent) in zip(tap, axes, strict=True)
            ),
        )


def _product(seen: Tensor, weight: Tensor, groups: int) -> Tensor:
    """(n, c, *dst) times (features, c/groups) in groups: (n, features, *dst)."""
    batch, spatial = seen.shape[0], seen.shape[2:]
    if weight.shape[1] == 1 and weight.shape[0] == groups:
        return seen * weight.reshape(-1, *[1] * len(spatial))
    rows = seen.reshape(batch, groups, -1, prod(spatial))
    weights = weight.reshape(1, groups, -1, weight.shape[1])
    return (weights @ rows).reshape(batch, -1, *spatial)


def deviation(got: Tensor, want: Tensor, besides: float = 0.0) -> float:
    """The largest |got - want| over the largest |want|; infinite where what is not finite differs.

    `besides` is added to the largest |want|.
    """
    import torch

    exact, finite = got.double(), want.isfinite()
    if exact.shape != want.shape or not torch.equal(exact.isfinite(), finite):
        return float("inf")
    if not torch.allclose(exact[~finite], want[~finite], equal_nan=True):
        return float("inf")
    largest = want.abs().where(finite, torch.zeros_like(want)).amax().item() if want.numel() else 0.0
    largest += besides
    apart = (exact - want).abs().where(finite, torch.zeros_like(want))
    furthest = apart.amax().item() if want.numel() else 0.0
    return float(furthest / largest if largest else furthest)
