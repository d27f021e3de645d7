"""The end of a residual block: convolution, batch normalization, residual and activation in one kernel.

relu(batch_norm(conv(src)) + other): unfused, four kernels write and read the whole tensor between them. The
residual is read where it lies, so it has the layout of the plan's output.
"""

import numpy as np

import fuseplan
from fuseplan import FusionPlan

PLAN = "f32[1x64x56x56, nhwc] -> conv2d(64, kernel=3, padding=1) -> batch_norm -> add -> relu"


def main() -> None:
    plan = FusionPlan.parse(PLAN)
    for each in plan.operands:
        made = each
        print(f"{each.key:<9} {made.dtype}{list(made.shape)}, for {plan[each.step].op.name}")

    generator = np.random.default_rng(1)
    given = {
        each.key: generator.standard_normal(each.shape, np.float32)
        for each in plan.operands
        if each.key != "other"
    }
    given["weight"] *= np.float32(0.04)
    given["variance"] = np.abs(given["variance"]) + np.float32(0.5)
    src, other = fuseplan.empty(plan.src), fuseplan.empty(plan.output)
    src[...] = generator.standard_normal(src.shape, np.float32)
    other[...] = generator.standard_normal(other.shape, np.float32)

    # The constants are packed once; the residual is another in every call.
    block = fuseplan.compile(plan).bind(**given)
    print(f"not bound: {', '.join(block.missing)}")
    dst = block(src, other=other)

    exact = plan.reference(src, {**given, "other": other})
    print(f"error {np.abs(dst - exact).max() / np.abs(exact).max():.0e} of the largest output")
    saved = fuseplan.explain(plan).to_json()["traffic"]["saved"]
    print(f"{saved / 1e6:.1f} MB less to move than with a kernel for each operator")


if __name__ == "__main__":
    main()
