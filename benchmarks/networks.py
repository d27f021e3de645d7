"""Networks of convolutions as models of ONNX, with random weights and the shapes of their papers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

RELU6 = (0.0, 6.0)


class Network:
    """A model that is being written: its nodes in order, and the channels of each value.

    Args:
        batch: images.
        size: rows and columns of an image.
    """

    def __init__(self, batch: int = 1, size: int = 224) -> None:
        self._shape, self._rng = (batch, 3, size, size), np.random.default_rng(0)
        self._nodes: list[Any] = []
        self._stored: list[Any] = []
        self._channels = {"x": 3}

    def add(self, kind: str, *inputs: str, channels: int | None = None, **attributes: Any) -> str:
        """A node's result, which has the channels of its first input unless others are told."""
        name = f"{kind.lower()}{len(self._nodes)}"
        self._nodes.append(helper.make_node(kind, inputs, [name], name, **attributes))
        self._channels[name] = self._channels[inputs[0]] if channels is None else channels
        return name

    def store(self, array: Any) -> str:
        """A constant."""
        name = f"c{len(self._stored)}"
        self._stored.append(numpy_helper.from_array(np.asarray(array, np.float32), name))
        return name

    def conv(
        self, x: str, channels: int, kernel: int, *, stride: int = 1, groups: int = 1, act: str = "Relu"
    ) -> str:
        """A convolution with its batch normalization folded into it, `same` padding, and an activation."""
        own = self._channels[x] // groups
        scale = np.sqrt(2 / (own * kernel * kernel))
        weight = self.store(self._rng.standard_normal((channels, own, kernel, kernel)) * scale)
        bias = self.store(self._rng.standard_normal(channels) * 0.1)
        pads = [kernel // 2] * 4
        made = self.add(
            "Conv", x, weight, bias, channels=channels, strides=[stride] * 2, pads=pads, group=groups
        )
        return self.activated(made, act)

    def activated(self, x: str, act: str) -> str:
        """The value behind an activation: `Relu`, `Relu6`, `Silu` or none."""
        if act == "Relu6":
            return self.add("Clip", x, *map(self.store, RELU6))
        if act == "Silu":
            return self.add("Mul", x, self.add("Sigmoid", x))
        return self.add(act, x) if act else x

    def pool(
        self, kind: str, x: str, kernel: int, stride: int, pad: int = 0, *, is_ceil: bool = False
    ) -> str:
        """A pool."""
        numbers: dict[str, Any] = {"kernel_shape": [kernel] * 2, "strides": [stride] * 2, "pads": [pad] * 4}
        return self.add(kind, x, ceil_mode=int(is_ceil), **numbers)

    def concat(self, *values: str) -> str:
        """Values one behind the other along the channels."""
        return self.add("Concat", *values, channels=sum(self._channels[each] for each in values), axis=1)

    def gated(self, x: str, middle: int) -> str:
        """Squeeze-and-excite."""
        own = self._channels[x]
        small = self.conv(self.add("GlobalAveragePool", x), middle, 1, act="Silu")
        return self.add("Mul", x, self.add("Sigmoid", self.conv(small, own, 1, act="")))

    def channels(self, x: str) -> int:
        """How many a value has."""
        return self._channels[x]

    def finish(self, x: str, *, classes: int = 1000) -> Any:
        """The model with a mean over all positions and a classifier."""
        flat = self.add("Flatten", self.add("GlobalAveragePool", x))
        own = self._channels[x]
        weight = self.store(self._rng.standard_normal((classes, own)) / np.sqrt(own))
        y = self.add("Gemm", flat, weight, self.store(np.zeros(classes)), transB=1)
        src = helper.make_tensor_value_info("x", TensorProto.FLOAT, self._shape)
        dst = helper.make_tensor_value_info(y, TensorProto.FLOAT, [self._shape[0], classes])
        graph = helper.make_graph(self._nodes, "network", [src], [dst], self._stored)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def resnet50(net: Network) -> Any:
    """ResNet-50."""
    x = net.pool("MaxPool", net.conv("x", 64, 7, stride=2), 3, 2, 1)
    for stage, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            side = net.conv(x, 4 * width, 1, stride=stride, act="") if not block else x
            inner = net.conv(net.conv(x, width, 1), width, 3, stride=stride)
            x = net.add("Relu", net.add("Add", net.conv(inner, 4 * width, 1, act=""), side))
    return net.finish(x)


def _inverted(net: Network, x: str, channels: int, kernel: int, stride: int, grow: int, act: str) -> str:
    """MobileNet's block; with SiLU it has a gate, as EfficientNet's."""
    own = net.channels(x)
    wide = net.conv(x, own * grow, 1, act=act) if grow > 1 else x
    deep = net.conv(wide, own * grow, kernel, stride=stride, groups=own * grow, act=act)
    if act == "Silu":
        deep = net.gated(deep, max(1, own // 4))
    made = net.conv(deep, channels, 1, act="")
    return net.add("Add", made, x) if stride == 1 and own == channels else made


def mobilenet_v2(net: Network) -> Any:
    """MobileNetV2."""
    x = net.conv("x", 32, 3, stride=2, act="Relu6")
    rows = (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    )
    for grow, channels, blocks, stride in rows:
        for block in range(blocks):
            x = _inverted(net, x, channels, 3, stride if not block else 1, grow, "Relu6")
    return net.finish(net.conv(x, 1280, 1, act="Relu6"))


def efficientnet_b0(net: Network) -> Any:
    """EfficientNet-B0."""
    x = net.conv("x", 32, 3, stride=2, act="Silu")
    rows = ((1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 40, 2, 2, 5), (6, 80, 3, 2, 3), (6, 112, 3, 1, 5),
            (6, 192, 4, 2, 5), (6, 320, 1, 1, 3))  # fmt: skip
    for grow, channels, blocks, stride, kernel in rows:
        for block in range(blocks):
            x = _inverted(net, x, channels, kernel, stride if not block else 1, grow, "Silu")
    return net.finish(net.conv(x, 1280, 1, act="Silu"))


def squeezenet(net: Network) -> Any:
    """SqueezeNet 1.1."""
    x = net.pool("MaxPool", net.conv("x", 64, 3, stride=2), 3, 2, is_ceil=True)
    rows = ((16, 64), (16, 64), None, (32, 128), (32, 128), None, (48, 192), (48, 192), (64, 256), (64, 256))
    for row in rows:
        if row is None:
            x = net.pool("MaxPool", x, 3, 2, is_ceil=True)
            continue
        small = net.conv(x, row[0], 1)
        x = net.concat(net.conv(small, row[1], 1), net.conv(small, row[1], 3))
    return net.finish(net.conv(x, 1000, 1))


def googlenet(net: Network) -> Any:
    """GoogLeNet: Inception's modules, four branches joined."""
    x = net.pool("MaxPool", net.conv("x", 64, 7, stride=2), 3, 2, is_ceil=True)
    x = net.pool("MaxPool", net.conv(net.conv(x, 64, 1), 192, 3), 3, 2, is_ceil=True)
    rows: tuple[tuple[int, ...], ...] = (
        (64, 96, 128, 16, 32, 32), (128, 128, 192, 32, 96, 64), (), (192, 96, 208, 16, 48, 64),
        (160, 112, 224, 24, 64, 64), (128, 128, 256, 24, 64, 64), (112, 144, 288, 32, 64, 64),
        (256, 160, 320, 32, 128, 128), (), (256, 160, 320, 32, 128, 128), (384, 192, 384, 48, 128, 128),
    )  # fmt: skip
    for row in rows:
        if not row:
            x = net.pool("MaxPool", x, 3, 2, is_ceil=True)
            continue
        one, before, three, early, five, behind = row
        pooled = net.conv(net.pool("MaxPool", x, 3, 1, 1), behind, 1)
        x = net.concat(net.conv(x, one, 1), net.conv(net.conv(x, before, 1), three, 3),
                       net.conv(net.conv(x, early, 1), five, 3), pooled)  # fmt: skip
    return net.finish(x)


NETWORKS: dict[str, Callable[[Network], Any]] = {
    each.__name__: each for each in (resnet50, mobilenet_v2, efficientnet_b0, squeezenet, googlenet)
}
