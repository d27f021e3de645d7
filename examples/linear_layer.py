"""A linear layer as torch stores it, with bias and gelu in one kernel; the rows of a batch of matrices.

`linear` and `matmul` sum over the last axis, as in torch: a batch of matrices [B, M, K] is f32[BxMxK].
"""

import numpy as np

import fuseplan
from fuseplan import Bias, FusionPlan, Gelu, Linear, Matmul


def main() -> None:
    generator = np.random.default_rng(1)
    weight = generator.standard_normal((256, 128), np.float32) / np.sqrt(
        np.float32(128)
    )  # as nn.Linear has it
    bias = generator.standard_normal(256, np.float32)

    plan = FusionPlan("f32[64x128]", Linear(256), Bias(), Gelu("tanh"))
    compiled = fuseplan.compile(plan)
    layer = compiled.bind(weight=weight, bias=bias)
    rows = generator.standard_normal((64, 128), np.float32)
    dst = layer(rows)
    error = np.abs(dst - plan.reference(rows, {"weight": weight, "bias": bias})).max()
    print(f"{plan}\n    {compiled.kernels} kernel, dst {dst.shape}, error {error:.0e}")

    # Scores of attention: each head's queries times its own keys, with no copy of either.
    heads, length, depth = 4, 32, 16
    queries, keys = (generator.standard_normal((heads, length, depth), np.float32) for _ in range(2))
    plan = FusionPlan(f"f32[{heads}x{length}x{depth}]", Matmul(length, transposed=True, batched=True))
    scores = fuseplan.compile(plan)(queries, weight=keys)
    error = np.abs(scores - queries @ keys.transpose(0, 2, 1)).max()
    print(f"{plan}\n    scores {scores.shape}, error {error:.0e}")


if __name__ == "__main__":
    main()
