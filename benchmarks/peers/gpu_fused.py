"""The fused kernels of cuDNN and cuBLASLt, as torch gives access to them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from fuseplan.bench.peers.peer import Prepared
from fuseplan.bench.peers.torch_peer import Torch
from fuseplan.language.attend import Attend
from fuseplan.measure.layers import CannotRunError, Layer, attended, convolution_of, plain_layers, running
from fuseplan.measure.spaces import Tensor, Tensors
from fuseplan.ops.conv import Conv
from fuseplan.ops.matmul import Product
from fuseplan.plans.plan import FusionPlan

CONVOLUTION = "conv2d"


class Library(Torch):
    """A kernel of a library that torch calls."""

    def held(self, plan: FusionPlan, copies: Sequence[Tensors]) -> dict[str, Tensor]:
        """The tensors in src's dtype and the layout that is measured."""
        from fuseplan.measure.torch_eager import as_taken

        (tensors,) = copies
        taken = as_taken(plan, tensors, running(plan), self.layout)
        return {key: tensor.to(tensors["src"].dtype) for key, tensor in taken.items()}


class Cudnn(Library):
    """cudnn_convolution_relu, and cudnn_convolution_add_relu where the plan adds a residual."""

    name = "cudnn"

    def takes(self, plan: FusionPlan) -> bool:
        """Convolution, bias, perhaps a residual, relu."""
        return super().takes(plan) and _words(plan) in (
            (CONVOLUTION, "bias", "relu"),
            (CONVOLUTION, "bias", "add", "relu"),
        )

    def prepare(self, plan: FusionPlan, copies: Sequence[Tensors]) -> Prepared:
        """Binds the one function that there is for the plan."""
        held, steps = self.held(plan, copies), plain_layers(plan)
        bias = held[steps[1].keys["bias"]]
        return _convolution(held, steps, held[steps[0].keys["weight"]], bias)


class CudnnChannelsLast(Cudnn):
    """The same in channels last."""

    name = "cudnn:nhwc"
    layout = "nhwc"


class CudnnFolded(Cudnn):
    """The same kernels for plans that normalize: the statistics are put into weights and bias beforehand.

    That is another sum than the plan's, rounded elsewhere; it is shown as what cuDNN can do at best.
    """

    name = "cudnn:folded"

    def takes(self, plan: FusionPlan) -> bool:
        """Convolution, batch norm, perhaps a residual, relu."""
        return _words(plan) in (
            (CONVOLUTION, "batch_norm", "relu"),
            (CONVOLUTION, "batch_norm", "add", "relu"),
        )

    def prepare(self, plan: FusionPlan, copies: Sequence[Tensors]) -> Prepared:
        """Folds in float64, rounds once."""
        (tensors,) = copies
        held, steps = self.held(plan, copies), plain_layers(plan)
        keys, epsilon = steps[1].keys, steps[1].parameters["epsilon"]
        scale, shift, mean, variance = (
            tensors[keys[name]].double() for name in ("scale", "shift", "mean", "variance")
        )
        factor = scale / (variance + epsilon).sqrt()
        weight = held[steps[0].keys["weight"]]
        folded = (weight.double() * factor.reshape(-1, 1, 1, 1)).to(weight.dtype)
        bias = (shift - mean * factor).to(weight.dtype)
        return _convolution(held, steps, folded, bias)


def _words(plan: FusionPlan) -> tuple[str, ...]:
    return tuple(step.op.name for step in plan.steps)


def _convolution(held: Tensors, steps: Sequence[Layer], weight: Tensor, bias: Tensor) -> Prepared:
    import torch

    op, window = convolution_of(steps[0])
    if any(low != high for low, high in window.padding):
        raise CannotRunError("cuDNN's convolution pads both sides alike")
    how = (list(window.stride), [low for low, _ in window.padding], list(window.dilation), op.groups)
    call: partial[Any]
    if steps[2].name == "add":
        if any(value != 1 for value in steps[2].parameters.values()):
            raise CannotRunError("the addition with factors is not measured in cuDNN")
        (residual,) = steps[2].keys.values()
        add = torch.cudnn_convolution_add_relu
        call = partial(add, held["src"], weight, held[residual], 1.0, bias, *how)
    else:
        call = partial(torch.cudnn_convolution_relu, held["src"], weight, bias, *how)
    return Prepared(call, call)


class CudnnAttention(Library):
    """cuDNN's attention, through torch."""

    name = "cudnn:attention"
    backend = "CUDNN_ATTENTION"
    function = "_scaled_dot_product_cudnn_attention"
    fixed: Sequence[Any] = (None, False, 0.0)  # no bias, no logarithms of sums, no dropout

    def takes(self, plan: FusionPlan) -> bool:
        """Attention alone."""
        return _words(plan) == ("attention",)

    def prepare(self, plan: FusionPlan, copies: Sequence[Tensors]) -> Prepared:
        """Binds the function."""
        import torch

        from fuseplan.measure.torch_functions import sdpa_options, stage_of

        held, (layer,) = self.held(plan, copies), plain_layers(plan)
        stage_of(layer)  # refuses what torch's attention has not
        if "bias" in layer.keys or "mask" in layer.keys:
            raise CannotRunError("attention with a mask is measured in gradients alone")
        function, options = getattr(torch.ops.aten, self.function), sdpa_options(layer)
        given = [held[layer.keys[name]] for name in ("key", "value")]
        how, scale = (*self.fixed, options["is_causal"]), options["scale"]

        def call() -> Tensor:
            return function(held["src"], *given, *how, scale=scale)[0]

        return Prepared(call, call)

    def prepare_backward(self, plan: FusionPlan, wrt: Sequence[str], tensors: Tensors) -> Prepared:
        """Through autograd, by the kernels of this library alone."""
        import torch

        (layer,) = plain_layers(plan)
        held = {key: each.detach().requires_grad_(key in wrt) for key, each in tensors.items()}
        given = {"src": held["src"]} | {name: held[key] for name, key in layer.keys.items()}
        with torch.enable_grad():
            out = self.forward(layer, given)
        return self._differentiated(out, [held[name] for name in wrt], tensors["grad"])

    def forward(self, layer: Layer, given: Tensors) -> Tensor:
        """The forward pass of tensors by attention's own names."""
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention

        from fuseplan.measure.torch_functions import mask_of, sdpa_options

        of, options = attended(layer), sdpa_options(layer)
        mask = mask_of(layer, given)
        if of.window:
            mask, options["is_causal"] = _band(of, given["src"].device), False
        if of.softcap or of.is_padded or of.offset or (mask is not None and options["is_causal"]):
            raise CannotRunError(f"{self.name} is not measured with these attributes")
        key, value = (given[name] for name in ("key", "value"))
        with sdpa_kernel([getattr(SDPBackend, self.backend)]):
            how = {"attn_mask": mask, "enable_gqa": of.group > 1, **options}
            return scaled_dot_product_attention(given["src"], key, value, **how)


def _band(of: Attend, device: Any) -> Tensor:
    """The keys that a query sees by its place, as a mask."""
    import torch

    apart = torch.arange(of.keys, device=device) - torch.arange(of.queries, device=device)[:, None]
    return (apart.abs() < of.window) & (apart <= 0 if of.is_causal else apart < of.keys)


class EfficientAttention(CudnnAttention):
    """The memory-efficient attention of torch, which takes masks: its gradients."""

    name = "efficient"
    backend = "EFFICIENT_ATTENTION"

    def takes(self, plan: FusionPlan) -> bool:
        """Attention alone, with a bias or a mask."""
        return super().takes(plan) and len(plan.operands) > len(("key", "value"))

    def prepare(self, plan: FusionPlan, copies: Sequence[Tensors]) -> Prepared:
        """Refuses: the others are faster."""
        raise CannotRunError("torch's memory-efficient attention is measured in gradients alone")


class FlashAttention(CudnnAttention):
    """FlashAttention 2, through torch."""

    name = "flash"
    function = "_scaled_dot_product_flash_attention"
    fixed = (0.0,)

    def forward(self, layer: Layer, given: Tensors) -> Tensor:
        """By the operator below torch's, which takes a window."""
        import torch

        from fuseplan.measure.torch_functions import sdpa_options

        of, options = attended(layer), sdpa_options(layer)
        if {"bias", "mask", "lengths"} & given.keys() or of.softcap or of.offset:
            raise CannotRunError("FlashAttention is not measured with these attributes")
        rows = [given[name].transpose(1, 2) for name in ("src", "key", "value")]
        reach = of.window - 1 if of.window else None
        made, *_ = torch.ops.aten._flash_attention_forward(
            *rows, None, None, of.queries, of.keys, 0.0, options["is_causal"], False, scale=options["scale"],
            window_size_left=reach, window_size_right=0 if of.is_causal and of.window else reach,
        )  # fmt: skip
        return made.transpose(1, 2)


class CublasLt(Library):
    """cuBLASLt's epilogue through torch._addmm_activation: product, bias, and relu or gelu(tanh).

    A 1x1 convolution of channels last is such a product too.
    """

    name = "cublaslt"

    def takes(self, plan: FusionPlan) -> bool:
        """A product with one weight for all rows, a bias, and one of the two activations."""
        words = _words(plan)
        if len(words) != 3 or words[1] != "bias" or not _is_product(plain_layers(plan)[0]):
            return False
        return words[2] == "relu" or plan[2].op.attributes().get("approximate") == "tanh"

    def prepare(self, plan: FusionPlan, copies: Sequence[Tensors]) -> Prepared:
        """Binds the function on a view of src as rows."""
        import torch

        held, steps = self.held(plan, copies), plain_layers(plan)
        rows, weight = _as_product(steps[0], held)
        bias = held[steps[1].keys["bias"]]
        call = partial(torch._addmm_activation, bias, rows, weight, use_gelu=steps[2].name == "gelu")
        output = plan.output

        def result() -> Tensor:
            made = call()
            rows = made.reshape(output.batch, *output.spatial, -1)
            return rows.movedim(-1, 1) if output.has_channel_names else rows.reshape(output.shape)

        return Prepared(call, result)


def _is_product(layer: Layer) -> bool:
    """Whether it multiplies the rows of one matrix, which lie as they do in memory."""
    op, src = layer.step.op, layer.step.src
    if isinstance(op, Product):
        return src.is_channels_last and not op.batched
    if not isinstance(op, Conv) or not src.is_channels_last or op.groups > 1:
        return False
    window = op.window(src)
    return not any(map(any, window.padding)) and {*window.kernel, *window.stride} == {1}


def _as_product(layer: Layer, held: Tensors) -> tuple[Tensor, Tensor]:
    """Rows of src, and the matrix they are multiplied with."""
    src, weight = held["src"], held[layer.keys["weight"]]
    if isinstance(layer.step.op, Product):
        return src.reshape(-1, src.shape[-1]), weight.t() if layer.step.op.transposed else weight
    return src.movedim(1, -1).reshape(-1, src.shape[1]), weight.reshape(weight.shape[0], -1).t()
