"""Steps of random models of ONNX: each adds an operator, or a few, with random attributes to a drawing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from onnx import helper

from drawn_onnx import Array, Drawing, UnsoundError, is_float

Step = Callable[[Drawing], object]

UNARY = (
    "Abs", "Neg", "Sign", "Relu", "Tanh", "Sigmoid", "HardSwish", "Selu", "Elu", "Erf", "Exp", "Softplus",
    "Sqrt", "Softsign", "Mish", "Celu", "LeakyRelu", "ThresholdedRelu", "HardSigmoid", "Reciprocal", "Floor",
    "Ceil", "Log", "Round", "Sin", "Cos", "Atan", "Sinh", "IsNaN", "IsInf", "Gelu", "Swish", "Identity",
    "Dropout", "Det",
)  # fmt: skip
NUMBERS = (np.float32, np.float32, np.float64, np.float16, np.int64, np.int32, np.int8, np.uint8, np.bool_)


def is_wide(array: Array) -> bool:
    return str(array.dtype) in ("float32", "float64")


def is_ranked(*ranks: int) -> Callable[[Array], bool]:
    return lambda array: is_float(array) and array.ndim in ranks and array.size > 0


def has_axes(array: Array) -> bool:
    return bool(array.ndim)


def like(drawing: Drawing, name: str, *shape: int, fan: int = 1) -> Array:
    return drawing.values(*shape, fan=fan, dtype=drawing[name].dtype)


def pair(drawing: Drawing, name: str, is_narrow: bool = False) -> str | Array:
    """Another value of the dtype, or a constant; with `is_narrow`, one that broadcasts to the value."""
    first, shape = drawing[name], drawing.shape(name)
    if drawing.rng.random() < 0.4 and not is_narrow:
        return drawing.pick(lambda each: each.dtype == first.dtype)
    other = [drawing.rng.choice((1, extent)) for extent in shape][drawing.rng.randint(0, len(shape)) :]
    return like(drawing, name, *other)


def window(drawing: Drawing, axes: int, pads: int) -> dict[str, Any]:
    rng = drawing.rng
    made: dict[str, Any] = {"strides": [rng.randint(1, 2) for _ in range(axes)]}
    mode = rng.choice(("NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"))
    if mode != "NOTSET":
        return made | {"auto_pad": mode}
    made["dilations"] = [rng.randint(1, 2) for _ in range(axes)]
    return made | {"pads": [rng.randint(0, pads) for _ in range(2 * axes)]}


def windowed(drawing: Drawing, kind: str, name: str, *operands: Array, **how: Any) -> None:
    """Adds an operator with windows; of ones that do not fit, ONNX's inference counts one too many."""
    made = drawing.add(kind, name, *operands, **how)
    if not drawing[made].size:
        raise UnsoundError("windows that do not fit")


def conv(drawing: Drawing) -> None:
    rng, name = drawing.rng, drawing.pick(is_ranked(3, 4, 5))
    axes, channels = len(drawing.shape(name)) - 2, drawing.shape(name)[1]
    groups = rng.choice([each for each in (1, 2, 3, channels) if channels % each == 0])
    kernel, features = [rng.randint(1, 3) for _ in range(axes)], rng.randint(1, 3)
    fan, bias = channels // groups, [like(drawing, name, groups * features)] * rng.randint(0, 1)
    if rng.random() < 0.7:
        weight = like(drawing, name, groups * features, fan, *kernel, fan=fan * 4)
        windowed(drawing, "Conv", name, weight, *bias, group=groups, **window(drawing, axes, 2))
        return
    weight = like(drawing, name, channels, features, *kernel, fan=fan * 4)
    how = {"strides": [rng.randint(1, 2) for _ in kernel], "pads": [rng.randint(0, 1) for _ in 2 * kernel]}
    windowed(drawing, "ConvTranspose", name, weight, *bias, group=groups, **how)


def pool(drawing: Drawing) -> None:
    rng, name = drawing.rng, drawing.pick(is_ranked(3, 4, 5))
    kind = rng.choice(("MaxPool", "AveragePool", "LpPool", "GlobalAveragePool", "GlobalMaxPool"))
    if kind.startswith("Global"):
        drawing.add(kind, name)
        return
    axes = len(drawing.shape(name)) - 2
    attributes = {"kernel_shape": [rng.randint(1, 3) for _ in range(axes)], **window(drawing, axes, 1)}
    if rng.random() < 0.3 and kind != "LpPool":  # of which ONNX's inference and ONNX Runtime are of two minds
        attributes["ceil_mode"] = 1
    if kind == "MaxPool":
        windowed(drawing, kind, name, count=rng.randint(1, 2), **attributes)
        return
    if (kind == "AveragePool" and drawing.opset < 19) or (kind == "LpPool" and drawing.opset < 18):
        attributes.pop("dilations", None)
    windowed(
        drawing,
        kind,
        name,
        **attributes,
        **({} if kind == "LpPool" else {"count_include_pad": rng.randint(0, 1)}),
    )


def norm(drawing: Drawing) -> None:
    rng, name = drawing.rng, drawing.pick(lambda each: is_float(each) and each.ndim > 1 and each.size > 0)
    shape = drawing.shape(name)
    kind = rng.choice(("Batch", "Instance", "Group", "Layer", "RMS", "Lp", "MeanVariance"))
    numbers = [like(drawing, name, shape[1]) for _ in range(3)]
    if kind == "Batch":
        drawing.add("BatchNormalization", name, *numbers, np.abs(numbers[0]) + numbers[0].dtype.type(0.5))
    elif kind == "Instance":
        drawing.add("InstanceNormalization", name, *numbers[:2])
    elif kind == "Group":
        groups = rng.choice([each for each in (1, 2, 3, shape[1]) if shape[1] % each == 0])
        scales = [like(drawing, name, shape[1] if drawing.opset > 20 else groups) for _ in range(2)]
        drawing.add("GroupNormalization", name, *scales, num_groups=groups)
    elif kind in ("Layer", "RMS"):
        axis = rng.randrange(-len(shape), len(shape))
        inner = shape[axis % len(shape) :]
        shift = [like(drawing, name, *inner)] * rng.randint(0, kind == "Layer")
        drawing.add(f"{kind}Normalization", name, like(drawing, name, *inner), *shift, axis=axis)
    elif kind == "Lp":
        drawing.add("LpNormalization", name, axis=rng.randrange(len(shape)), p=rng.randint(1, 2))
    else:
        drawing.add("MeanVarianceNormalization", name, axes=[len(shape) - 1])


def product(drawing: Drawing) -> None:
    rng, name = drawing.rng, drawing.pick(lambda each: is_float(each) and each.ndim > 0)
    shape, features = drawing.shape(name), rng.randint(1, 6)
    kind = rng.choice(("MatMul", "MatMul", "Gemm", "self", "Einsum"))
    if kind == "Gemm":
        turned = rng.randint(0, 1)
        weight = like(
            drawing, name, *((features, shape[-1]) if turned else (shape[-1], features)), fan=shape[-1]
        )
        bias = [like(drawing, name, *rng.choice(((features,), (1, features), (1,), ())))] * rng.randint(0, 1)
        alpha, beta = rng.choice((1.0, 0.5)), rng.choice((1.0, 0.25))
        drawing.add("Gemm", name, weight, *bias, transB=turned, alpha=alpha, beta=beta)
    elif kind == "self":
        order = [*range(len(shape) - 2), len(shape) - 1, len(shape) - 2]
        drawing.add("MatMul", name, drawing.add("Transpose", name, perm=order))
    elif kind == "Einsum":
        drawing.add(
            "Einsum", name, like(drawing, name, shape[-1], features, fan=shape[-1]), equation="...a,ab->...b"
        )
    else:
        outer = rng.choice(((), (), (1,), shape[:-2]))
        weight = like(drawing, name, *outer, shape[-1], features, fan=shape[-1])
        weight = weight[..., 0] if not outer and rng.random() < 0.1 else weight
        operands = (weight, name) if weight.shape[-1] == shape[0] and rng.random() < 0.3 else (name, weight)
        drawing.add("MatMul", *operands)


def binary(drawing: Drawing) -> None:
    name = drawing.pick(lambda each: each.dtype != np.bool_)
    if is_float(drawing[name]):
        kind = drawing.rng.choice(("Add", "Sub", "Mul", "Max", "Min", "Div", "Pow", "Sum", "Mean", "PRelu"))
        inputs = name, pair(drawing, name, kind == "PRelu")
        drawing.add(kind, *(inputs if kind == "PRelu" else drawing.rng.sample(inputs, 2)))
        return
    kind = drawing.rng.choice(("Add", "Sub", "Mul", "Max", "Min", "Div", "Mod", "BitwiseAnd", "BitShift"))
    how = {"direction": "LEFT"} if kind == "BitShift" else {}
    drawing.add(kind, name, pair(drawing, name), **how)


def unary(drawing: Drawing) -> None:
    drawing.add(drawing.rng.choice(UNARY), drawing.pick())


def compared(drawing: Drawing) -> None:
    """Truths of a value, and a choice by them."""
    name = drawing.pick(lambda each: each.dtype != np.bool_)
    kind = drawing.rng.choice(("Greater", "Less", "Equal", "GreaterOrEqual", "LessOrEqual"))
    truths = drawing.add(kind, name, pair(drawing, name))
    if drawing.rng.random() < 0.4:
        truths = drawing.add("Not", truths)
    elif drawing.rng.random() < 0.3:
        truths = drawing.add(
            drawing.rng.choice(("And", "Or", "Xor")),
            truths,
            drawing.pick(lambda each: each.dtype == np.bool_),
        )
    if drawing.rng.random() < 0.7:
        drawing.add("Where", truths, *drawing.rng.sample((name, pair(drawing, name)), 2))


def cast(drawing: Drawing) -> None:
    name, dtype = drawing.pick(), drawing.rng.choice(NUMBERS)
    drawing.add("Cast", name, to=helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))


def reduced(drawing: Drawing) -> None:
    rng, name = drawing.rng, drawing.pick(lambda each: each.dtype != np.bool_)
    rank = drawing[name].ndim
    kind = rng.choice(("Mean", "Sum", "Max", "Min", "Prod", "L1", "L2", "LogSumExp", "SumSquare", "LogSum"))
    axes = (
        rng.choice((None, [], [rng.randrange(-rank, rank)], rng.sample(range(rank), rng.randint(1, rank))))
        if rank
        else None
    )
    how: dict[str, Any] = {"keepdims": rng.randint(0, 1)}
    if drawing.opset > (17 if kind != "Sum" else 12):
        how["noop_with_empty_axes"] = rng.randint(0, 1)
        drawing.add(f"Reduce{kind}", name, *([] if axes is None else [np.array(axes, np.int64)]), **how)
    else:
        drawing.add(f"Reduce{kind}", name, **how, **({"axes": axes} if axes else {}))


def along(drawing: Drawing) -> None:
    rng, name = drawing.rng, drawing.pick(has_axes)
    rank = drawing[name].ndim
    axis, kind = (
        rng.randrange(-rank, rank),
        rng.choice(("Softmax", "LogSoftmax", "Hardmax", "ArgMax", "ArgMin", "CumSum", "TopK")),
    )
    if kind == "CumSum":
        drawing.add(kind, name, np.array(axis), exclusive=rng.randint(0, 1), reverse=rng.randint(0, 1))
    elif kind == "TopK":
        most = drawing.shape(name)[axis]
        drawing.add(
            kind, name, np.array([rng.randint(1, most)]), count=2, axis=axis, largest=rng.randint(0, 1)
        )
    elif kind.startswith("Arg"):
        drawing.add(kind, name, axis=axis, keepdims=rng.randint(0, 1), select_last_index=rng.randint(0, 1))
    else:
        drawing.add(kind, name, axis=axis)


def viewed(drawing: Drawing) -> None:
    rng, name = drawing.rng, drawing.pick()
    shape, rank = drawing.shape(name), drawing[name].ndim
    kind = rng.choice(
        ("Reshape", "Reshape", "Transpose", "Flatten", "Unsqueeze", "Squeeze", "Slice", "Expand")
    )
    if kind == "Reshape":
        wanted = rng.choice(([0, -1], [1, -1], [*shape, 1], [0, 0, -1], [-1], [-1, *shape[1:]], [0] * rank))
        drawing.add(kind, name, np.array(wanted, np.int64))
    elif kind == "Transpose":
        drawing.add(kind, name, **rng.choice(({}, {"perm": rng.sample(range(rank), rank)})))
    elif kind == "Flatten":
        drawing.add(kind, name, axis=rng.randint(-rank, rank))
    elif kind == "Unsqueeze":
        drawing.add(kind, name, np.array(rng.choice(([0], [-1], [0, rank + 1])), np.int64))
    elif kind == "Squeeze":
        drawing.add(kind, name)
    elif kind == "Expand":
        drawing.add(kind, name, np.array(rng.choice(([2, *shape], [1], shape, [])), np.int64))
    else:
        begins = [rng.randint(0, max(0, extent - 1)) for extent in shape]
        steps = [rng.choice((1, 1, 2, -1)) for _ in shape]
        ends = [
            rng.choice((2**31, extent, -1)) if step > 0 else -(2**31)
            for extent, step in zip(shape, steps, strict=True)
        ]
        drawing.add(kind, name, *map(np.array, (begins, ends, [*range(rank)], steps)))


def moved(drawing: Drawing) -> None:
    rng, name = drawing.rng, drawing.pick(has_axes)
    shape, rank = drawing.shape(name), drawing[name].ndim
    axis = rng.randrange(-rank, rank)
    kind = rng.choice(("Concat", "Split", "Pad", "Tile", "Trilu", "DepthToSpace", "SpaceToDepth", "Resize"))
    if kind == "Concat":
        drawing.add(kind, *rng.sample((name, name, pair(drawing, name)), rng.randint(1, 3)), axis=axis)
    elif kind == "Split":
        extent = shape[axis]
        first = rng.randint(0, extent)
        drawing.add(kind, name, np.array([first, extent - first]), count=2, axis=axis)
    elif kind == "Pad":
        pads = [rng.choice((0, 0, 1, 2)) for _ in 2 * shape]
        value = rng.choice(([], [like(drawing, name)]))
        drawing.add(kind, name, np.array(pads), *value, mode=rng.choice(("constant", "edge", "reflect")))
    elif kind == "Tile":
        drawing.add(kind, name, np.array([rng.randint(1, 2) for _ in shape]))
    elif kind == "Trilu":
        drawing.add(kind, name, np.array(rng.randint(-2, 2)), upper=rng.randint(0, 1))
    elif kind == "Resize":
        sizes = np.array([*shape[:2], *(rng.randint(1, 8) for _ in shape[2:])])
        how = rng.choice(
            (
                {"mode": "nearest"},
                {"mode": "linear"},
                {"mode": "linear", "coordinate_transformation_mode": "align_corners"},
            )
        )
        drawing.add(kind, name, None, None, sizes, **how)
    else:
        drawing.add(kind, name, blocksize=2)


def indexed(drawing: Drawing) -> None:
    rng, name = drawing.rng, drawing.pick(lambda each: each.ndim > 0 and each.size > 0)
    shape, rank = drawing.shape(name), drawing[name].ndim
    axis = rng.randrange(-rank, rank)
    kind = rng.choice(
        (
            "Gather",
            "GatherElements",
            "GatherND",
            "ScatterND",
            "ScatterElements",
            "NonZero",
            "Compress",
            "table",
        )
    )
    if kind == "Gather":
        drawing.add(kind, name, np.array(rng.choice((0, [0, -1], [[0], [-1]], [])), np.int64), axis=axis)
    elif kind == "table":
        places = drawing.pick(lambda each: each.dtype == np.int64 and each.size and np.abs(each).max() < 9)
        drawing.add("Gather", drawing.values(18, rng.randint(1, 8)), places)
    elif kind == "GatherND":
        drawing.add(kind, name, np.array([[0] * rng.randint(1, rank), [-1] * rank][:1]))
    elif kind == "ScatterND":
        drawing.add(
            kind,
            name,
            np.array([[0], [-1]])[: min(2, shape[0])],
            like(drawing, name, min(2, shape[0]), *shape[1:]),
        )
    elif kind in ("GatherElements", "ScatterElements"):
        ids = np.zeros(
            [1 if place == axis % rank else extent for place, extent in enumerate(shape)], np.int64
        )
        drawing.add(
            kind, name, ids, *([like(drawing, name, *ids.shape)] if kind[0] == "S" else []), axis=axis
        )
    elif kind == "NonZero":
        drawing.add(kind, name)
    else:
        drawing.add(kind, name, np.arange(shape[axis]) % 2 == 0, axis=axis)


def shaped(drawing: Drawing) -> None:
    """Values by the shape of another, as exporters write them."""
    rng, name = drawing.rng, drawing.pick()
    kind = rng.choice(("Shape", "Size", "ConstantOfShape", "Reshape", "Range", "OneHot", "EyeLike"))
    if kind in ("Shape", "Size"):
        drawing.add(kind, name)
    elif kind == "ConstantOfShape":
        drawing.add(kind, drawing.add("Shape", name))
    elif kind == "Reshape":
        outer = drawing.add("Gather", drawing.add("Shape", name), np.array([0]))
        drawing.add(kind, name, drawing.add("Concat", outer, np.array([-1]), axis=0))
    elif kind == "Range":
        drawing.add(
            "Range", np.array(0), drawing.add("Gather", drawing.add("Shape", name), np.array(-1)), np.array(1)
        )
    elif kind == "OneHot":
        ids = drawing.pick(lambda each: each.dtype in (np.int64, np.int32))
        drawing.add(kind, ids, np.array(6), np.array([0, 1], np.float32), axis=rng.choice((-1, 0)))
    else:
        drawing.add(kind, name)


def clipped(drawing: Drawing) -> None:
    name = drawing.pick(lambda each: each.dtype != np.bool_)
    bounds = sorted(like(drawing, name, 2).tolist())
    low, high = (np.array(each, drawing[name].dtype) for each in bounds)
    drawing.add("Clip", name, *drawing.rng.choice(((low, high), (low,), (None, high), ())))


def attended(drawing: Drawing) -> None:
    """Attention as one operator, or spelt out with a mask."""
    name = drawing.pick(lambda each: is_wide(each) and each.ndim == 4 and each.size > 0)
    rows = drawing.shape(name)[2]
    if drawing.opset > 22 and drawing.rng.random() < 0.5:
        drawing.add("Attention", name, name, name, is_causal=drawing.rng.randint(0, 1))
        return
    scores = drawing.add("MatMul", name, drawing.add("Transpose", name, perm=[0, 1, 3, 2]))
    scaled = drawing.add("Mul", scores, np.array(0.5, drawing[name].dtype))
    mask = np.where(np.tri(rows), 0, -1e9).astype(drawing[name].dtype)
    masked = drawing.rng.choice((scaled, drawing.add("Add", scaled, np.maximum(mask, -30))))
    drawing.add("MatMul", drawing.add("Softmax", masked, axis=-1), name)


STEPS: tuple[Step, ...] = (
    conv, conv, pool, norm, product, product, binary, binary, binary, unary, unary, compared, cast, reduced,
    along, viewed, viewed, moved, indexed, shaped, clipped, attended,
)  # fmt: skip
