"""torch's tensors: which of them a kernel may read or write where they lie, and how to tell so quickly.

The module imports torch: `arrays` imports it when it meets the first tensor of torch's.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from fuseplan.errors import ArgumentError, a_thing
from fuseplan.language import dtypes
from fuseplan.language.dtypes import dtype_of
from fuseplan.language.tensor import Dense, TensorSpec
from fuseplan.system.untraced import skip_frames
from fuseplan.tensors.dlpack import View, Wrote

DTYPES = {each.name: getattr(torch, each.package) for each in dtypes.DTYPES.values()}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
CALL_OUTSIDE = "call the plan outside of torch's transforms and traces"
Likeness = Callable[..., bool]


def describe_torch(tensor: Any, what: object) -> View:
    """Address, shape, dtype, strides (elements) and False of a torch tensor, on any device.

    Not by DLPack, which makes the streams of a GPU wait for each other, and drops torch's lazy negation.

    Raises:
        ArgumentError: its elements do not lie in its memory as shape and strides say, or the dtype is none of
            ours.
    """
    try:
        reason = _oddity(tensor)
        if reason is not None:
            raise ArgumentError(what, reason)
        return tensor.data_ptr(), tuple(tensor.shape), NAMES[tensor.dtype], tensor.stride(), False
    except (RuntimeError, ValueError) as error:  # torch exposes no memory of a transform's tensors
        said = (str(error).splitlines() or [""])[0]
        raise ArgumentError(what, f" exposes no memory: {CALL_OUTSIDE}\n  torch says: {said}") from error


def view_torch(tensor: Any, what: object) -> View:
    """The same of a tensor that a kernel is about to read or write.

    Raises:
        ArgumentError: as `describe_torch`; or the tensor has no memory, requires a gradient while torch
            records them, or is given to a function that torch traces.
    """
    found = describe_torch(tensor, what)
    reason = _obstacle(tensor)
    if reason is not None:
        raise ArgumentError(what, reason)
    address, shape, name, strides, _ = found
    end = tensor.storage_offset() + 1
    end += sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
    held = tensor.untyped_storage().nbytes()
    if 0 not in shape and end * dtype_of(name).itemsize > held:
        raise ArgumentError(what, f" reaches beyond its storage of {held} bytes: was it resized?")
    if 0 not in shape and not address:
        raise ArgumentError(what, f" has no memory, its address is null: {CALL_OUTSIDE}")
    return found


def _oddity(tensor: Any) -> str | None:
    """Why the elements of a tensor are not in its memory as shape and strides say; None where they are."""
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return (
            f" is {a_thing(tensor)}, which has no memory of its own: pass a plain tensor, or {CALL_OUTSIDE}"
        )
    if tensor.is_nested:
        return " is a nested tensor: pass torch.nested.to_padded_tensor(tensor, padding)"
    if tensor.layout is not torch.strided:
        return f" has layout {tensor.layout}; want a dense tensor: pass tensor.to_dense()"
    if tensor.is_quantized:
        return " is quantized: pass tensor.dequantize()"
    if tensor.dtype not in NAMES:
        return f" has dtype {tensor.dtype}; want {', '.join(dtypes.STORED)}: convert it with .to(...)"
    if tensor.is_neg():
        return " is a view that negates its storage: pass tensor.resolve_neg()"
    return None


def _obstacle(tensor: Any) -> str | None:
    """Why a kernel must not be given the tensor now: a derivative or a trace would miss the kernel."""
    if tensor.requires_grad and torch.is_grad_enabled():
        return (
            " requires a gradient, which a kernel does not record: call under torch.no_grad() or "
            "torch.inference_mode(), or pass tensor.detach()"
        )
    if forward_ad.unpack_dual(tensor).tangent is not None:
        return (
            " carries a tangent of forward-mode differentiation, which a kernel does not compute: pass "
            "torch.autograd.forward_ad.unpack_dual(tensor).primal"
        )
    if _is_tracing():
        return (
            " is traced, and a trace cannot record a kernel: torch.jit.trace and make_fx would keep this "
            "call's result as a constant; call the plan outside of the traced function"
        )
    return None


def _is_tracing() -> bool:
    """Whether torch records what is called into a graph that it replays without Python."""
    proxies = sys.modules.get("torch.fx.experimental.proxy_tensor")
    return bool(torch.jit.is_tracing()) or (proxies is not None and proxies.get_proxy_mode() is not None)


def torch_maker(spec: TensorSpec | Dense, device: torch.device) -> Callable[[Any], tuple[Any, int]]:
    """Makes new tensors of the spec on a device, whatever it is given, and says where each begins.

    The function that it gives raises an ArgumentError where torch's modes make tensors without memory.
    """
    dtype, shape, strides = DTYPES[spec.dtype], spec.shape, spec.element_strides
    # The device is named: `with torch.device("meta")` decides of tensors that name none.
    make = functools.partial(torch.empty_strided, shape, strides, dtype=dtype, device=device)
    inner, on_gpu = _empty(device.type), device.type == "cuda"
    index, (stacked, _), transformed = device.index, _modes(), torch._C._functorch.peek_interpreter_stack

    def made(_: Any) -> tuple[Any, int]:
        is_plain = inner and not stacked() and transformed() is None
        is_plain = is_plain and not (on_gpu and torch._C._cuda_getDevice() != index)
        tensor = inner(shape, strides, dtype) if inner and is_plain else make()
        try:
            address = tensor.data_ptr() if type(tensor) is torch.Tensor else 0
        except RuntimeError:
            address = 0
        if not address:
            raise ArgumentError(f"torch gives no memory for the output here: {CALL_OUTSIDE}")
        return tensor, address

    return made


@functools.cache
def _empty(kind: str) -> Callable[..., Any] | None:
    """The function by which torch's compiled code makes tensors, outside of modes, on the current GPU.

    It takes 1.8 us on a GPU, and the public one 3.4; on a CPU 1.1 and 3.1.
    """
    made: Callable[..., Any] | None = getattr(torch._C._dynamo.guards, f"_empty_strided_{kind}", None)
    return made


def count_write(tensor: Any) -> None:
    """Raises the version counter of a torch tensor that a kernel wrote, so that autograd notices.

    Tensors of inference mode have none.
    """
    if not tensor.is_inference():
        _counting()([tensor])


@functools.cache
def _counting() -> Wrote:
    """Torch's function that raises version counters: the inner one, 0.2 us a call, where it takes a list.

    The public one takes 0.4 us.
    """
    probe = torch.zeros(1, device="cpu")
    try:
        inner: Wrote = torch._C._increment_version
        inner([probe])
        return inner
    except (AttributeError, TypeError, RuntimeError):
        public: Wrote = torch.autograd.graph.increment_version
        return public


def _never(*_: Any) -> bool:
    return False


def _guards(*tensors: Any) -> Likeness:
    """Torch's own check, in one call, that tensors are like these: how its compiled code knows its inputs.

    It compares type, dispatch keys (device, layout, negation, transforms and traces), dtype, device, shape,
    strides, and whether a gradient is required. A nested tensor aborts the process there: it is told before.
    """
    guards = torch._C._dynamo.guards.TensorGuards
    check: Likeness = guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return check


@functools.cache
def _has_guards() -> bool:
    """Whether this torch has that check, and it tells apart what must be: it is no public interface.

    A thread of its own has none of torch's modes: inside of torch's dispatcher, the check overlooks negation.
    """
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_tells_apart).result()


def _tells_apart() -> bool:
    make = functools.partial(torch.zeros, device="cpu")
    try:
        with torch.inference_mode(False), torch.no_grad():  # where older ones overlook `requires_grad`
            plain, other = make(2, 3), make(4)
            unlike = (
                torch.nn.Parameter(plain, requires_grad=False),
                plain.double(),
                make(3, 3),
                make(3, 2).t(),
                make(2, 3, requires_grad=True),
                torch._neg_view(plain),
                plain.to_sparse(),
                plain.to("meta"),
                1.0,
            )
            check = _guards(plain, other)
            passed = [each for each in unlike if check(each, other) or check(plain, each)]
            return not passed and check(make(2, 3), make(4))
    except (ImportError, AttributeError, TypeError, RuntimeError, ValueError):
        return False


def likeness(*tensors: Any) -> Likeness:
    """A quick check that others are like these; it never passes where torch has none.

    Nor does it for a tensor that requires a gradient: the check would pass it with gradients enabled.
    """
    is_told = _has_guards() and not any(tensor.requires_grad for tensor in tensors)
    return _guards(*tensors) if is_told else _never


def alike(*tensors: Any) -> Likeness:
    """The same, also for tensors that require gradients: the caller sees to it that none is recorded."""
    return _guards(*tensors) if tensors and _has_guards() else _never


class _Modes(NamedTuple):
    """What torch's check does not see: dispatch modes that are on, and forward-mode differentiation."""

    stacked: Callable[[], int]
    forward: Any  # has `_current_level`: -1 while no level is open


@functools.cache
def _modes() -> _Modes:
    """Where torch keeps its modes; where it does not say, one is on, and each call is checked anew."""
    skip_frames()
    stacked = getattr(torch._C, "_len_torch_dispatch_stack", None)
    if stacked is None or not hasattr(forward_ad, "_current_level"):
        return _Modes(lambda: 1, SimpleNamespace(_current_level=-1))
    return _Modes(stacked, forward_ad)


class TorchForm:
    """What a torch tensor that was accepted looks like; `unaligned` are bits that no address may have."""

    __slots__ = ("_forward", "_is_like", "_lies", "_stacked", "device", "kind", "unaligned")

    def __init__(self, tensor: Any, unaligned: int = 0) -> None:
        self.kind, self.device, self.unaligned = type(tensor), tensor.device, unaligned
        self._lies = describe_torch(tensor, "")[1:]
        self._is_like = likeness(tensor)
        self._stacked, self._forward = _modes()

    def address(self, tensor: Any, writes: bool = False, /) -> int:
        """Where the tensor begins; 0 if it looks different, or is one that `view_torch` refuses."""
        if type(tensor) is not self.kind:
            return 0
        is_moded = self._stacked() or self._forward._current_level >= 0
        if is_moded or tensor.is_nested or tensor.is_neg() or not self._is_like(tensor):
            if not self.fits(tensor):
                return 0
            self._is_like = likeness(tensor)  # modes of torch, such as inference, are part of the check
        address: int = tensor.data_ptr()
        return 0 if address & self.unaligned else address

    def fits(self, tensor: Any) -> bool:
        """Whether the tensor is taken, and lies as the first did: every check anew."""
        if type(tensor) is not self.kind or tensor.device != self.device:
            return False
        try:
            return view_torch(tensor, "")[1:] == self._lies
        except ArgumentError:
            return False


def torch_form(tensor: Any, unaligned: int = 0) -> TorchForm | None:
    """The form of an accepted tensor; None for subclasses, which are checked anew each time."""
    return TorchForm(tensor, unaligned) if type(tensor) is torch.Tensor else None


def torch_pair(
    src: Any, out: Any, unaligned: int = 0
) -> Callable[[Any, Any], tuple[int, int, Wrote | None]] | None:
    """What `src` and `out` that were accepted look like: a function, whose lookups are done before.

    It gives the addresses of two that look the same, else 0, and what raises out's version counter.
    """
    first, second = torch_form(src, unaligned), torch_form(out, unaligned)
    if first is None or second is None:
        return None
    known, kind = (likeness(src, out), _wrote(out)), type(src)
    stacked, forward = _modes()

    def addresses(src: Any, out: Any, /) -> tuple[int, int, Wrote | None]:
        nonlocal known
        are_like, wrote = known
        if type(src) is not kind or type(out) is not kind:
            return 0, 0, None
        is_moded = stacked() or forward._current_level >= 0
        is_odd = src.is_nested or out.is_nested or src.is_neg() or out.is_neg()
        if is_moded or is_odd or not are_like(src, out):
            if not (first.fits(src) and second.fits(out)):
                return 0, 0, None
            known = are_like, wrote = likeness(src, out), _wrote(out)
        begin, target = src.data_ptr(), out.data_ptr()
        return (0, 0, None) if (begin | target) & unaligned else (begin, target, wrote)

    return addresses


def _wrote(out: Any) -> Wrote | None:
    """What counts a write to tensors like this one; tensors of inference mode count none."""
    return None if out.is_inference() else _counting()
