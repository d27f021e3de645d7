"""Models of other libraries in the place of a plan: errors tell the way in."""

from __future__ import annotations

import os

# Endings of files, and classes by package and name, each with the page of the guide that tells the way in.
FILES = {
    **dict.fromkeys((".onnx", ".ort"), "From ONNX"),
    **dict.fromkeys((".pt", ".pth", ".pt2", ".ckpt", ".safetensors", ".bin"), "From PyTorch"),
    **dict.fromkeys((".tflite", ".pb", ".keras", ".h5"), "From ONNX"),
}
CLASSES = {
    ("torch", "Module"): "From PyTorch",
    ("torch", "ExportedProgram"): "From PyTorch",
    ("torch", "Function"): "From PyTorch",
    ("onnx", "ModelProto"): "From ONNX",
    ("onnx", "GraphProto"): "From ONNX",
    ("onnx", "NodeProto"): "From ONNX",
    ("onnxruntime", "InferenceSession"): "From ONNX",
    ("keras", "Layer"): "From ONNX",
}


def instead_of(value: object) -> str:
    """What to write instead of a tensor, or of a model or its file, as an indented remedy; else nothing."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return "Describe the tensor: FusionPlan(TensorSpec.like(tensor), ...)"
    if isinstance(value, str | os.PathLike):
        page = FILES.get(os.path.splitext(os.fsdecode(value).strip())[1].lower())
    else:
        page = _page_of_class(value)
    if page is None:
        return ""
    return (
        "A model is no plan: `fuseplan.onnx.load(path)` cuts a model of ONNX into plans and runs it. A run\n"
        "  of layers is a plan. Those of torch.nn.Sequential(Linear(64, 32), ReLU()) are\n"
        "    f32[8x64] -> linear(32) -> bias -> relu\n"
        f"  The guide's page {page!r} has more"
    )


def _page_of_class(value: object) -> str | None:
    kind = value if isinstance(value, type) else type(value)
    places = ((base.__module__.partition(".")[0], base.__name__) for base in kind.__mro__)
    return next((CLASSES[place] for place in places if place in CLASSES), None)
