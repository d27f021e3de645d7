"""An activation of one's own: a formula as text, or as a Python function, becomes part of the kernel.

The function is traced, once: it is given expressions, and what it builds of them is the formula. Its
parameters are numbers given at run time.
"""

import numpy as np

import fuseplan
from fuseplan import Bias, Conv2d, Expression, FusionPlan
from fuseplan.scalar import Scalar, exp, maximum, where


def squared_relu(x: Scalar) -> Scalar:
    """The larger of x and 0, squared."""
    positive = maximum(x, 0)
    return positive * positive


def shrink(x: Scalar, threshold: Scalar) -> Scalar:
    """x moved towards 0 by the threshold, and 0 between: soft thresholding."""
    return where(x > threshold, x - threshold, where(x < -threshold, x + threshold, 0))


def main() -> None:
    written = Expression("x * sigmoid(k * x)", k=1.702)
    traced = Expression(shrink, threshold=0.5)
    square = Expression(squared_relu)
    gauss = Expression(lambda x, width: exp(-(x * x) / width), width=2)

    src = np.linspace(-2, 2, 9, dtype=np.float32).reshape(1, 9)
    for op in (written, traced, square, gauss):
        plan = FusionPlan("f32[1x9]", op)
        dst = fuseplan.compile(plan)(src)
        error = np.abs(dst - plan.reference(src, {})).max()
        shown = " ".join(f"{value:.3f}" for value in dst[0])
        print(f"{op.expression}\n    {shown}, error {error:.0e}")

    # It fuses as any other operator does, and its parameter changes without a new kernel.
    plan = FusionPlan("f32[1x3x32x32, nhwc]", Conv2d(8, kernel=3), Bias(), traced)
    compiled = fuseplan.compile(plan)
    generator = np.random.default_rng(1)
    layer = compiled.bind(
        weight=generator.standard_normal((8, 3, 3, 3), np.float32), bias=np.zeros(8, np.float32)
    )
    image = fuseplan.empty(plan.src)
    image[...] = generator.standard_normal(image.shape, np.float32)
    print(plan)
    for threshold in (0.0, 2.0, 8.0):
        zeros = np.mean(layer(image, threshold=threshold) == 0)
        print(f"    threshold {threshold}: {zeros:.0%} zeros, {compiled.kernels} kernel")


if __name__ == "__main__":
    main()
