"""Tensors that a caller passes: NumPy's, torch's, and any other library's through DLPack."""
