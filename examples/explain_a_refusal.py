"""What is refused, where, and what to do about it; and why a plan that is fused is fused as it is.

Four kinds of error: PlanError (it cannot be), Unsupported (it could be, but nothing computes it here),
BuildError (it is for another machine, or the toolchain failed), ArgumentError (what was passed to run).
"""

import numpy as np

import fuseplan
from fuseplan import Conv2d, FusionPlan, Relu, Unsupported


def main() -> None:
    # An operator that cannot be is refused where it is added.
    plan = FusionPlan("f32[1x16x28x28, nhwc]", Conv2d(32, kernel=3), Relu())
    try:
        plan.add(Conv2d(32, kernel=27))
    except fuseplan.PlanError as error:
        print(f"PlanError: {error}\n")

    # A plan that no single kernel computes is refused when it is compiled, with every reason.
    plan.add(Conv2d(32, kernel=3))
    try:
        fuseplan.compile(plan)
    except Unsupported as refused:
        print(f"Unsupported: {refused}\n")
        nearest = refused.refusals[0]
        print(f"{nearest.code}: operator {nearest.operator}, by the rule {nearest.tried}\n")
        first = FusionPlan(plan.src, *plan.ops[: nearest.operator])
        second = FusionPlan(first.output, *plan.ops[nearest.operator :])
        print(f"as two kernels:\n  {first}\n  {second}\n")

    # The same question without compiling, for any machine.
    told = fuseplan.explain(plan, "cpu:neon").to_json()
    print(f"fused: {told['fused']}; {[refusal['code'] for refusal in told['refusals']]}\n")

    # What is passed to a call is checked before anything is launched.
    try:
        fuseplan.compile(first)(np.zeros(first.src.shape, np.float32))
    except fuseplan.ArgumentError as error:
        print(f"ArgumentError: {error}\n")

    # A plan that is fused tells how, and what was passed over.
    print(fuseplan.explain(first, "cpu:avx2", threads=2))


if __name__ == "__main__":
    main()
