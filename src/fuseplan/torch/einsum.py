"""`torch.einsum` of two tensors as one product of matrices, which plans and attention's finder know.

Torch's own decomposition puts axes of one element between the products, and attention is not to be seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode


def einsum(equation: str, operands: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The value of `torch.einsum(equation, operands)` by axes in other orders and `torch.matmul`.

    None where this is no product of two tensors: a label that one tensor has twice, an ellipsis, an axis of
    one tensor that is summed alone or stands for several elements of the other's, no axis that is summed.
    """
    labels = _labels(equation, operands)
    if labels is None:
        return None
    (first, second, made), (left, right) = labels, operands
    extents = {**dict(zip(first, left.shape, strict=True)), **dict(zip(second, right.shape, strict=True))}
    batch = [label for label in made if label in first and label in second]
    rows, columns = ([label for label in made if label not in other] for other in (second, first))
    summed = [label for label in first if label in second and label not in made]
    left = _matrices(left, first, (batch, rows, summed))
    right = _matrices(right, second, (batch, summed, columns))
    order = [*batch, *rows, *columns]
    product = torch.matmul(left, right).reshape([extents[label] for label in order])
    return product.permute([order.index(label) for label in made])


def _labels(equation: str, operands: Sequence[torch.Tensor]) -> tuple[str, str, str] | None:
    """The labels of two factors and of their product; None where it is no product of matrices."""
    given, arrow, made = equation.replace(" ", "").partition("->")
    factors = given.split(",")
    if len(factors) != 2 or "." in equation:
        return None
    first, second = factors
    if not arrow:
        made = "".join(sorted(label for label in {*given} - {","} if given.count(label) == 1))
    is_single = all(len({*each}) == len(each) for each in (first, second, made))
    is_ranked = all(each.ndim == len(names) for each, names in zip(operands, factors, strict=True))
    if not is_single or not is_ranked or not {*made} <= {*first, *second}:
        return None
    shared = {*first} & {*second}
    shapes = [
        dict(zip(names, each.shape, strict=True)) for names, each in zip(factors, operands, strict=True)
    ]
    is_equal = all(shapes[0][label] == shapes[1][label] for label in shared)
    has_sum = bool(shared - {*made})
    return (first, second, made) if is_equal and has_sum and {*first} ^ {*second} <= {*made} else None


def _matrices(tensor: torch.Tensor, labels: str, groups: Sequence[Sequence[str]]) -> torch.Tensor:
    """A tensor with its axes in the order of three groups; each of the last two is one axis.

    The innermost axis stays so, and the matrices are transposed: finders look for key and weight as they lie.
    """
    batch, down, across = groups
    if labels and labels[-1] in down:
        return _matrices(tensor, labels, (batch, across, down)).transpose(-1, -2)
    turned = tensor.permute([labels.index(label) for group in groups for label in group])
    begin, middle = len(batch), len(batch) + len(down)
    shape = turned.shape
    return turned.reshape(*shape[:begin], prod(shape[begin:middle]), prod(shape[middle:]))


class Products(TorchFunctionMode):  # type: ignore[misc]
    """Calls of `torch.einsum` are products where they can be."""

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What torch calls in place of a function."""
        if function is torch.functional.einsum and not kwargs:
            return called(*args)
        return function(*args, **(kwargs or {}))


def write_products(given: fx.GraphModule) -> None:
    """Puts products in the place of equations in a graph of Dynamo's."""
    for node in given.graph.find_nodes(op="call_function", target=torch.functional.einsum):
        if isinstance(node.args[0], str) and not node.kwargs:
            node.target = called
    given.recompile()


def called(equation: str, *operands: Any) -> torch.Tensor:
    """As `torch.einsum` is called: with tensors, or with one list of them."""
    listed = operands[0] if len(operands) == 1 and isinstance(operands[0], list | tuple) else operands
    made = einsum(equation, listed)
    return torch.functional.einsum(equation, *listed) if made is None else made
