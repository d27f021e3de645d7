"""Orders of operators that MIOpen's fused kernels accept, and then compute as if it were another order.

Their check of the order lets each of these pass, but the kernel computes activation(normalization(convolution
+ bias)), with the first operator of each kind.
"""

from collections.abc import Iterator

from fuseplan.plans.plan import FusionPlan

SRC = "{dtype}[2x16x9x10{layout}] -> conv2d(24, kernel=3, padding=1)"
# The combination's letters, the plan's operators behind the convolution, those that MIOpen computes.
ORDERS = (
    ("CAN", "leaky_relu(0.25) -> batch_norm", "batch_norm -> leaky_relu(0.25)"),
    ("CAA", "leaky_relu(0.25) -> tanh", "leaky_relu(0.25)"),
    ("CNN", "batch_norm -> batch_norm", "batch_norm"),
    ("CANA", "leaky_relu(0.25) -> batch_norm -> tanh", "batch_norm -> leaky_relu(0.25)"),
    ("CAN", "tanh -> batch_norm(per_activation)", "batch_norm(per_activation) -> tanh"),
)


def orders(*dtypes: str) -> Iterator[tuple[FusionPlan, FusionPlan]]:
    """Each plan in both layouts and each dtype, with the one that MIOpen computes in its place."""
    for _, meant, computed in ORDERS:
        for dtype in dtypes:
            for layout in ("", ", nhwc"):
                src = SRC.format(dtype=dtype, layout=layout)
                yield FusionPlan.parse(f"{src} -> {meant}"), FusionPlan.parse(f"{src} -> {computed}")
