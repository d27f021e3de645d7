"""Weights of ONNX files: read where they lie, and held once, as kernels read them."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import fuseplan.onnx
from fuseplan.errors import ArgumentError
from fuseplan.onnx import stored
from fuseplan.onnx.files import model_of
from onnx_models import model, weights

WIDE, LAYERS = 1024, 8
CHILD = """
import resource, sys
import numpy as np
import fuseplan.onnx
run = lambda path: fuseplan.onnx.load(path, threads=1).run(None, {"x": np.ones((4, %d), np.float32)})
for path in sys.argv[1:]:
    run(path)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def chain(layers: int) -> Any:
    """Products one behind the other."""
    nodes = [
        helper.make_node("MatMul", [f"x{each}" if each else "x", f"w{each}"], [f"x{each + 1}"])
        for each in range(layers)
    ]
    held = {f"w{each}": weights(WIDE, WIDE) for each in range(layers)}
    return model(nodes, {"x": [4, WIDE]}, [f"x{layers}"], held)


def base_of(array: Any) -> Any:
    while isinstance(array, np.ndarray):
        array = array.base
    return array.obj if isinstance(array, memoryview) else array


@pytest.mark.parametrize("is_outside", [False, True], ids=["in the file", "beside it"])
def test_large_weights_are_mapped(is_outside: bool, tmp_path: Path) -> None:
    proto, path = chain(2), tmp_path / "model.onnx"
    want = [numpy_helper.to_array(each) for each in proto.graph.initializer]
    onnx.save_model(proto, path, save_as_external_data=is_outside, location="data", size_threshold=0)
    found = model_of(path)
    assert found.ByteSize() < 2000
    arrays = [stored.array_of(each) for each in found.graph.initializer]
    for array, exact in zip(arrays, want, strict=True):
        np.testing.assert_array_equal(array, exact)
        assert isinstance(base_of(array), mmap.mmap)
    stored.release()
    np.testing.assert_array_equal(arrays[0], want[0])
    whole = stored.whole(found)
    assert [numpy_helper.to_array(each).tobytes() for each in whole.graph.initializer] == [
        each.tobytes() for each in want
    ]
    given = {"x": np.ones((4, WIDE), np.float32)}
    ours = fuseplan.onnx.load(path, threads=1)
    (made,), (exact,), (other,) = ours.run(None, given), ours.exact(given), ours.peer(given)()
    np.testing.assert_allclose(made, exact, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(other, exact, rtol=1e-4, atol=1e-4)
    held = ours.prepare().model.graph.constants
    assert all(isinstance(base_of(each), mmap.mmap) for each in held.values())


def test_any_dtype_and_size_is_read(tmp_path: Path) -> None:
    rng, path = np.random.default_rng(0), tmp_path / "model.onnx"
    arrays: dict[str, Any] = {
        "i64": rng.integers(-9, 9, 3000),
        "f16": rng.standard_normal((50, 60)).astype(np.float16),
        "small": rng.standard_normal(5),
        "bool": rng.integers(0, 2, 9000).astype(bool),
    }
    tensors = [numpy_helper.from_array(each, name) for name, each in arrays.items()]
    listed = helper.make_tensor("listed", TensorProto.FLOAT, [4000], np.ones(4000, np.float32))
    nodes = [helper.make_node("Identity", [each.name], [f"{each.name}_"]) for each in (*tensors, listed)]
    outputs = [
        helper.make_tensor_value_info(f"{name}_", TensorProto.FLOAT, None) for name in (*arrays, "listed")
    ]
    onnx.save(helper.make_model(helper.make_graph(nodes, "g", [], outputs, [*tensors, listed])), path)
    read = {each.name: stored.array_of(each) for each in model_of(path).graph.initializer}
    for name, array in {**arrays, "listed": np.ones(4000, np.float32)}.items():
        assert read[name].dtype == array.dtype
        np.testing.assert_array_equal(read[name], array)


def test_tensors_without_elements_have_no_data_outside(tmp_path: Path) -> None:
    """Their length is 0, which of others means the rest of the file."""
    tensors = [numpy_helper.from_array(np.ones(shape, np.float32), f"t{shape}") for shape in ((0, 2), 3)]
    nodes = [helper.make_node("Concat", ["x", "t(0, 2)"], ["y"], axis=0)]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 2])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    graph = helper.make_graph(nodes, "g", inputs, outputs, tensors)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    path, x = tmp_path / "model.onnx", np.ones((1, 2), np.float32)
    onnx.save_model(proto, path, save_as_external_data=True, location="data", size_threshold=0)
    np.testing.assert_array_equal(fuseplan.onnx.load(path, threads=1).run(None, {"x": x})[0], x)


def test_a_file_that_changes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(chain(1), path)
    ours = fuseplan.onnx.load(path, threads=1)
    onnx.save(chain(1), tmp_path / "other.onnx")
    os.utime(tmp_path / "other.onnx", (1, 1))
    (tmp_path / "other.onnx").replace(path)
    with pytest.raises(ArgumentError, match="has changed since the model was loaded: load it again"):
        ours.run(None, {"x": np.ones((4, WIDE), np.float32)})


def test_a_compiled_model_needs_no_file(tmp_path: Path) -> None:
    """Not even where a constant lies in the file as the kernel reads it."""
    path, given = tmp_path / "model.onnx", {"x": np.ones((4, 2048), np.float32)}
    proto = model([helper.make_node("Add", ["x", "b"], ["y"])], {"x": [4, 2048]}, ["y"], {"b": weights(2048)})
    for size in range(64):
        proto.doc_string = "x" * size
        onnx.save(proto, path)
        (told,) = (
            each.value for each in model_of(path).graph.initializer[0].external_data if each.key == "offset"
        )
        if int(told) % 64 == 0:
            break
    ours = fuseplan.onnx.load(path, threads=1)
    before = ours.run(None, given)[0]
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    np.testing.assert_array_equal(ours.run(None, given)[0], before)
    assert np.abs(before - 1).max() > 0.5


def test_broken_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(chain(1), path)
    data = path.read_bytes()
    for broken in (
        data[:-4000],
        data[: len(data) // 2],
        b"\xff" * 9000,
        data[:1] + b"\xff" * 20 + data[21:],
    ):
        path.write_bytes(broken)
        with pytest.raises(ArgumentError, match="is no ONNX model"):
            fuseplan.onnx.load(path)
    proto = chain(1)
    proto.graph.initializer[0].dims[0] = WIDE + 1
    onnx.save(proto, path)
    with pytest.raises(ArgumentError, match="bytes, which are no float32"):
        fuseplan.onnx.load(path).run(None, {"x": np.ones((4, WIDE), np.float32)})


@pytest.mark.skipif(sys.platform != "linux", reason="other systems tell no such size")
def test_weights_are_held_once(tmp_path: Path) -> None:
    """The first, small model brings compiler and kernel into the process."""
    for name, layers in (("small", 1), ("large", LAYERS)):
        onnx.save(chain(layers), tmp_path / name)
    command = [sys.executable, "-c", CHILD % WIDE, str(tmp_path / "small"), str(tmp_path / "large")]
    told = subprocess.run(command, capture_output=True, text=True, check=True)
    before, after = map(int, told.stdout.split())
    assert after - before < 1.5 * LAYERS * WIDE * WIDE * 4
