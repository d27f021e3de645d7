"""Kernels as files for programs without Python: objects and headers for C, binaries for GPUs.

Its modules:

- c: an object file with C functions, and their header; packings: how operands are packed, and that in C
- gpu: a binary, its assembly, and a description of its launch
"""
