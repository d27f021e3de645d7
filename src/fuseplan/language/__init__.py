"""Descriptions of tensors, arithmetic of elements, declarations of operators."""
