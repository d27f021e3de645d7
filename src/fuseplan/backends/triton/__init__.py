"""The GPU backend: Triton and Gluon text, one kernel a plan.

Everything up to the source runs anywhere. `compiler` needs triton, `memory` and `views` need torch. Its map:

- templates/: the kernels, in order of preference
- text, shell, index: lines, the text around a body, indices and masks that fold
- dialect, functions: the scalar functions in Triton's primitives
- elementwise: the stages of a plan applied to a tile
- model: the cost model
- toolchain, compiler, pool: text to a binary, many at once
- repairs, sass: errors of Triton and its assembler
- artifact, driver, launch, memory: a binary, its arguments, and the device
"""

from __future__ import annotations

from fuseplan.backends.triton.backend import TritonBackend

TRITON = TritonBackend()
