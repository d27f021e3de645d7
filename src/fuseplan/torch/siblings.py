"""Products of a backward pass that are one: the gradients of an input that several linear layers read.

before: dx = da @ a + db @ b + dc @ c, with da.T @ x, db.T @ x and dc.T @ x
after:  d = [da db dc], dx = d @ [a b c], and d.T @ x, whose rows are the three
saves:  the sums' reading and writing, and the short tiles of narrow layers
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import fx

from fuseplan.torch.lying import added

aten = torch.ops.aten
VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
LYING = (*VIEWS, aten.transpose.int, aten.permute.default, aten.clone.default)
ALIGNMENT = 16  # bytes that the gradient of each weight begins on a multiple of


class _Product(NamedTuple):
    """A term of a sum: `grad @ weight`, and the gradient of the weight if it is `grad.T @ src`."""

    node: fx.Node
    grad: fx.Node
    weight: fx.Node
    of_weight: fx.Node | None
    src: fx.Node | None


def join_siblings(given: fx.GraphModule) -> None:
    """Joins such products in a graph of ATen operators, where fewer bytes are moved.

    Kernels write the gradients of layers into the joined value: those that operators of other libraries make
    are copied, and so are the weights.
    """
    joined: set[fx.Node] = set()
    for node in reversed(list(given.graph.nodes)):
        sums: set[fx.Node] = set()
        terms = [] if node in joined or node.target is not aten.add.Tensor else _terms(node, node, sums)
        products = [_product(each) for each in terms]
        if len(products) > 1 and _is_shorter(products):
            _join(given.graph, node, products)
            joined |= sums
    if joined:
        given.graph.eliminate_dead_code()
        given.recompile()


def multiply_by_rows(given: fx.GraphModule) -> None:
    """Writes the gradients of one-tap convolutions' weights on a CPU as products: da.T @ x of all positions.

    On a Zen 3 core they take 0.2 to 1.0 of the time of torch's gradients of convolutions.
    """
    for node in given.graph.find_nodes(op="call_function", target=aten.convolution_backward.default):
        grad, src, weight, _, stride, padding, _, is_transposed, _, groups, _ = node.args
        is_plain = {*weight.meta["val"].shape[2:]} == {1} and {*padding} == {0} and groups == 1
        is_taken = is_plain and not is_transposed and src.meta["val"].is_cpu
        for part in [each for each in node.users if is_taken and each.args[1] == 1]:
            with given.graph.inserting_before(part):
                made = _of_rows(given.graph, grad, src, stride)
                part.replace_all_uses_with(
                    added(given.graph, aten.view.default, made, [*part.meta["val"].shape])
                )
            given.graph.erase_node(part)


def _of_rows(graph: fx.Graph, grad: fx.Node, src: fx.Node, stride: Sequence[int]) -> fx.Node:
    """The product of gradients and src over all positions."""
    for axis, step in enumerate(stride * (src.meta["val"].ndim - 2) if len(stride) == 1 else stride, 2):
        if step > 1:
            src = added(graph, aten.slice.Tensor, src, axis, 0, src.meta["val"].shape[axis], step)
    rows = []
    for each in (grad, src):
        turned = added(graph, aten.permute.default, each, [0, *range(2, each.meta["val"].ndim), 1])
        rows.append(added(graph, aten.reshape.default, turned, [-1, each.meta["val"].shape[1]]))
    return added(graph, aten.mm.default, added(graph, aten.t.default, rows[0]), rows[1])


def _terms(node: fx.Node, root: fx.Node, sums: set[fx.Node]) -> list[fx.Node]:
    """The products whose sum a value is; none where a term is something else, or another one reads it."""
    if node.target is aten.add.Tensor and (node is root or len(node.users) == 1):
        sums.add(node)
        if node.kwargs or any(
            not isinstance(each, fx.Node) or not _is_like(each, root) for each in node.args
        ):
            return []
        first, second = (_terms(each, root, sums) for each in node.args)
        return first + second if first and second else []
    while node.target in VIEWS and len(node.users) == 1:
        node = node.args[0]
    return [node] if node.target is aten.mm.default and len(node.users) == 1 else []


def _is_like(node: fx.Node, other: fx.Node) -> bool:
    one, two = node.meta["val"], other.meta["val"]
    return one.dtype == two.dtype and all(type(each) is int for each in one.shape) and one.shape == two.shape


def _product(node: fx.Node) -> _Product:
    grad, weight = node.args
    turned = (user for user in grad.users if user.target is aten.t.default)
    found = [user for each in turned for user in each.users if user.target is aten.mm.default]
    is_one = (
        len(found) == 1 and found[0].args[0].target is aten.t.default and found[0].args[0].args[0] is grad
    )
    return _Product(node, grad, weight, found[0] if is_one else None, found[0].args[1] if is_one else None)


def _is_shorter(products: Sequence[_Product]) -> bool:
    """Whether the sums take more elements than the copies of weights and of gradients."""
    src = products[0].src
    is_alike = src is not None and all(each.src is src for each in products)
    if not is_alike or len({each.grad for each in products}) < len(products):
        return False
    rows, channels = map(int, products[0].node.meta["val"].shape)
    if channels * products[0].node.meta["val"].itemsize % ALIGNMENT:
        return False
    features = [int(each.grad.meta["val"].shape[1]) for each in products]
    copied = sum(count for count, each in zip(features, products, strict=True) if _is_other(each.grad))
    return 2 * (len(products) - 1) * rows * channels > 2 * sum(features) * channels + 2 * rows * copied


def _is_other(node: fx.Node) -> bool:
    """Whether an operator of another library's, or a product, makes the value, behind views."""
    while node.target in LYING:
        node = node.args[0]
    return node.target is operator.getitem or node.op == "placeholder" or node.target is aten.mm.default


def _join(graph: fx.Graph, total: fx.Node, products: Sequence[_Product]) -> None:
    call = partial(added, graph)
    with graph.inserting_before(total):
        grads = call(aten.cat.default, [each.grad for each in products], 1)
        weights = call(aten.cat.default, [each.weight for each in products])
        made = call(aten.view.default, call(aten.mm.default, grads, weights), total.meta["val"].shape)
        whole = call(aten.mm.default, call(aten.t.default, grads), products[0].src)
        begin = 0
        for each in products:
            assert each.of_weight is not None  # by `_is_shorter`
            end = begin + each.grad.meta["val"].shape[1]
            part, begin = call(aten.slice.Tensor, whole, 0, begin, end), end
            _replace(each.of_weight, part)
    total.replace_all_uses_with(made)


def _replace(node: fx.Node, made: fx.Node) -> None:
    """Puts a value into the place of one that may stand in front of it, with what is made of that there."""
    for user in list(node.users):
        if made < user:
            user.replace_input_with(node, made)
        else:
            again = made.graph.node_copy(user, lambda each: made if each is node else each)
            _replace(user, again)
