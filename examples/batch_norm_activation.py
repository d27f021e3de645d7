"""Batch normalization and activation in one pass, and parameters that change without a new kernel.

Statistics are operands, epsilon and the activation's slope are parameters: none of them is in the kernel.
"""

import numpy as np

import fuseplan
from fuseplan import BatchNorm, FusionPlan, LeakyRelu


def main() -> None:
    plan = FusionPlan("f32[8x64x28x28]", BatchNorm(epsilon=1e-5), LeakyRelu(0.1))
    compiled = fuseplan.compile(plan)
    print(f"{plan}: {compiled.kernels} kernel by {compiled.choice.template.name}")

    generator = np.random.default_rng(1)
    src = generator.standard_normal(plan.src.shape, np.float32) * 3 + 1
    statistics = {
        "mean": src.mean(axis=(0, 2, 3)),
        "variance": src.var(axis=(0, 2, 3)),
        "scale": np.ones(64, np.float32),
        "shift": np.zeros(64, np.float32),
    }
    normalize = compiled.bind(**statistics)
    for slope in (0.1, 0.0, 1.0):
        dst = normalize(src, negative_slope=slope)
        exact = plan.reference(src, statistics, {"negative_slope": slope})
        error = np.abs(dst - exact).max()
        print(f"slope {slope}: mean {dst.mean():+.3f}, error {error:.0e}")

    # The inverse of the deviation instead of the variance, as training saves it.
    saved = FusionPlan("f32[8x64x28x28]", BatchNorm(inverse=True), LeakyRelu(0.1))
    inverse = 1 / np.sqrt(statistics.pop("variance") + 1e-5)
    same = fuseplan.compile(saved)(src, inverse_variance=inverse, **statistics)
    print(f"with the inverse deviation: differs by {np.abs(same - normalize(src)).max():.0e}")


if __name__ == "__main__":
    main()
