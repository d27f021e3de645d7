"""The templates for GPUs, the best first."""

from __future__ import annotations

from fuseplan.backends.triton.template import GpuTemplate
from fuseplan.backends.triton.templates.attention import GpuAttention
from fuseplan.backends.triton.templates.attention_gradient import GpuAttentionGradient
from fuseplan.backends.triton.templates.depthwise import GpuDepthwise
from fuseplan.backends.triton.templates.hopper import Hopper
from fuseplan.backends.triton.templates.hopper_attention import HopperAttention
from fuseplan.backends.triton.templates.hopper_attention_gradient import HopperAttentionGradient
from fuseplan.backends.triton.templates.normalization import GpuNormalization
from fuseplan.backends.triton.templates.pointwise import GpuPointwise
from fuseplan.backends.triton.templates.product import Product
from fuseplan.backends.triton.templates.reduction import GpuReduction
from fuseplan.backends.triton.templates.scan import GpuScan
from fuseplan.backends.triton.templates.summary import ProductSummary

TEMPLATES: tuple[type[GpuTemplate], ...] = (
    GpuPointwise,
    GpuNormalization,
    GpuReduction,
    GpuScan,
    HopperAttention,
    GpuAttention,
    HopperAttentionGradient,
    GpuAttentionGradient,
    GpuDepthwise,
    ProductSummary,
    Hopper,
    Product,
)  # fmt: skip
