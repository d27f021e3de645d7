"""Models of ONNX that grow node by node: each runs as it is added, and stays if its results are sound."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from fuseplan.onnx.runtime import UNLIKE

Array = Any
LARGEST, MOST = 50, 20_000  # of a value: its largest element, and how many it has
# How far rounding may move results of a dtype, over their largest element; and how much farther steps let it.
ROUNDED = {"float64": 1e-13, "float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}
GROWS = 20


class UnsoundError(Exception):
    """A node that nothing runs, or whose results depend on rounding."""


def element(array: Array) -> int:
    return int(helper.np_dtype_to_tensor_dtype(array.dtype))


def model_of(
    nodes: Sequence[Any],
    given: Mapping[str, Array],
    outputs: Sequence[str],
    stored: Mapping[str, Array],
    opset: int,
    opened: Sequence[str] = (),
) -> Any:
    """A model of inputs with the types of arrays; of those in `opened`, the outermost extent is open."""
    shapes = {name: [*each.shape] for name, each in given.items()}
    shapes |= {name: ["n", *shapes[name][1:]] for name in opened}
    graph = helper.make_graph(
        nodes,
        "model",
        [helper.make_tensor_value_info(name, element(each), shapes[name]) for name, each in given.items()],
        [onnx.ValueInfoProto(name=name) for name in outputs],
        [numpy_helper.from_array(each, name) for name, each in stored.items()],
    )
    ir_version = 8 if opset < 19 else 10
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir_version)


def run(proto: Any, given: Mapping[str, Array]) -> list[Array]:
    """ONNX Runtime's results, nothing fused; those of ONNX's reference evaluator where it has no kernel."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        session = onnxruntime.InferenceSession(proto.SerializeToString(), options)
    except onnxruntime.capi.onnxruntime_pybind11_state.NotImplemented:
        opset = proto.opset_import[0].version
        kinds = [each for each in proto.graph.node if each.op_type in UNLIKE]
        if any(UNLIKE[each.op_type](each, opset) for each in kinds):
            raise
        with np.errstate(all="ignore"):
            return [np.asarray(each) for each in ReferenceEvaluator(proto).run(None, dict(given))]
    return [*session.run(None, dict(given))]


def read_by(graph: Any) -> set[str]:
    """The values that an inner graph reads from outside of it."""
    made, read = {each.name for each in (*graph.input, *graph.initializer)}, set[str]()
    for node in graph.node:
        inner = [each.g for each in node.attribute if each.HasField("g")]
        read |= {*filter(None, node.input), *(name for each in inner for name in read_by(each))} - made
        made |= set(node.output)
    return read | {each.name for each in graph.output} - made


@dataclass
class Drawing:
    """A model as far as it is drawn: its nodes, and the elements of each value."""

    seed: int
    opset: int
    nodes: list[Any] = field(default_factory=list)
    given: dict[str, Array] = field(default_factory=dict)
    stored: dict[str, Array] = field(default_factory=dict)
    found: dict[str, Array] = field(default_factory=dict)  # what is given, and the results
    rng: random.Random = field(init=False)
    draws: Any = field(init=False)
    count: int = 0

    def __post_init__(self) -> None:
        self.rng, self.draws = random.Random(self.seed), np.random.default_rng(self.seed)

    def named(self) -> str:
        self.count += 1
        return f"v{self.count}"

    def values(self, *shape: int, fan: int = 1, dtype: Any = np.float32) -> Array:
        """Random elements of a dtype: floats of which `fan` make a sum of one's size, integers, or truths."""
        kind = np.dtype(dtype).kind
        if kind == "b":
            return np.asarray(self.draws.random(shape) < 0.5)
        if kind in "iu":
            return np.asarray(self.draws.integers(0 if kind == "u" else -9, 10, shape), dtype)
        return np.asarray(self.draws.standard_normal(shape) / max(1, fan) ** 0.5, dtype)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self[name].shape)

    def __getitem__(self, name: str) -> Array:
        return self.found[name] if name in self.found else self.stored[name]

    def pick(self, claim: Callable[[Array], bool] = lambda _: True) -> str:
        """A value that the claim holds for, rather a late one."""
        names = [name for name, each in self.found.items() if claim(each)]
        if not names:
            raise UnsoundError
        return names[-1] if self.rng.random() < 0.6 else self.rng.choice(names)

    def constant(self, array: Array) -> str:
        """An initializer, or a node's result."""
        name, array = self.named(), np.asarray(array)
        if self.rng.random() < 0.8:
            self.stored[name] = array
        else:
            node = helper.make_node("Constant", [], [name], value=numpy_helper.from_array(array))
            self.nodes.append(node)
            self.stored[name] = array
        return name

    def add(self, kind: str, *inputs: str | Array | None, count: Any = 1, **attributes: Any) -> str:
        """Adds a node on values and constants, None for an input that is left out; its first result."""
        names = [
            "" if each is None else each if isinstance(each, str) else self.constant(each) for each in inputs
        ]
        node = helper.make_node(kind, names, [self.named() for _ in range(count)], **attributes)
        made = self._tried(node)
        self.nodes.append(node)
        self.found |= dict(zip(node.output, made, strict=True))
        first: str = node.output[0]
        return first

    def _tried(self, node: Any) -> list[Array]:
        """A node's results; refused where nothing runs it, or rounding of what it reads changes them much."""
        inner = [each.g for each in node.attribute if each.HasField("g")]
        read = {*filter(None, node.input), *(name for each in inner for name in read_by(each))}
        given = {name: self.found[name] for name in sorted(read) if name in self.found}
        stored = {name: self.stored[name] for name in sorted(read) if name not in given}
        proto = model_of([node], given, node.output, stored, self.opset)
        try:
            made = run(proto, given)
        except Exception as error:
            raise UnsoundError(str(error)) from None
        if not all(map(is_sound, made)):
            raise UnsoundError("sizes")
        for sign in (-1, 1) if any(is_float(each) for each in given.values()) else ():
            moved = {name: shaken(each, sign, self.draws) for name, each in given.items()}
            self._check(made, run(proto, moved))
        return made

    def _check(self, made: Sequence[Array], moved: Sequence[Array]) -> None:
        for one, other in zip(made, moved, strict=True):
            if one.shape != other.shape or distance(one, other) > GROWS * rounded(one):
                raise UnsoundError("rounding")

    def attempt(self, step: Callable[[Drawing], object]) -> bool:
        """Whether a step of some nodes could be added; the drawing is as it was where it could not."""
        was = len(self.nodes), dict(self.stored), dict(self.found)
        try:
            step(self)
        except (UnsoundError, IndexError, ValueError, ZeroDivisionError):
            del self.nodes[was[0] :]
            self.stored, self.found = was[1:]
            return False
        return True

    def proto(self, outputs: Sequence[str], opened: Sequence[str] = ()) -> Any:
        made = {name for node in self.nodes for name in node.output}
        stored = {name: each for name, each in self.stored.items() if name not in made}
        return model_of(self.nodes, self.given, outputs, stored, self.opset, opened)


def is_float(array: Array) -> bool:
    return np.dtype(array.dtype).name in ROUNDED


def rounded(array: Array) -> float:
    """How far rounding may move a value, over its largest element."""
    return ROUNDED.get(np.dtype(array.dtype).name, 0.0)


def is_sound(array: Array) -> bool:
    if array.dtype.kind in "OSU" or array.size > MOST or array.ndim > 6:
        return False
    wide = array.astype(np.float64)
    return bool(np.isfinite(wide).all()) and (
        array.dtype.kind not in "f" or np.abs(wide).max(initial=0) < LARGEST
    )


def shaken(array: Array, sign: int, draws: Any) -> Array:
    """Floats, moved as far as rounding might."""
    if not is_float(array):
        return array
    far = rounded(array) * np.abs(array.astype(np.float64)).max(initial=0)
    moved = array.astype(np.float64) + sign * far * draws.choice((1, 1, -1), array.shape)
    return np.asarray(moved, array.dtype)


def distance(got: Array, want: Array) -> float:
    """The largest difference, over the largest element; of integers and truths, whether there is any."""
    if not is_float(want):
        return float(not np.array_equal(got, want))
    wide = want.astype(np.float64)
    scale = max(1e-3, float(np.abs(wide).max(initial=0)))
    return float(np.abs(got.astype(np.float64) - wide).max(initial=0)) / scale
