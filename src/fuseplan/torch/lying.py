"""How tensors lie in a graph with plans, and the functions that such a graph calls besides plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fuseplan.kernels.packing import Packing
from fuseplan.language.layouts import dense, same_strides
from fuseplan.language.tensor import Dense, TensorSpec
from fuseplan.tensors.torch_tensors import DTYPES

aten = torch.ops.aten
Mark = tuple[int, int, torch.Size, tuple[int, ...]]
Reading = Callable[[torch.Tensor], torch.Tensor]  # the tensor, or a copy that a kernel can read
ALIGNMENT = 16  # bytes; kernels for GPUs take no tensor that begins elsewhere
LINE = 64  # bytes; those for CPUs take no packed operand that begins elsewhere
ORDER = "fuseplan.order"  # in a node's meta: how a plan's result has its axes in memory; () with gaps


def added(graph: fx.Graph, target: Any, *args: Any) -> fx.Node:
    """A node with its value's description, of arguments among which are nodes that have one."""
    made = graph.call_function(target, args)
    values = fx.map_arg(args, lambda each: each.meta["val"])
    with next(iter(made.all_input_nodes)).meta["val"].fake_mode:
        made.meta["val"] = target(*values)
    return made


def by_stride(strides: Sequence[int]) -> list[int]:
    """The axes, that of the largest stride first."""
    return sorted(range(len(strides)), key=lambda axis: (-int(strides[axis]), axis))


def is_dense(tensor: torch.Tensor, order: Sequence[int]) -> bool:
    """Whether the elements lie without gaps, their axes in an order, outermost first."""
    return same_strides(tensor.shape, tensor.stride(), dense(tensor.shape, order))


def order_of(tensor: torch.Tensor) -> list[int]:
    """The axes of a tensor, that of the largest stride first."""
    return by_stride(tensor.stride())


def tells_views(node: fx.Node) -> bool:
    """Whether an operator's results share memory with what it reads: torch tells, but for `unsafe_split`."""
    is_op, is_split = isinstance(node.target, torch._ops.OpOverload), "unsafe_split" in str(node.target)
    return is_op and (is_split or any(each.alias_info is not None for each in node.target._schema.returns))


def known_order(node: fx.Node) -> list[int]:
    """The axes in memory of a plan's result, or of it with its axes permuted; none of other values."""
    if node.target is aten.permute.default:
        moved, axes = node.args
    elif node.target is aten.transpose.int:
        moved, *pair = node.args
        axes = [*range(node.meta["val"].ndim)]
        axes[pair[0]], axes[pair[1]] = axes[pair[1]], axes[pair[0]]
    else:
        return [*node.meta.get(ORDER, ())]
    places = [each % len(axes) for each in axes]
    return [places.index(each) for each in known_order(moved)]


def is_in_order(shape: Sequence[int], one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two orders of axes are the same, but for those with one element, or none."""
    few = [axis for axis, extent in enumerate(shape) if isinstance(extent, int) and extent < 2]  # open: more
    first, second = ([each for each in order if each not in few] for order in (one, other))
    return first == second


def is_copied(node: fx.Node) -> bool:
    """Whether `laid_out` copies the tensor that it is given: it lies in another order."""
    value, order, *_ = node.args
    assert isinstance(value, fx.Node)  # by the writer
    tensor = value.meta["val"]
    return not is_in_order(tensor.shape, value.meta.get(ORDER, order_of(tensor)), order)


def drop_copies(graph: fx.Graph) -> None:
    """Takes out torch's copies in order of results of plans that lie so: heads behind attention."""
    output = next(iter(reversed(graph.nodes)))
    for node in graph.find_nodes(op="call_function", target=aten.clone.default):
        value, kind = node.args[0], node.kwargs.get("memory_format")
        shape, order = value.meta["val"].shape, known_order(value)
        is_lain = len(order) == len(shape) > 0 and is_in_order(shape, order, range(len(shape)))
        if is_lain and kind is torch.contiguous_format and output not in node.users:
            node.replace_all_uses_with(value)
            graph.erase_node(node)


def ask_for_less(graph: fx.Graph) -> None:
    """Torch computes those gradients of convolutions alone that are read."""
    for node in graph.find_nodes(op="call_function", target=aten.convolution_backward.default):
        read, (*given, mask) = {user.args[1] for user in node.users}, node.args
        node.args = (*given, [is_asked and place in read for place, is_asked in enumerate(mask)])


def mark_of(tensor: torch.Tensor) -> Mark:
    """Its storage, its address, and how it lies there.

    While a weak reference to the storage is kept, no other has its number.
    """
    return tensor.untyped_storage()._cdata, tensor.data_ptr(), tensor.shape, tensor.stride()


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy that a kernel can read where it lies."""
    plain = tensor.detach() if tensor.requires_grad or type(tensor) is not torch.Tensor else tensor
    if plain.is_neg() or (plain.is_cuda and plain.data_ptr() % ALIGNMENT):
        return plain.clone()
    return plain


def packable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy without gaps, as most kernels read operands along axes: torch copies fast.

    Those of a CPU read whole lines.
    """
    made = aligned(tensor).contiguous()
    return made.clone() if made.is_cpu and made.data_ptr() % LINE else made


def in_room(tensor: torch.Tensor, packing: Packing | None) -> Reading | None:
    """What copies tensors like this one to where zeros follow, as a CPU's kernel may read them; else None.

    It takes 2 us of the host. A call that packs it takes 100.
    """
    is_like = packing and tensor.is_cpu and tensor.dtype == DTYPES[packing.dtype]
    if not packing or not is_like or not packing.padded:
        return None
    with torch.inference_mode(False):
        room = torch.zeros(packing.padded, dtype=tensor.dtype)
    inside = room[: tensor.numel()].view(tensor.shape)

    def copied(given: torch.Tensor) -> torch.Tensor:
        inside.copy_(given)
        return room

    return copied


def copier(copy: torch.Tensor, reading: Reading) -> Reading:
    """What copies tensors like one that was copied; on a CPU into memory of its own: 2.5 us in place of 7."""
    if not copy.is_cpu:
        return reading
    with torch.inference_mode(False):
        made: Reading = torch.empty_strided(copy.shape, copy.stride(), dtype=copy.dtype).copy_
    return made


def content(tensor: torch.Tensor) -> bytes:
    """The elements of a tensor of the CPU."""
    made: bytes = tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
    return made


def laid(tensor: torch.Tensor, spec: TensorSpec | Dense) -> torch.Tensor:
    """The tensor, or a copy whose elements lie as the kernel reads them."""
    plain, strides = aligned(tensor), spec.element_strides
    lying = plain.stride()
    if plain.shape != spec.shape or lying == strides or same_strides(spec.shape, lying, strides):
        return plain
    return torch.empty_strided(spec.shape, strides, dtype=plain.dtype, device=plain.device).copy_(plain)


def laid_out(tensor: torch.Tensor, order: tuple[int, ...], has_gaps: bool = False) -> torch.Tensor:
    """The tensor with its axes in memory in an order, outermost first: itself where it lies so.

    Args:
        tensor: the tensor.
        order: its axes.
        has_gaps: a tensor in the order of its axes that is not dense will do.
    """
    if order == tuple(range(len(order))):
        steps = [step for step, extent in zip(tensor.stride(), tensor.shape, strict=True) if extent > 1]
        is_taken = has_gaps and steps == sorted(steps, reverse=True)
        return tensor if is_taken else tensor.contiguous()  # no view, which FSDP warns of
    back = sorted(range(len(order)), key=order.__getitem__)
    return tensor.permute(order).contiguous().permute(back)


def joined(tensors: list[torch.Tensor], axis: int, order: tuple[int, ...]) -> torch.Tensor:
    """The tensors one behind the other along an axis, in a tensor with its axes in memory in an order."""
    return laid_out(torch.cat(tensors, axis), order)


def beside(tensors: list[torch.Tensor], axis: int) -> torch.Tensor:
    """The tensor that others make which lie one behind the other along an axis; else a copy of them.

    So it is where torch records gradients: those of the others would be lost.
    """
    head = tensors[0]
    ends = [each.storage_offset() + each.shape[axis] * each.stride(axis) for each in tensors]
    begins, storages = (
        [each.storage_offset() for each in tensors],
        [each.untyped_storage() for each in tensors],
    )
    is_one = len({each._cdata for each in storages}) == len({each.stride() for each in tensors}) == 1
    if torch.is_grad_enabled() or not is_one or begins[1:] != ends[:-1]:
        return torch.cat(tensors, axis)
    shape = [*head.shape]
    shape[axis] = sum(each.shape[axis] for each in tensors)
    return head.as_strided(shape, head.stride())


def first(made: list[torch.Tensor]) -> torch.Tensor:
    """The output of a plan."""
    return made[0]
