"""The CPU's kernel templates, in order of preference: of equal estimates, the earlier wins.

To add one: a module with a `Template`, and its line in TEMPLATES.
"""

from __future__ import annotations

from fuseplan.backends.cpu.templates.amx import Amx
from fuseplan.backends.cpu.templates.attention import Attention
from fuseplan.backends.cpu.templates.attention_gradient import AttentionGradient
from fuseplan.backends.cpu.templates.depthwise import Depthwise, Grouped
from fuseplan.backends.cpu.templates.depthwise_planes import DepthwisePlanes, GroupedPlanes
from fuseplan.backends.cpu.templates.direct import Direct
from fuseplan.backends.cpu.templates.grouped_gradient import GroupedGradient
from fuseplan.backends.cpu.templates.grouped_gradient_planes import GroupedGradientPlanes
from fuseplan.backends.cpu.templates.planes import Planes
from fuseplan.backends.cpu.templates.pointwise import Pointwise
from fuseplan.backends.cpu.templates.reduction import Reduction
from fuseplan.backends.cpu.templates.scan import Scan
from fuseplan.backends.cpu.templates.summary import ProductSummary
from fuseplan.backends.cpu.templates.winograd import Winograd
from fuseplan.kernels.template import Template

TEMPLATES: tuple[type[Template], ...] = (
    Depthwise,
    DepthwisePlanes,
    Grouped,
    GroupedPlanes,
    GroupedGradient,
    GroupedGradientPlanes,
    Winograd,
    Amx,
    Planes,
    Direct,
    ProductSummary,
    Attention,
    AttentionGradient,
    Reduction,
    Scan,
    Pointwise,
)
