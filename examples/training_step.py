"""A layer of batch normalization and softplus learns by gradient descent: two kernels a step.

The target is the same layer with another scale and shift; both are found again. Running statistics follow the
batches; frozen at the end, they normalize a batch nearly as its own do.
"""

import numpy as np

import fuseplan
from fuseplan import BatchNorm, BatchNormBackward, BatchNormTraining, FusionPlan, Softplus

SRC = "f32[32x16x10x10]"
RATE = 2.0


def main() -> None:
    forward = fuseplan.compile(FusionPlan(SRC, BatchNormTraining(running=True, momentum=0.1), Softplus()))
    backward = fuseplan.compile(FusionPlan(SRC, BatchNormBackward(Softplus())))
    passes = [each.explain().to_json()["passes"]["count"] for each in (forward, backward)]
    print(f"forward: {forward.kernels} kernel, {passes[0]} passes; backward: {backward.kernels}, {passes[1]}")

    generator = np.random.default_rng(1)
    running = {"running_mean": np.zeros(16, np.float32), "running_variance": np.ones(16, np.float32)}
    wanted = {"scale": generator.uniform(0.5, 2, 16), "shift": generator.uniform(-1, 1, 16)}
    learnt = {"scale": np.ones(16, np.float32), "shift": np.zeros(16, np.float32)}
    for step in range(61):
        x = generator.standard_normal((32, 16, 10, 10), np.float32) * 2 + 3
        made = forward(x, **learnt, **running)
        target = forward.plan.reference(x, {**wanted, **running})
        error = (made.out - target).astype(np.float32)
        given = {"input": x, "mean": made.saved_mean, "inverse_variance": made.saved_inverse_variance}
        gradients = backward(error / error[:, 0].size, **learnt, **given)
        learnt["scale"] -= RATE * gradients.scale_gradient
        learnt["shift"] -= RATE * gradients.shift_gradient
        if step % 20 == 0:
            print(f"step {step:2}: mean squared error {np.square(error).mean():.1e}")

    frozen = fuseplan.compile(FusionPlan(SRC, BatchNorm(), Softplus()))
    statistics = {"mean": running["running_mean"], "variance": running["running_variance"]}
    differs = np.abs(frozen(x, **learnt, **statistics) - target).mean()
    print(f"frozen: differs from training by {differs:.0e}")


if __name__ == "__main__":
    main()
