"""Random plans of the whole language, drawn as text from a seed: illegal operators are drawn again."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from fuseplan.errors import PlanError
from fuseplan.language.tensor import TensorSpec
from fuseplan.ops import BY_NAME
from fuseplan.ops.activation import ACTIVATIONS
from fuseplan.plans.plan import FusionPlan

Rng = random.Random

FLOATS = ("f32", "f32", "f32", "f16", "bf16", "f64")
STORED = ("f16", "bf16", "f32", "f64", "f8e4m3", "f8e5m2", "i8", "u8", "i16", "i32", "bool")
EXTENTS = (1, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 64, 70)
MEDIUM = (1, 2, 7, 16, 24, 40, 48, 64, 80, 96, 128, 200, 333, 512)  # of more than `MOST_ELEMENTS` elements
NAMES = {1: ("c",), 2: ("nc",), 3: ("ncw", "nwc", "bsc"), 4: ("nchw", "nhwc", "bhsd", "bshd", "bshd of bhsd"),
         5: ("ncdhw", "ndhwc")}  # fmt: skip
FORMULAS = (
    '"x / (1 + k * x**2)", k=0.5', '"where(x > low, sigmoid(x), x * x)", low=0.25', '"x * random(s, 2)", s=3',
    '"where(index({axis}) >= index(), x, 0.5)"', '"exp(-abs(x)) + index({axis}) * 0.125"',
    '"minimum(x, 1) - round(x)"',
)  # fmt: skip
MOST_ELEMENTS = 1 << 15
FEW = (1, 1, 1, 2, 3)  # where axes vanish
OPENED, ENDED, SMALL = 0.25, 0.1, 0.25
WHOLE, PRODUCTS = ("i8", "i8", "u8", "u8"), 0.6  # integers, and how often a product of these comes first


def drawn(seed: int, most: int = MOST_ELEMENTS) -> FusionPlan:
    """The plan of a seed: of up to six operators on up to `most` elements."""
    rng = Rng(seed)
    plan = _begun(rng, most)
    count = rng.randint(1, 6)
    centre, is_whole = rng.randrange(count), plan.src.dtype in WHOLE and rng.random() < PRODUCTS
    for place in range(count):
        kind = rng.choice(tuple(CENTRES)) if place == centre else "elementwise"
        kind = "contraction" if is_whole and place == 0 else kind
        plan = _grown(rng, plan, CENTRES[kind], 4 * most)
    return _grown(rng, plan, ENDS, 4 * most) if rng.random() < ENDED else plan


def _begun(rng: Rng, most: int) -> FusionPlan:
    while True:
        with suppress(PlanError):
            plan = FusionPlan.parse(_src(rng, most))
            return _grown(rng, plan, ("embedding",), most) if plan.src.dtype == "i64" else plan


def _grown(rng: Rng, plan: FusionPlan, names: tuple[str, ...], most: int) -> FusionPlan:
    """The plan with one of these operators behind it, or as it is where none that is drawn is legal."""
    for _ in range(16):
        try:
            grown = FusionPlan.parse(f"{plan} -> {_operator(rng, names, plan.output, str(plan))}")
        except PlanError:
            continue
        if grown.output.with_extents(*[3] * len(grown.output.open_axes)).size <= most:
            return grown
    return plan


def _src(rng: Rng, most: int) -> str:
    rank = rng.choice((1, 2, 2, 3, 3, 4, 4, 4, 5))
    sizes = FEW if rng.random() < SMALL else MEDIUM if most > MOST_ELEMENTS else EXTENTS
    while True:
        shape = [rng.choice(sizes) for _ in range(rank)]
        if TensorSpec(shape).size <= most:
            break
    dtype = rng.choice(FLOATS) if rng.random() < 0.8 else rng.choice((*STORED, *WHOLE, "i64"))
    layout = rng.choice(NAMES[rank])
    if rng.random() < 0.2:
        steps, step = [0] * rank, rng.choice((1, 1, 2, 3))
        for axis in rng.sample(range(rank), rank):
            steps[axis], step = step, step * shape[axis] + rng.choice((0, 0, 1, 5))
        return f"{dtype}[{'x'.join(map(str, shape))}, strides={':'.join(map(str, steps))}{_named(layout)}]"
    count = rng.choice((1, 1, 2)) if rng.random() < OPENED and rank > 1 else 0
    names, order = TensorSpec(shape, "f32", layout).names, layout.split()[0]
    extents = ["*" if order.index(names[axis]) < count else str(shape[axis]) for axis in range(rank)]
    return f"{dtype}[{'x'.join(extents)}, {layout}]"


def _named(layout: str) -> str:
    names = layout.rpartition(" of ")[2]
    return f" of {names}" if "n" not in names and names != "c" else ""


def _operator(rng: Rng, names: tuple[str, ...], src: TensorSpec, text: str) -> str:
    name = rng.choice(names)
    made = DRAWS[name](rng, src, text) if name in DRAWS else ""
    listed = ", ".join(made) if isinstance(made, list) else made
    return f"{name}({listed})" if listed else name


def _maybe(rng: Rng, *fields: str, chance: float = 0.4) -> list[str]:
    return [each for each in fields if rng.random() < chance]


def _number(rng: Rng) -> str:
    return str(rng.choice((0, 1, -1, 0.5, -0.25, 2, 1.75, 0.1)))


def _activation(rng: Rng) -> str:
    kind: Any = rng.choice(ACTIVATIONS)
    return f"{kind.name}(-0.5, max=1.5)" if kind.name == "clamp" else str(kind.name)


def _sizes(rng: Rng, axes: int, *numbers: int) -> str:
    if rng.random() < 0.6:
        return str(rng.choice(numbers))
    return f"({', '.join(str(rng.choice(numbers)) for _ in range(axes))}{',' * (axes == 1)})"


def _padding(rng: Rng, axes: int) -> str:
    pairs = ", ".join(f"({rng.randint(0, 3)}, {rng.randint(0, 3)})" for _ in range(axes))
    return rng.choice(("0", "1", "2", "same", "valid", f"({pairs},)"))


def _conv(transposed: bool = False) -> Callable[[Rng, TensorSpec, str], list[str]]:
    def draw(rng: Rng, src: TensorSpec, text: str) -> list[str]:
        axes = max(src.rank - 2, 1)
        channels = src.channels
        groups = rng.choice([1, *(each for each in (2, 3, 4, 8, channels) if channels % each == 0)])
        features = groups * rng.choice((1, 1, 2, 3, 4, 8, 16, 17))
        made = [str(features), f"kernel={_sizes(rng, axes, 1, 2, 3, 3, 4, 5)}"]
        made += _maybe(rng, f"stride={_sizes(rng, axes, 1, 2, 3)}", f"dilation={_sizes(rng, axes, 1, 2, 3)}")
        made += [*_maybe(rng, f"padding={_padding(rng, axes)}", chance=0.7), f"groups={groups}"]
        made += _maybe(rng, "precision=tf32", chance=0.1)
        return made + _maybe(rng, f"output_padding={rng.randint(0, 1)}") * transposed

    return draw


def _pool(is_mean: bool) -> Callable[[Rng, TensorSpec, str], list[str]]:
    def draw(rng: Rng, src: TensorSpec, text: str) -> list[str]:
        axes = max(src.rank - 2, 1)
        made = [_sizes(rng, axes, 1, 2, 3, 4)]
        made += _maybe(
            rng, f"stride={_sizes(rng, axes, 1, 2, 3)}", f"padding={_padding(rng, axes)}", "ceil_mode=True"
        )
        return made + _maybe(
            rng, "count_include_pad=False" if is_mean else f"dilation={_sizes(rng, axes, 1, 2)}"
        )

    return draw


def _product(*fields: str) -> Callable[[Rng, TensorSpec, str], list[str]]:
    return lambda rng, src, text: [str(rng.choice(_extents(src))), *_maybe(rng, *fields, chance=0.2)]


def _extents(src: TensorSpec) -> tuple[int, ...]:
    return EXTENTS if src.open_axes or src.size <= MOST_ELEMENTS else MEDIUM


def _axes(rng: Rng, src: TensorSpec) -> str:
    if rng.random() < 0.2:
        return "all"
    chosen = rng.sample(range(src.rank), rng.randint(1, max(1, min(2, src.rank)))) if src.rank else [-1]
    listed = [each - src.rank * rng.randint(0, 1) for each in chosen]
    return str(listed[0]) if len(listed) == 1 else f"({', '.join(map(str, listed))})"


def _reduction(*fields: str) -> Callable[[Rng, TensorSpec, str], list[str]]:
    return lambda rng, src, text: [_axes(rng, src), *_maybe(rng, *fields)]


def _attention(rng: Rng, src: TensorSpec, text: str) -> list[str]:
    heads = src.shape[1] if src.rank == 4 else 1
    divisors = [each for each in range(1, 5) if heads % each == 0]
    sizes = _extents(src)
    keys = (1, 3, 8, 17, 70) if sizes == EXTENTS else sizes
    made = _maybe(rng, "is_causal=True", f"keys={rng.choice(keys)}", f"features={rng.choice(sizes)}")
    made += _maybe(
        rng, f"key_heads={rng.choice(divisors)}", f"scale={rng.choice((0.5, 1.5))}", "nan_unseen=True"
    )
    made += _maybe(
        rng, "offset=2", f"window={rng.choice((1, 3, 40))}", "softcap=1.5", "return_lse=True", chance=0.2
    )
    axes = rng.sample(("bt", "hst", "bhst", "t", "bst", "st"), 2)
    return made + _maybe(rng, f"bias_axes={axes[0]}", f"mask_axes={axes[1]}", "is_padded=True", chance=0.2)


def _rotary(rng: Rng, src: TensorSpec, text: str) -> list[str]:
    return _maybe(
        rng, f"dims={rng.choice((2, 4, 6))}", "interleaved=True", "inverse=True", "batched=True", "whole=True"
    )


def _scaled(default: bool) -> Callable[[Rng, TensorSpec, str], list[str]]:
    def draw(rng: Rng, src: TensorSpec, text: str) -> list[str]:
        dtype = rng.choice(("f32", "f16", "bf16", "i16") if default else ("i8", "u8", "f8e4m3", "f8e5m2"))
        per = rng.choice(("tensor", "channel", "row", "block"))
        return [dtype, f"per={per}", *_maybe(rng, f"block={rng.choice((1, 2, 5, 16))}", "zero_points=True")]

    return draw


def _again(rng: Rng, src: TensorSpec, text: str) -> list[str]:
    saved = [each.partition(")")[0] for each in text.split("save(")[1:]]
    return [f"other={rng.choice(saved)}"] if saved and rng.random() < 0.7 else []


def _split(rng: Rng, src: TensorSpec, text: str) -> list[str]:
    first = rng.randint(1, max(1, src.channels - 1))
    return ["(a, b)", f"features=({first}, {src.channels - first})"]


def _expression(rng: Rng, src: TensorSpec, text: str) -> str:
    return rng.choice(FORMULAS).format(axis=rng.choice(src.names or "c"))


def _losses(rng: Rng, src: TensorSpec, text: str) -> list[str]:
    return _maybe(rng, "label_smoothing=0.25", "ignore_index=1", "z_loss=0.01", "index_dtype=i64")


def _groups(rng: Rng, src: TensorSpec, text: str) -> list[str]:
    return [
        str(rng.choice([each for each in range(1, 9) if src.channels % each == 0])),
        *_maybe(rng, "affine=False"),
    ]


def _fields(*fields: str) -> Callable[[Rng, TensorSpec, str], list[str]]:
    return lambda rng, src, text: _maybe(rng, *fields)


REDUCTIONS = ("sum", "mean", "amax", "amin", "prod", "logsumexp", "argmax")
DRAWS: dict[str, Callable[[Rng, TensorSpec, str], list[str] | str]] = {
    **{f"conv{axes}d": _conv() for axes in (1, 2, 3)},
    **{f"conv_transpose{axes}d": _conv(True) for axes in (1, 2, 3)},
    **{f"conv{axes}d_weight_gradient": _conv() for axes in (1, 2, 3)},
    **{f"max_pool{axes}d": _pool(False) for axes in (1, 2, 3)},
    **{f"avg_pool{axes}d": _pool(True) for axes in (1, 2, 3)},
    "matmul": _product("transposed=True", "batched=True", "precision=tf32"),
    "linear": _product("precision=tf32"),
    "linear_weight_gradient": _product(),
    "attention": _attention,
    "attention_gradient": lambda rng, src, text: [
        each for each in _attention(rng, src, text) if "lse" not in each and "nan" not in each
    ] + _maybe(rng, "by=key"),
    "scale": _fields("shared=True"),
    "prelu": _fields("shared=True"),
    "add": lambda rng, src, text: [*_maybe(rng, "alpha1=0.5", "alpha2=-2"), *_again(rng, src, text)],
    "mul": _again,
    "batch_norm": _fields("mode=per_activation", "inverse=True"),
    "add_along": lambda rng, src, text: [_along(rng, src), *_maybe(rng, "alpha2=-2")],
    "mul_along": lambda rng, src, text: [_along(rng, src)],
    "dropout": lambda rng, src, text: [f"p={rng.choice((0, 0.25, 1))}", "seed=3"],
    "embedding": lambda rng, src, text: [
        str(rng.choice(EXTENTS)), f"features={rng.choice(EXTENTS)}", f"dtype={rng.choice(FLOATS)}",
        *_maybe(rng, "from_end=True"),
    ],
    "save": lambda rng, src, text: f"s{text.count('save(')}",
    "within": lambda rng, src, text: [
        str(src.channels + rng.choice((0, 1, 8))), *_maybe(rng, f"layout={rng.choice(('nchw', 'nhwc'))}"),
    ],
    "split": _split,
    "tanh": lambda rng, src, text: [f"alpha={_number(rng)}", f"beta={_number(rng)}"],
    "power": lambda rng, src, text: [_number(rng), f"beta={_number(rng)}", f"gamma={_number(rng)}"],
    "clamp": lambda rng, src, text: rng.choice((["-0.5", "max=0.75"], ["0", "max=inf"], ["1", "max=-1"])),
    "gelu": _fields("tanh"),
    "cast": lambda rng, src, text: rng.choice(STORED),
    "quantize": _scaled(False),
    "dequantize": _scaled(True),
    "glu": lambda rng, src, text: [_activation(rng), *_glu(rng, src)],
    "glu_backward": lambda rng, src, text: [_activation(rng), *_glu(rng, src)],
    "rotary": _rotary,
    "layer_norm": _fields("affine=False"),
    "rms_norm": _fields("affine=False"),
    "group_norm": _groups,
    "instance_norm": _fields("affine=False"),
    **{name: _reduction() for name in ("softmax", "log_softmax", "softmax_backward", "log_softmax_backward")},
    **{name: _reduction("keepdim=True") for name in REDUCTIONS},
    "var": _reduction("keepdim=True", "correction=0"),
    "cumsum": lambda rng, src, text: [
        str(rng.randrange(-src.rank, src.rank) if src.rank else 0),
        *_maybe(rng, "exclusive=True", "reverse=True"),
    ],
    "dynamic_quantize": lambda rng, src, text: [
        rng.choice(("i8", "f8e4m3", "f8e5m2")), f"each={rng.choice(('row', 'tensor', 'block'))}",
        f"block={rng.choice([each for each in (1, 2, 4, 5, 8) if src.channels % each == 0])}",
    ],
    **{f"cross_entropy{each}": _losses for each in ("", "_backward", "_gradient")},
    "batch_norm_training": _fields("mode=per_activation", "running=True", "saved=False"),
    "batch_norm_backward": lambda rng, src, text: [_activation(rng), *_maybe(rng, "mode=per_activation",
                                                                            "statistics=recomputed")],
    "activation_backward": lambda rng, src, text: [_activation(rng)],
    "layer_norm_backward": _fields("affine=False", "gradients=True", "statistics=saved"),
    "rms_norm_backward": _fields("affine=False", "gradients=True", "statistics=saved"),
    "group_norm_backward": _groups,
    "instance_norm_backward": _fields("affine=False"),
    "elementwise": _expression,
}  # fmt: skip


def _glu(rng: Rng, src: TensorSpec) -> list[str]:
    return _maybe(rng, "gate=first", f"axis={rng.choice(src.names or 'c')}", "interleaved=True")


def _along(rng: Rng, src: TensorSpec) -> str:
    axes = sorted(rng.sample(range(src.rank), rng.randint(1, max(1, src.rank - 1)))) if src.rank else [0]
    return f"({', '.join(map(str, axes))},)"


ENDS = ("within", "split")
CENTRES = {
    kind: tuple(name for name, op in BY_NAME.items() if op.kind == kind and name not in (*ENDS, "embedding"))
    for kind in ("contraction", "normalization", "attention", "scan", "elementwise")
}
