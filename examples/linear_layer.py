"""A linear layer as torch stores it, with bias and gelu in one kernel; the rows of a batch of matrices.

What `matmul` sums over is the channel axis: rows of a matrix are f32[NxC]. A batch of matrices [B, M, K] is
the same memory as f32[BxKxM, nwc], so a transposed view is enough.
"""

import numpy as np

import fuseplan
from fuseplan import Bias, FusionPlan, Gelu, Matmul


def main() -> None:
    generator = np.random.default_rng(1)
    weight = generator.standard_normal((256, 128), np.float32) / np.sqrt(
        np.float32(128)
    )  # as nn.Linear has it
    bias = generator.standard_normal(256, np.float32)

    plan = FusionPlan("f32[64x128]", Matmul(256, transposed=True), Bias(), Gelu("tanh"))
    compiled = fuseplan.compile(plan)
    layer = compiled.bind(weight=weight, bias=bias)
    rows = generator.standard_normal((64, 128), np.float32)
    dst = layer(rows)
    error = np.abs(dst - plan.reference(rows, {"weight": weight, "bias": bias})).max()
    print(f"{plan}\n    {compiled.kernels} kernel, dst {dst.shape}, error {error:.0e}")

    # Scores of attention: each head's queries times its own keys, with no copy of either.
    heads, length, depth = 4, 32, 16
    queries, keys = (generator.standard_normal((heads, length, depth), np.float32) for _ in range(2))
    plan = FusionPlan(f"f32[{heads}x{depth}x{length}, nwc]", Matmul(length, transposed=True, batched=True))
    scores = fuseplan.compile(plan)(queries.transpose(0, 2, 1), weight=keys).transpose(0, 2, 1)
    error = np.abs(scores - queries @ keys.transpose(0, 2, 1)).max()
    print(f"{plan}\n    scores {scores.shape}, error {error:.0e}")


if __name__ == "__main__":
    main()
