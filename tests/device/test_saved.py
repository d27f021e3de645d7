"""Saved plans on a GPU: without a compiler, in graphs, and a binary that another program launches."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import fuseplan
from device.guarded import inputs
from fuseplan.cli.commands import fuseplan as command
from fuseplan.compile import compile as compile_plan
from fuseplan.kernels.packing import Packing
from fuseplan.plans.plan import FusionPlan

PLANS = (
    "f16[4x64x15x13, nhwc] -> batch_norm -> add -> relu",
    "f16[2048x1024] -> matmul(2048) -> bias -> gelu(approximate=tanh)",
    "f32[4x64x14x14, nhwc] -> conv2d(64, kernel=3, padding=1) -> bias -> relu",
    "f16[16x64x28x28, nhwc] -> batch_norm_training -> relu",
)
BLOCKED = """
import sys
class Without:
    # a finder without the compilers: torch asks whether there is one, and must be told no
    def __init__(self, finder):
        self._finder = finder
    def find_spec(self, name, *rest):
        return None if name in ("llvmlite", "triton") else self._finder.find_spec(name, *rest)
sys.meta_path[:] = map(Without, sys.meta_path)
import torch
import fuseplan
layer, held = fuseplan.load(sys.argv[1]), torch.load(sys.argv[2])
want, src = held.pop("want"), held.pop("src")
def first(made): return made[0] if isinstance(made, tuple) else made
assert torch.equal(first(layer(src, **held)), want)
bound, graph = layer.bind(**held), torch.cuda.CUDAGraph()
assert torch.equal(first(bound(src)), want)
with torch.cuda.graph(graph):
    made = first(bound(src))
graph.replay()
assert torch.equal(made, want)
"""


@pytest.mark.parametrize("text", PLANS)
def test_a_loaded_plan_needs_no_compiler(text: str, tmp_path: Path) -> None:
    compiled = compile_plan(text, "cuda")
    compiled.save(tmp_path / "layer.fpk")
    tensors = inputs(compiled.plan, 1)
    made = compiled(tensors["src"], **{key: each for key, each in tensors.items() if key != "src"})
    want = made[0] if isinstance(made, tuple) else made
    torch.save({"want": want, **tensors}, tmp_path / "tensors.pt")
    words = [sys.executable, "-c", BLOCKED, str(tmp_path / "layer.fpk"), str(tmp_path / "tensors.pt")]
    ran = subprocess.run(words, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_the_driver_launches_an_exported_kernel_as_its_description_says(tmp_path: Path) -> None:
    """By the driver's own functions: the description is all that a program needs."""
    text = PLANS[0]
    plan, target = FusionPlan.parse(text), str(fuseplan.parse_target("cuda"))
    written = CliRunner().invoke(
        command, ["export", text, "--target", target, "-o", str(tmp_path / "layer.cubin")]
    )
    assert written.exit_code == 0, written.output
    told = json.loads((tmp_path / "layer.json").read_text())
    tensors = inputs(plan, 2)
    compiled = compile_plan(text, "cuda")
    want = compiled(tensors["src"], **{key: each for key, each in tensors.items() if key != "src"})
    out = torch.full_like(want, float("nan"))
    memory = {"src": tensors["src"], "dst": out, "scratch": torch.zeros(1, device="cuda")}
    for key, each in told["operands"].items():
        memory[f"operand:{key}"] = tensors[key] if "tensor" in each else _packed(each, tensors[key])
    if told["workspace_bytes"]:
        memory["workspace"] = torch.zeros(told["workspace_bytes"], dtype=torch.uint8, device="cuda")
    _launch(tmp_path, told, [_argument(each, memory) for each in told["arguments"]])
    torch.testing.assert_close(out, want, rtol=0, atol=0)


def _argument(told: dict[str, Any], memory: dict[str, torch.Tensor]) -> ctypes._SimpleCData[Any]:
    """By value, as its type says, or the address of its tensor."""
    if told["slot"] in memory:
        return ctypes.c_uint64(memory[told["slot"]].data_ptr())
    return {"fp32": ctypes.c_float, "fp64": ctypes.c_double}[told["type"]](told["value"])


def _packed(told: dict[str, Any], tensor: torch.Tensor) -> torch.Tensor:
    packing = Packing.from_json([told["logical_shape"], told["packed"]["dtype"], told["steps"]])
    return torch.from_numpy(packing.of(tensor.float().cpu().numpy()).copy()).cuda()


def _launch(folder: Path, told: dict[str, Any], arguments: list[ctypes._SimpleCData[Any]]) -> None:
    driver, module, function = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_void_p()
    binary = (folder / told["binary"]).read_bytes()
    assert driver.cuModuleLoadData(ctypes.byref(module), binary) == 0
    assert driver.cuModuleGetFunction(ctypes.byref(function), module, told["entry"].encode()) == 0
    shared = told["shared_bytes"]
    assert driver.cuFuncSetAttribute(function, 8, shared) == 0  # the most dynamic shared memory
    pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
    sizes = [ctypes.c_uint(each) for each in (*told["grid"], *told["block"], shared)]
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    assert not told["cooperative"]
    assert driver.cuLaunchKernel(function, *sizes, stream, pointers, None) == 0
    torch.cuda.synchronize()
    assert driver.cuModuleUnload(module) == 0
