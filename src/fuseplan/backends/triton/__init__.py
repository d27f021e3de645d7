"""The GPU backend: Triton and Gluon text, one kernel a plan.

Everything up to the source runs anywhere. `toolchain` and what it imports need triton, `memory` needs torch.
"""

from __future__ import annotations

from fuseplan.backends.triton.backend import TritonBackend

TRITON = TritonBackend()
