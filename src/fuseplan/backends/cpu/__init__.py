"""The CPU backend: LLVM IR written here, compiled by llvmlite, on any processor that LLVM knows.

Its map:

- templates/: the kernels, in order of preference
- ir: writes LLVM IR; frame and walk are the parts that every kernel has
- dialect: the scalar functions as IR; math_* their polynomials
- staging: copies of src that the compute loops read
- toolchain: compiles and loads; the only module, besides runtime, that imports llvmlite
- runtime: the threads
"""

from __future__ import annotations

from fuseplan.backends.cpu.backend import CpuBackend

CPU = CpuBackend()
