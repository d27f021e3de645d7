"""Tensors on a GPU with walls around them, and the error that a kernel may make."""

from collections.abc import Mapping
from typing import Any

import torch

from fuseplan.compile import CompiledPlan
from fuseplan.kernels.contraction import Contraction
from fuseplan.language.dtypes import DTYPES
from fuseplan.measure.data import evaluated, random_arrays
from fuseplan.measure.spaces import arithmetic_of, torch_dtype
from fuseplan.plans.plan import FusionPlan
from fuseplan.plans.step import Step

Tensor = Any

MARGIN = 512  # bytes on both sides, a multiple of every alignment
CANARY = 0x5A  # each byte around an output
NAN = 0xFF  # each byte around an input, and in an output that was not written: NaN in every dtype
UNDERFLOW = {
    "f16": 6e-8,
    "bf16": 1e-38,
    "f32": 1e-38,
    "f64": 1e-300,
    "f8e4m3": 2.0**-10,
    "f8e5m2": 2.0**-17,
}  # what a result below the normal ones may lose


class Walled:
    """A tensor, NaN in every element, between margins that nothing may touch.

    Attributes:
        tensor: to be passed to a kernel.
    """

    def __init__(
        self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any, margin: int, device: str = "cuda"
    ) -> None:
        span = 1 + sum((extent - 1) * step for extent, step in zip(shape, strides, strict=True))
        nbytes = span * torch.empty(0, dtype=dtype).element_size()
        self._bytes = torch.full((nbytes + 2 * MARGIN,), margin, dtype=torch.uint8, device=device)
        self._outside = (slice(None, MARGIN), slice(MARGIN + nbytes, None))
        self._margin = margin
        inside = self._bytes[MARGIN : MARGIN + nbytes]
        inside.fill_(NAN)
        self.tensor: Tensor = inside.view(dtype).as_strided(shape, strides)

    @property
    def stands(self) -> bool:
        """Whether the margins are as they were."""
        return all(bool((self._bytes[part] == self._margin).all()) for part in self._outside)


def output(plan: FusionPlan, device: str = "cuda") -> Walled:
    """A poisoned output."""
    spec = plan.output
    return Walled(spec.shape, spec.element_strides, torch_dtype(spec.dtype), CANARY, device)


def inputs(plan: FusionPlan, seed: int, device: str = "cuda") -> dict[str, Tensor]:
    """Random `src` and operands between NaN: what is read beside them and used shows in the result."""
    made = {}
    for key, tensor in random_arrays(plan, seed, device=device).items():
        wall = Walled(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, NAN, device)
        made[key] = wall.tensor.copy_(tensor)
    return made


def wanted(compiled: CompiledPlan, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The result in float64, and how far each element of a right one may be from it.

    The sum of the contraction may be off by the template's bound times the sum of |src||weight|; the epilogue
    is applied to sums that much larger and smaller, and may add 64 roundings of the compute dtype; the result
    is rounded once.
    """
    plan, kernel = compiled.plan, compiled.kernel
    step = kernel.centre_step if isinstance(kernel.centre, Contraction) else None
    want = tensors["src"].double() if step is not None else evaluated(plan, tensors)[0]
    for each in plan.steps[: step + 1] if step is not None else ():
        before, want = want, applied(each, want, tensors)
    spread = torch.zeros_like(want)
    if step is not None:
        bound = compiled.choice.template.error_bound(compiled.kernel)
        magnitudes = {key: tensor.double().abs() for key, tensor in tensors.items()}
        off = bound * applied(plan[step], before.abs(), magnitudes)
        off = off.where(want.isfinite(), 0.0)  # a max pool's window that lies in the padding is exact
        rest = plan.steps[step + 1 :]
        above, below = _through(rest, want + off, tensors), _through(rest, want - off, tensors)
        want = _through(rest, want, tensors)
        spread = torch.maximum((above - want).abs(), (below - want).abs())
    dtype, made = plan.output.dtype, DTYPES[plan.output.dtype]
    slack = 64 * DTYPES[plan.src.compute_dtype].epsilon * want.abs().amax() + UNDERFLOW.get(dtype, 0.0)
    return want, 1.01 * spread + slack + (made.epsilon if made.is_float else 0.0) * want.abs()


def _through(steps: tuple[Step, ...], x: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
    for step in steps:
        x = applied(step, x, tensors)
    return x


def applied(step: Step, x: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
    """One step's result, in float64."""
    return step.evaluate(x, tensors, {}, by=arithmetic_of(x))[0]


def worst(got: Tensor, want: Tensor, allowed: Tensor) -> float:
    """The largest error as a share of what is allowed there: at most 1 is right. Infinite for a wrong NaN."""
    share = ((got.double() - want).abs() / allowed).nan_to_num(nan=float("inf"))
    return float(share.masked_fill(got.isnan() & want.isnan(), 0).amax())


def typical(compiled: CompiledPlan, got: Tensor, want: Tensor) -> float:
    """The root mean square of the error over that of the result, as a share of what roundings come to.

    One rounding to the output's dtype and, for TF32, what tensor cores cut off a factor; sums may add 16
    roundings of the compute dtype: signs vary, so they grow with the root of the number of terms.
    """
    finite = want.isfinite()
    off = (got.double() - want)[finite].square().mean().sqrt()
    size = want[finite].square().mean().sqrt()
    product = compiled.kernel.centre
    allowed = (
        DTYPES[compiled.plan.output.dtype].epsilon + 16 * DTYPES[compiled.plan.src.compute_dtype].epsilon
    )
    if isinstance(product, Contraction) and product.precision == "tf32":
        allowed += 2.0**-10
    return float(off / (allowed * size)) if size else float(off > 0)
