"""Kernels as files for programs without Python: objects and headers for C, binaries for GPUs.

Its modules:

- c: an object file with C functions, and their header; c_packing: packing as C; packings: of both
- gpu: a binary, its assembly, and a description of its launch
"""
