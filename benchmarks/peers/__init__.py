"""All peers of the suites: the installed package's, and further libraries and forms."""

from __future__ import annotations

from benchmarks.peers.gpu_fused import (
    CublasLt,
    Cudnn,
    CudnnAttention,
    CudnnChannelsLast,
    CudnnFolded,
    EfficientAttention,
    FlashAttention,
)
from benchmarks.peers.ncnn_peer import Ncnn
from benchmarks.peers.onnx_peers import OpenVino, UnfusedOnnxRuntime
from benchmarks.peers.ours import FuseplanPlain, FuseplanStrict
from benchmarks.peers.quantized_peers import ON_INTEGERS
from benchmarks.peers.torch_peers import TorchCompileDefault, TorchSteps, UnfusedFirst, UnfusedLast
from fuseplan.bench.peers import FORMS, OURS, TORCH, Known, by_name
from fuseplan.bench.peers.onnx_peer import OnnxRuntime

ON_CPU = (
    *FORMS, FuseplanStrict, OnnxRuntime, *TORCH, Ncnn, OpenVino, UnfusedFirst, UnfusedLast,
    UnfusedOnnxRuntime, *ON_INTEGERS,
)  # fmt: skip
ON_GPU = (
    *FORMS, FuseplanPlain, Cudnn, CudnnChannelsLast, CudnnFolded, CudnnAttention, FlashAttention,
    EfficientAttention, CublasLt, *TORCH[:2], TorchSteps, UnfusedFirst, UnfusedLast, TORCH[2],
    TorchCompileDefault, TORCH[3],
)  # fmt: skip
KNOWN = {
    False: Known(
        by_name(*ON_CPU), ("onnxruntime", "torch", "torch.compile", "ncnn", "openvino"), always=(OURS,)
    ),
    True: Known(
        by_name(*ON_GPU),
        (OURS, f"{OURS}:plain", "cudnn", "flash", "efficient", "cublaslt", "torch", "torch.compile"),
    ),
}
