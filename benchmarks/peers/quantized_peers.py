"""ONNX Runtime on products and convolutions of integers, in three forms, and ours in f32 on their numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np

from fuseplan.bench.peers.onnx_peer import OnnxRuntime, Writer
from fuseplan.bench.peers.ours import Fuseplan
from fuseplan.bench.peers.peer import Array, Arrays, Prepared
from fuseplan.language.dtypes import dtype_of
from fuseplan.language.tensor import TensorSpec
from fuseplan.measure.clock import rotating
from fuseplan.measure.data import reference, stored
from fuseplan.measure.layers import CannotRunError, Layer, convolution_of, plain_layers
from fuseplan.measure.spaces import Tensors
from fuseplan.ops.conv import Conv
from fuseplan.ops.conversion import Dequantize, Quantize
from fuseplan.ops.matmul import Product
from fuseplan.plans.plan import FusionPlan

SCALE = np.float32(2.0**-6)  # of src in a model: the plan has the product of it and the weight's scales
CUSTOM = "com.microsoft"
LAST, FIRST = (0, 2, 3, 1), (0, 3, 1, 2)  # the orders of axes between both layouts of images


@dataclass(frozen=True)
class Parts:
    """A plan of integers, as quantized models have it: zero point, contraction, scales, bias, .., integers.

    Attributes:
        point: the layer that takes src's zero point away; None where there is none.
        contraction, scaled: the sum and its scales.
        bias: behind them; None where there is none.
        behind: what follows, in f32.
        quantized: the layer that rounds the result to integers; None where the result is in f32.
    """

    point: Layer | None
    contraction: Layer
    scaled: Layer
    bias: Layer | None
    behind: tuple[Layer, ...]
    quantized: Layer | None


def parts_of(plan: FusionPlan) -> Parts:
    """The parts of a plan; a CannotRunError where it is another one."""
    ahead = plain_layers(plan)
    point = ahead.pop(0) if isinstance(ahead[0].step.op, Dequantize) else None
    quantized = ahead.pop() if isinstance(ahead[-1].step.op, Quantize) else None
    is_known = len(ahead) > 1 and isinstance(ahead[0].step.op, Conv | Product)
    if plan.src.dtype not in ("i8", "u8") or not is_known or not isinstance(ahead[1].step.op, Dequantize):
        raise CannotRunError("it is measured on products and convolutions of i8 and u8 with scales behind")
    contraction, scaled, *rest = ahead
    bias = rest.pop(0) if rest and rest[0].name == "bias" else None
    return Parts(point, contraction, scaled, bias, tuple(rest), quantized)


class _Model(Writer):
    """A plan of integers as a model: `form` is `qdq`, `qlinear` or `integer`.

    Images whose channels lie last come and go so, between transposes that ONNX Runtime takes away.
    """

    def __init__(self, plan: FusionPlan, arrays: Arrays, form: str) -> None:
        super().__init__(plan, arrays)
        self._parts, self._form, self.is_last = parts_of(plan), form, has_last(plan)

    def written(self) -> bytes:
        """The model's bytes."""
        helper, src = self._helper, self._plan.src
        self._last = "src"
        if self.is_last:
            self._node("Transpose", ["src"], perm=FIRST)
        {"qdq": self._qdq, "qlinear": self._qlinear, "integer": self._integer}[self._form]()
        if self.is_last:
            self._node("Transpose", [self._last], output="dst", perm=LAST)
        else:
            self._node("Identity", [self._last], output="dst")
        ends = []
        for name, spec in (("src", src), ("dst", self._plan.output)):
            shape = [spec.shape[axis] for axis in (LAST if self.is_last else range(spec.rank))]
            kind = helper.np_dtype_to_tensor_dtype(dtype_of(spec.dtype).array)
            ends.append(helper.make_tensor_value_info(name, kind, shape))
        graph = helper.make_graph(self._nodes, "plan", ends[:1], ends[1:], self._stored)
        opsets = [helper.make_opsetid("", self._opset), helper.make_opsetid(CUSTOM, 1)]
        return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString())

    def _keep(self, name: str, array: Any) -> str:
        """A constant in its own dtype."""
        self._stored.append(
            self._numpy.from_array(np.ascontiguousarray(array).reshape(np.shape(array)), name)
        )
        return name

    def _operand(self, layer: Layer, name: str) -> Array:
        return self._arrays[layer.keys[name]]

    @property
    def _op(self) -> Any:
        return self._parts.contraction.step.op

    @property
    def _is_product(self) -> bool:
        return isinstance(self._op, Product)

    def _zero(self) -> Array:
        """The zero point of src."""
        point, dtype = self._parts.point, dtype_of(self._plan.src.dtype).array
        is_moved = point is not None and "zero_point" in point.keys
        return self._operand(point, "zero_point").reshape(()) if is_moved and point else np.zeros((), dtype)

    def _weight(self) -> tuple[Array, int]:
        """The weight's integers, with a product's features last, and the axis of the features."""
        weight = self._operand(self._parts.contraction, "weight")
        if not self._is_product:
            return weight, 0
        return (weight.T if self._op.transposed else weight), 1

    def _scales(self) -> Array:
        """The scales of the weight: exact, since src's is a power of two."""
        scales = self._operand(self._parts.scaled, "scale").astype(np.float32) / SCALE
        return scales.reshape(() if scales.size == 1 else -1)

    def _bias(self) -> Array | None:
        """The bias in units of the sums."""
        bias = self._parts.bias
        if bias is None:
            return None
        return np.rint(self._operand(bias, "bias") / (self._scales() * SCALE)).astype(np.int32)

    def _window(self) -> dict[str, Any]:
        op, shape = convolution_of(self._parts.contraction)
        pads = [low for low, _ in shape.padding] + [high for _, high in shape.padding]
        ends = {"kernel_shape": shape.kernel, "strides": shape.stride, "dilations": shape.dilation}
        return {**{name: list(each) for name, each in ends.items()}, "pads": pads, "group": op.groups}

    def _ends(self) -> list[str]:
        """The scale and zero point of the result."""
        layer = self._parts.quantized
        assert layer is not None  # its callers ask
        scale = self._operand(layer, "scale").astype(np.float32)
        point = self._point().astype(self._integers)
        return [self._keep("dst_scale", scale.reshape(())), self._keep("dst_zero", point)]

    @property
    def _integers(self) -> Any:
        """NumPy's dtype of the result's integers."""
        return dtype_of(self._plan.output.dtype).array

    def _point(self) -> Array:
        """The zero point of the result."""
        layer = self._parts.quantized
        has_point = layer is not None and "zero_point" in layer.keys
        return self._operand(layer, "zero_point").reshape(()) if has_point and layer else np.zeros(())

    def _finished(self) -> None:
        """The operators in f32, and the rounding to integers."""
        for layer in self._parts.behind:
            self.add(layer)
        if self._parts.quantized is not None:
            self._node("QuantizeLinear", [self._last, *self._ends()])

    def _qdq(self) -> None:
        numbers = [self._keep("src_scale", SCALE), self._keep("src_zero", self._zero())]
        src = self._node("DequantizeLinear", [self._last, *numbers])
        (weight, axis), scales = self._weight(), self._scales()
        points = self._keep("weight_zero", np.zeros(scales.shape, np.int8))
        ends = [self._keep("weight", weight), self._keep("weight_scale", scales), points]
        inputs = [src, self._node("DequantizeLinear", ends, axis=axis)]
        bias = self._bias()
        if bias is not None:
            sums = np.broadcast_to(scales * SCALE, bias.shape).astype(np.float32)
            kept = [self._keep("bias", bias), self._keep("bias_scale", sums)]
            kept.append(self._keep("bias_zero", np.zeros_like(bias)))
            inputs.append(self._node("DequantizeLinear", kept, axis=0))
        if self._is_product:
            self._node("Gemm", inputs)
        else:
            self._node("Conv", inputs, **self._window())
        self._finished()

    def _qlinear(self) -> None:
        """QLinearConv, or QGemm of ONNX Runtime's; a relu is the result's least integer."""
        parts = self._parts
        is_relu = [each.name for each in parts.behind] == ["relu"]
        if parts.quantized is None or (parts.behind and not is_relu):
            raise CannotRunError(
                "QLinear operators have a result of integers and no operators behind the sum"
            )
        (weight, _), scales, bias, ends = self._weight(), self._scales(), self._bias(), self._ends()
        if is_relu and self._point() != np.iinfo(self._integers).min:
            raise CannotRunError("a relu is the least integer where that is the zero point")
        points = self._keep("weight_zero", np.zeros(scales.shape, np.int8))
        inputs = [self._last, self._keep("src_scale", SCALE), self._keep("src_zero", self._zero())]
        inputs += [self._keep("weight", weight), self._keep("weight_scale", scales), points]
        more = [] if bias is None else [self._keep("bias", bias)]
        if self._is_product:
            self._node("QGemm", [*inputs, *(more or [""]), *ends], domain=CUSTOM)
        else:
            self._node("QLinearConv", [*inputs, *ends, *more], **self._window())

    def _integer(self) -> None:
        """MatMulInteger or ConvInteger, and its sums in f32."""
        (weight, _), scales = self._weight(), self._operand(self._parts.scaled, "scale").astype(np.float32)
        inputs = [self._last, self._keep("weight", weight), self._keep("src_zero", self._zero())]
        if self._is_product:
            self._node("MatMulInteger", inputs)
        else:
            self._node("ConvInteger", inputs, **self._window())
        self._node("Cast", [self._last], to=1)
        is_spread = scales.size > 1 and not self._is_product
        shape = (-1, *(1,) * (self._plan.output.rank - 2)) if is_spread else scales.shape
        self._node("Mul", [self._last, self._keep("scale", scales.reshape(shape))])
        if self._parts.bias is not None:
            self._channels("Add", self._parts.bias, "bias")
        self._finished()


def has_last(plan: FusionPlan) -> bool:
    """Whether a plan is of images whose channels lie last."""
    return plan.src.rank == len(LAST) and plan.src.is_channels_last


class _OfIntegers(OnnxRuntime):
    """onnxruntime with all optimizations on a model of integers."""

    form: ClassVar[str]
    config: ClassVar[tuple[tuple[str, str], ...]] = ()

    def __init__(self, threads: int) -> None:
        super().__init__(threads)
        for key, value in self.config:
            self._options.add_session_config_entry(key, value)

    def prepare(self, plan: FusionPlan, copies: Sequence[Arrays]) -> Prepared:
        """Opens a session, and binds each copy's tensors once."""
        model = _Model(plan, copies[0], self.form)
        how = {"providers": ["CPUExecutionProvider"]}
        session = self._runtime.InferenceSession(model.written(), self._options, **how)
        bindings = []
        to, back = (LAST, FIRST) if model.is_last else (range(plan.src.rank),) * 2
        shape = [plan.output.shape[axis] for axis in to]
        for arrays in copies:
            binding, of = session.io_binding(), self._runtime.OrtValue
            src = np.ascontiguousarray(arrays["src"].transpose(to))
            binding.bind_ortvalue_input("src", of.ortvalue_from_numpy(src))
            made = of.ortvalue_from_shape_and_type(shape, dtype_of(plan.output.dtype).array)
            binding.bind_ortvalue_output("dst", made)
            bindings.append((binding, made))

        def result() -> Array:
            session.run_with_iobinding(bindings[0][0])
            return np.array(bindings[0][1].numpy()).transpose(back)

        calls = [partial(session.run_with_iobinding, binding) for binding, _ in bindings]
        return Prepared(rotating(calls) if len(calls) > 1 else calls[0], result)


class Qdq(_OfIntegers):
    """Of QuantizeLinear and DequantizeLinear around operators of floats, as exporters write quantized models.

    Without VNNI its sums of u8 by i8 saturate at 16 bits.
    """

    name, form = "qdq:onnxruntime", "qdq"


class QdqExact(Qdq):
    """The same with exact sums on processors without VNNI, which it is asked for."""

    name = "qdq:exact"
    config = (("session.x64quantprecision", "1"),)


class QLinear(_OfIntegers):
    """Of QLinearConv or QGemm."""

    name, form = "qlinear:onnxruntime", "qlinear"


class Integer(_OfIntegers):
    """Of MatMulInteger or ConvInteger, as dynamically quantized models have them."""

    name, form = "integer:onnxruntime", "integer"


class FuseplanF32(Fuseplan):
    """The same layer before it was quantized: in f32, on the numbers that the integers stand for."""

    name = "fuseplan:f32"

    def prepare(self, plan: FusionPlan, copies: Sequence[Tensors]) -> Prepared:
        """Compiles the plan in f32; `result` rounds what it computes to integers where the plan does."""
        parts = parts_of(plan)
        ops = [each.step.op for each in (parts.contraction, parts.bias, *parts.behind) if each]
        wide = FusionPlan(plan.src.with_dtype("f32"), *ops)
        given = [self._wide(plan, parts, wide, arrays) for arrays in copies]
        prepared = super().prepare(wide, given)
        if parts.quantized is None:
            return prepared
        rounded = FusionPlan(wide.output, parts.quantized.step.op)
        keys = parts.quantized.keys
        numbers = {each.key: copies[0][keys[each.name]] for each in rounded.steps[0].operands}

        def result() -> Any:
            return stored(plan.output, reference(rounded, {"src": prepared.result(), **numbers}))

        return replace(prepared, result=result)

    @staticmethod
    def _wide(plan: FusionPlan, parts: Parts, wide: FusionPlan, arrays: Tensors) -> dict[str, Any]:
        """The tensors in f32: src less its zero point, the weight with the scales."""
        point, scales = parts.point, arrays[parts.scaled.keys["scale"]]
        zero = arrays[point.keys["zero_point"]] if point and "zero_point" in point.keys else 0
        src: TensorSpec = wide.src
        made = {"src": stored(src, arrays["src"].astype(np.float64) - np.asarray(zero, np.float64))}
        weight = arrays[parts.contraction.keys["weight"]].astype(np.float32)
        op = parts.contraction.step.op
        is_last = isinstance(op, Product) and not op.transposed
        spread = scales if is_last or scales.size == 1 else scales.reshape(-1, *(1,) * (weight.ndim - 1))
        made[wide.steps[0].keys["weight"]] = weight * spread.astype(np.float32)
        layers = (each for each in (parts.bias, *parts.behind) if each)
        for old, new in zip(layers, plain_layers(wide)[1:], strict=True):
            made |= {new.keys[name]: arrays[key] for name, key in old.keys.items()}
        return made


ON_INTEGERS = (Qdq, QdqExact, QLinear, Integer, FuseplanF32)
