"""Convolution, bias and activation as one kernel: plan, operators, compile, arguments, execute.

The life cycle is that of MIOpen's Fusion API; its example project fuses the same three operators. What is a
status to check there is an error here that says which operator cannot be, and why.
"""

import numpy as np

import fuseplan
from fuseplan import Arguments, Bias, Conv2d, FusionPlan, Relu, TensorSpec


def main() -> None:
    # The plan: an input, and operators in the order in which they are applied, each checked as it is added.
    plan = FusionPlan(TensorSpec((16, 32, 8, 8), "f32"))
    convolution = plan.add(Conv2d(64, kernel=5))
    bias = plan.add(Bias())
    plan.add(Relu())
    print(f"plan     {plan}")
    print(f"output   {plan.output}")

    # Compiled once, for this machine.
    compiled = fuseplan.compile(plan)
    print(f"kernels  {compiled.kernels}, by {compiled.choice}")

    # Arguments, set by operator.
    generator = np.random.default_rng(1)
    arguments = Arguments(plan)
    arguments.set(convolution, weight=generator.standard_normal((64, 32, 5, 5), np.float32))
    arguments.set(bias, bias=generator.standard_normal(64, np.float32))

    # Executed as often as wanted, with other inputs.
    for _ in range(2):
        src = generator.standard_normal(plan.src.shape, np.float32)
        dst = compiled.execute(src, arguments)
        exact = plan.reference(src, arguments.values)
        error = np.abs(dst - exact).max() / np.abs(exact).max()
        print(f"error    {error:.0e} of the largest output")

    # Other arguments need no new kernel.
    arguments.set(bias, bias=np.zeros(64, np.float32))
    dst = compiled.execute(src, arguments)
    print(f"zeros    {np.mean(dst == 0):.0%} of the output, without the bias")


if __name__ == "__main__":
    main()
