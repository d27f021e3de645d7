"""Runs a template's source in Triton's interpreter, on NumPy arrays: the proof of plain Triton without a GPU.

    assert_interpreted("f16[2x19x9x11, nhwc] -> bias -> relu", Pointwise)
    dst = interpret(template, kernel, target, random_arrays(plan, 1))

Each test process has one interpreting process of its own. `dst` is NaN before the kernel runs, memory
outside of the arguments cannot be touched, what is only read cannot be written, and the workspace's counters
have to be left zero; behind them it is NaN.
Gluon is not interpretable: its templates are proven by their plain twins, by compiling, and on a GPU.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import os
import pickle
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from fuseplan.backends.triton.template import GpuTemplate
from fuseplan.backends.triton.toolchain import types_of
from fuseplan.kernels.contracted import KernelTensor
from fuseplan.kernels.emit import COUNTER_BYTES, Slot, Source
from fuseplan.kernels.kernel import Kernel, Output
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import match
from fuseplan.kernels.representative import numbered
from fuseplan.kernels.target import Target, parse_target
from fuseplan.language.dtypes import DTYPES, dtype_of, narrow
from fuseplan.language.tensor import Dense, TensorSpec
from fuseplan.measure.data import evaluated, random_arrays
from fuseplan.measure.spaces import exact as wide
from fuseplan.messages.reasons import first_refusal
from fuseplan.plans.plan import FusionPlan
from fuseplan.settings import environment

Array = NDArray[Any]
WRITTEN = ("dst", "result", "workspace")
SERVER = Path(__file__).with_name("triton_server.py")
ANSWERS = 64  # the last ones, which are kept
SOURCES = Path(__file__).resolve().parent.parent / "src"


_folder: list[Path | None] = [None]  # of another Triton than the installed one
_answers: dict[bytes, dict[Any, Any]] = {}


@contextmanager
def under(folder: Path) -> Iterator[None]:
    """Meanwhile the Triton in a folder of `pip install --target` interprets."""
    _folder[0] = folder
    try:
        yield
    finally:
        _folder[0] = None


@functools.cache
def _server(folder: Path | None) -> subprocess.Popen[bytes]:
    """The interpreting process of this one, by the Triton it has."""
    paths = [SOURCES] if folder is None else [SOURCES, folder]
    variables = environment(TRITON_INTERPRET="1", PYTHONPATH=os.pathsep.join(map(str, paths)))
    started = subprocess.Popen(
        [sys.executable, str(SERVER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=variables
    )
    atexit.register(_stop, started)
    return started


def _stop(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    process.wait()
    process.stdout.close()


def ask(request: dict[str, Any]) -> dict[Any, Any]:
    """What the interpreting process answers: arrays that were written by their place, or an `error`.

    Candidates that differ in warps alone are the same text but for its comments, and have one answer.
    """
    code = [line for line in request["text"].splitlines() if not line.startswith("#")]
    folder = _folder[0]
    key = hashlib.sha256(pickle.dumps([folder, request | {"text": code}])).digest()
    if request["cooperative"]:  # its programs may meet in another order
        return _answer(folder, pickle.dumps(request))
    if key not in _answers:
        _answers[key] = _answer(folder, pickle.dumps(request))
        for oldest in [*_answers][:-ANSWERS]:
            del _answers[oldest]
    return _answers[key]


def _answer(folder: Path | None, data: bytes) -> dict[Any, Any]:
    process = _server(folder)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(struct.pack("<Q", len(data)) + data)
    process.stdin.flush()
    head = process.stdout.read(8)
    if len(head) < 8:
        _server.cache_clear()
        raise AssertionError(f"the interpreting process died, status {process.wait()}")
    reply: dict[Any, Any] = pickle.loads(process.stdout.read(struct.unpack("<Q", head)[0]))
    return reply


def _workspace(nbytes: int) -> Array:
    """Counters, zero, and behind them what other plans left there: NaN, as f32 and as f64."""
    words = np.full(-(-nbytes // 4), 0x7FF80000, np.int32)
    words[: COUNTER_BYTES // 4] = 0
    return words


def _filled(size: int, dtype: str, value: float) -> Array:
    return narrow(np.full(size, value), dtype)


def storage(spec: TensorSpec, values: Array) -> Array:
    """The elements as they lie in memory, one after another; what lies between them is NaN."""
    flat = _filled(spec.span, spec.dtype, np.nan)
    _seen(spec, flat)[...] = narrow(wide(values, spec.dtype), spec.dtype)
    return flat


def _seen(spec: TensorSpec | Dense, flat: Array) -> Array:
    steps = tuple(step * flat.itemsize for step in spec.element_strides)
    return as_strided(flat, spec.shape, steps)


def _lying(kernel: Kernel, made: Output) -> TensorSpec | Dense:
    """How an output besides dst lies."""
    if made.strides:
        return KernelTensor(made.shape, made.dtype, strides=made.strides)
    if made.after is None:
        return Dense(made.shape, made.dtype)
    return TensorSpec(kernel.dst.shape, made.dtype, strides=kernel.dst.element_strides)


class _Call:
    """The values of one launch, slot by slot; slots of the same tensor share its memory."""

    def __init__(
        self,
        template: GpuTemplate,
        kernel: Kernel,
        target: Target,
        source: Source,
        arrays: Mapping[str, Array],
        parameters: Mapping[str, float],
        extent: int = 0,
    ) -> None:
        self.extent = extent
        self.template, self.kernel, self.target = template, kernel, target
        self.source, self.arrays, self.parameters = source, arrays, parameters
        self.memory: dict[tuple[str, str], Array] = {}

    def value(self, slot: Slot) -> Any:
        """An array, an array and its tensor map, or a number."""
        if slot.kind == "parameter":
            return float(self.parameters[slot.key])
        if slot.kind == "extent":
            return self.extent
        place = (slot.kind, slot.key)
        if place not in self.memory:
            self.memory[place] = self._made(slot)
        held = self.memory[place]
        return held if slot.map is None else (held, asdict(slot.map))

    def _made(self, slot: Slot) -> Array:
        kernel = self.kernel
        if slot.kind == "src" and kernel.lookup:
            return self.arrays["src"]
        if slot.kind == "src":
            return storage(kernel.src, self.arrays["src"])
        if slot.kind == "dst":
            return _filled(kernel.dst.span, kernel.dst.dtype, np.nan)
        if slot.kind == "workspace":
            return _workspace(self.source.workspace_bytes)
        if slot.kind == "result":
            return self._result(slot.key)
        if slot.kind == "parameters":
            listed = [float(self.parameters[key]) for key in kernel.parameters]
            return np.array(listed, dtype_of(kernel.compute_dtype).array)
        return self._operand(slot.key)

    def _result(self, key: str) -> Array:
        """The old value of what is updated, else NaN."""
        made = next(each for each in self.kernel.outputs if each.key == key)
        if made.updated:
            return np.array(self.arrays[key], dtype_of(made.dtype).array).reshape(-1)
        return _filled(_lying(self.kernel, made).span, made.dtype, np.nan)

    def _operand(self, key: str) -> Array:
        operand = self.kernel.operand(key)
        if operand.strides and not operand.packed:
            placed = KernelTensor(operand.shape, operand.dtype, strides=operand.strides)
            return storage(placed, self.arrays[key].reshape(operand.shape))
        if operand.role == "table":
            return np.array(self.arrays[key]).reshape(-1)
        if not operand.packed:
            spec = self.kernel.shape_of(operand)
            lying = TensorSpec(spec.shape, operand.dtype, strides=spec.element_strides)
            return storage(lying, self.arrays[key])
        wanted = self.template.packing(self.kernel, self.target, operand)
        wanted = wanted.behind(operand.given) if operand.given else wanted
        packed = wanted.of(wide(self.arrays[key], operand.dtype))
        assert packed.shape == wanted.extents
        return narrow(packed.astype(np.float64), wanted.dtype).reshape(-1)


def interpret(
    template: GpuTemplate,
    kernel: Kernel,
    target: Target,
    arrays: Mapping[str, Array],
    parameters: Mapping[str, float] | None = None,
) -> Array:
    """What the template's kernel writes to dst, as it is stored (bf16 as uint16), in logical order.

    Args:
        template: an instance whose source is plain Triton.
        kernel: what it computes.
        target: what it is emitted for.
        arrays: `src` and the operands by key, logical shapes, as `random_arrays` gives them.
        parameters: values by key; needed for every parameter of the kernel.
    """
    return interpret_all(template, kernel, target, arrays, parameters)[0]


def interpret_all(
    template: GpuTemplate,
    kernel: Kernel,
    target: Target,
    arrays: Mapping[str, Array],
    parameters: Mapping[str, float] | None = None,
    extent: int = 0,
) -> tuple[Array, dict[str, Array]]:
    """As `interpret`, and the results by key; `arrays` hold the old values of those that are updated.

    Of a kernel with an open axis, they have `extent` elements along it.
    """
    source = template.emit(kernel, target)
    if extent:
        source, kernel = source.at(extent), kernel.with_extent(extent)
    assert source.language == "triton", f"{template.text} is {source.language}, which cannot be interpreted"
    call = _Call(template, kernel, target, source, arrays, parameters or {}, extent)
    values = [call.value(slot) for slot in source.slots]
    reply = ask(
        {
            "text": source.text,
            "entry": source.entry,
            "types": list(types_of(source, kernel, template, target)),
            "values": values,
            "grid": list(source.grid),
            "writes": [place for place, slot in enumerate(source.slots) if slot.kind in WRITTEN],
            "cooperative": bool(dict(source.options).get("cooperative")),
        }
    )
    if "error" in reply:
        raise AssertionError(f"{template.text} fails in the interpreter\n{source.text}\n{reply['error']}")
    written = {source.slots[place]: array for place, array in reply.items()}
    if Slot("workspace") in written:
        assert not written[Slot("workspace")][: COUNTER_BYTES // 4].any(), "the counters were not left zero"
    results = {
        each.key: np.array(_seen(_lying(kernel, each), written[Slot("result", each.key)]))
        for each in kernel.outputs
    }
    dst = next(array for slot, array in written.items() if slot.kind == "dst")
    return np.array(_seen(kernel.dst, dst)), results


def in_kernel_order(plan: FusionPlan, kernel: Kernel, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """The plan's arrays with their axes as the kernel has them; indices of rows as they are."""
    if kernel.lookup and arrays["src"].shape == plan.src.shape:
        rows = {**arrays, "src": np.empty(plan[0].dst.shape)}
        return in_kernel_order(plan, kernel, rows) | {"src": storage(plan.src, arrays["src"])}
    if any(step.op.is_gradient for step in plan):  # (groups, images, channels of a group, *spatial)
        images = kernel.src.shape[1]
        spatial = () if any(step.op.reads == "rows" for step in plan) else plan.src.spatial
        src = arrays["src"].reshape(images, *kernel.src.shape[:3:2], *spatial)
        read = tuple(map(slice, kernel.src.shape))  # what lies behind the last window is not
        return {**arrays, "src": src.swapaxes(0, 1)[read]}
    orders = {operand.key: operand.order for operand in kernel.operands if operand.order}
    orders["src"] = _axes(plan[0].dst if kernel.lookup else plan.src, kernel)
    if kernel.has_cells:  # tensors behind the statistics may have fewer axes than src
        ordered = {**arrays, "src": arrays["src"].transpose(orders["src"]).reshape(kernel.src.shape)}
        for each in (each for each in kernel.operands if each.order):  # an axis may be in runs there
            extents = [each.shape[each.order.index(axis)] for axis in range(len(each.order))]
            ordered[each.key] = arrays[each.key].reshape(extents).transpose(each.order)
        return ordered
    shapes = {
        operand.key: kernel.dst.shape
        for operand in kernel.operands
        if operand.role != "table" and not operand.packed
    }
    shapes["src"] = kernel.src.shape  # and dst
    if any(step.op.reads == "rows" and step.op.kind == "normalization" for step in plan):
        return {key: array.reshape(shapes.get(key, array.shape)) for key, array in arrays.items()}
    return {key: array.transpose(orders[key]) if key in orders else array for key, array in arrays.items()}


def _axes(src: TensorSpec, kernel: Kernel) -> tuple[int, ...]:
    """The axes of src in the kernel's order; an axis in runs stays where it is."""
    return src.canonical_order if kernel.src.rank == src.rank else tuple(range(src.rank))


def _over(plan: FusionPlan, kernel: Kernel, key: str, value: Array) -> Array:
    """An output of a plan with statistics over any axes, its axes in the order of src's in the kernel."""
    step = next((step for step in plan if step.op.attributes().get("key") == key), plan[-1])
    centre = next(each for each in plan if each.op.kind == "normalization")
    removed = centre.op.removes(centre.src) if step.index >= centre.index else ()
    kept = [axis for axis in range(centre.src.rank) if axis not in removed]
    return value.transpose([kept.index(axis) for axis in _axes(centre.src, kernel) if axis in kept])


def assert_interpreted(
    plan: FusionPlan | str,
    template: GpuTemplate | type[GpuTemplate],
    target: Target | str = "triton:sm_90",
    *,
    seed: int = 1,
    slack: float = 8.0,
    extent: int = 0,
) -> None:
    """Within `slack` roundings of the compute type, and one of the storage, of the largest of each tensor.

    Given a class, its first candidate is taken; a refusal fails the test. `extent` is that of the
    open axes, as one.
    """
    plan = FusionPlan.parse(plan) if isinstance(plan, str) else plan
    kernel, known = lower(match(plan)), parse_target(target)
    if isinstance(template, type):
        refusal = first_refusal(template.claims(kernel, known, "default"))
        assert refusal is None, f"{template.name} refuses {plan}: {refusal}"
        chosen = next(iter(template.candidates(kernel, known, "default")))
        assert isinstance(chosen, GpuTemplate)
        template = chosen
    planned = kernel
    if extent:
        plan, kernel = numbered(plan, extent), kernel.with_extent(extent)
    arrays = random_arrays(plan, seed)
    parameters = {each.key: each.value for each in plan.parameters}
    with np.errstate(all="ignore"):
        out, saved = evaluated(plan, arrays)
    ordered = in_kernel_order(plan, kernel, arrays)
    got, results = interpret_all(template, planned, known, ordered, parameters, extent)
    dtypes = {"dst": kernel.dst.dtype} | {each.key: each.dtype for each in kernel.outputs}
    epsilon = DTYPES[kernel.compute_dtype].epsilon * slack
    whole = {"dst": out} | {each.key: saved.pop(each.key) for each in kernel.saved.values()}
    lying = {"dst": kernel.dst.shape} | {each.key: each.shape for each in kernel.saved.values()}
    for key, value in whole.items():
        if kernel.has_cells:
            saved[key] = _over(plan, kernel, key, value).reshape(lying[key])
        elif any(step.op.is_gradient for step in plan):  # dense, as the plan has it
            saved[key] = value.reshape(lying[key])
        else:
            saved[key] = in_kernel_order(plan, kernel, {"src": value})["src"].reshape(kernel.dst.shape)
    results["dst"] = got
    if kernel.has_cells:  # whose results have extent 1 along reduced axes
        made = (*kernel.results, *kernel.sums)
        results |= {each.key: results[each.key].reshape(saved[each.key].shape) for each in made}
    for key, want in saved.items():
        row = DTYPES[dtypes[key]]
        rounding = row.epsilon if row.is_float and row.name != kernel.compute_dtype else 0.0
        largest = np.abs(want[np.isfinite(want)]).max(initial=0.0)
        bound = (epsilon + rounding / 8) * largest
        told = f"{key} of {plan}\n{template.text}"
        made = wide(results[key], row.name)
        np.testing.assert_allclose(made, want, rtol=rounding, atol=bound, err_msg=told)
