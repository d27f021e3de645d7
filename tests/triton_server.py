"""Runs kernels in Triton's interpreter, one request at a time: the process that `interpreted` starts.

Triton decides when it is imported whether it compiles or interprets, so that no process can do both. Requests
and replies are pickled dicts on the standard input and output, each behind its length in eight bytes.
"""

from __future__ import annotations

import linecache
import math
import os
import pickle
import struct
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from numpy.typing import NDArray
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

import triton_shim

Array = NDArray[Any]


def loaded(text: str, entry: str) -> Any:
    """The kernel's Python function, rewritten for the interpreter."""
    name = f"<kernel {abs(hash(text))}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    space: dict[str, Any] = {"__name__": "generated"}
    exec(compile(text, name, "exec"), space)
    return space[entry].rewrite()


def pointer(array: Array, kind: str) -> Any:
    """A scalar that points to the array, of Triton's type `kind`, such as `*fp16`."""
    triton_type = tl.str_to_ty(kind, None) if hasattr(tl, "str_to_ty") else tl.core.str_to_ty(kind, None)
    handle = triton_shim.Handle(np.array([array.ctypes.data], np.uint64), triton_type)
    return tl.tensor(handle, triton_type)


def number(value: float, kind: str) -> Any:
    """A scalar of Triton's type `kind`."""
    triton_type = {"fp32": tl.float32, "fp64": tl.float64, "i32": tl.int32, "i64": tl.int64}[kind]
    dtype = interpreter._get_np_dtype(triton_type)
    return tl.tensor(triton_shim.Handle(np.array([value], dtype), triton_type), triton_type)


def tensor_map(array: Array, kind: str, layout: dict[str, Any]) -> Any:
    """A descriptor of the array's memory; `kind` is the type of its elements."""
    semantic = TritonSemantic(interpreter.InterpreterBuilder())
    made = semantic.make_tensor_descriptor(
        base=pointer(array, f"*{kind}"),
        shape=[number(extent, "i32") for extent in layout["shape"]],
        strides=[*(number(step, "i64") for step in layout["strides"][:-1]), tl.constexpr(1)],
        block_shape=[tl.constexpr(extent) for extent in layout["box"]],
        padding_option="zero",
    )
    made.handle.steps = tuple(layout["steps"])
    return made


def argument(kind: str, value: Any) -> Any:
    """What the kernel is given: the value is an array, an array and its tensor map, or a number."""
    if isinstance(value, tuple):
        return tensor_map(value[0], kind.partition("<")[2].partition("[")[0], value[1])
    return pointer(value, kind) if isinstance(value, np.ndarray) else number(value, kind)


def run(
    text: str,
    entry: str,
    types: list[str],
    values: list[Any],
    grid: list[int],
    writes: list[int],
    cooperative: bool = False,
) -> None:
    """Runs every program of the grid; only the arrays at `writes` may be written.

    Programs of a cooperative launch run at once, each in a thread of its own, since they may wait for each
    other; otherwise one runs after another, in an order that a kernel cannot count on.
    """
    arrays = {
        place: value[0] if isinstance(value, tuple) else value
        for place, value in enumerate(values)
        if not isinstance(value, int | float)
    }
    areas = [
        (array.ctypes.data, array.ctypes.data + array.nbytes, place in writes)
        for place, array in arrays.items()
    ]
    function = loaded(text, entry)
    arguments = [argument(kind, value) for kind, value in zip(types, values, strict=True)]
    builder = interpreter.interpreter_builder
    scope = interpreter._patch_lang(function)
    try:
        builder.set_grid_dim(*grid)
        with triton_shim.memory(areas), np.errstate(all="ignore"):
            if cooperative:
                together(lambda: function(*arguments), grid)
                return
            for number in np.random.default_rng(1).permutation(math.prod(grid)):
                builder.set_grid_idx(*map(int, np.unravel_index(number, grid)))
                function(*arguments)
    finally:
        scope.restore()


def together(program: Callable[[], None], grid: list[int]) -> None:
    """Runs every program of the grid in a thread of its own; the first error ends those that still wait."""
    errors: list[BaseException] = []

    def started(place: tuple[int, ...]) -> None:
        interpreter.interpreter_builder.set_grid_idx(*place)  # of this thread: see `triton_shim`
        try:
            with np.errstate(all="ignore"), triton_shim.turn():
                program()
        except BaseException as error:
            errors.append(error)
            triton_shim.stop()

    order = np.random.default_rng(1).permutation(math.prod(grid))
    places = [tuple(map(int, np.unravel_index(number, grid))) for number in order]
    threads = [threading.Thread(target=started, args=(place,)) for place in places]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def aligned(array: Array) -> Array:
    """A copy whose address is a multiple of 64, as every address is that a kernel is given."""
    raw = np.empty(array.nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    copied: Array = raw[start : start + array.nbytes].view(array.dtype)
    copied[...] = array
    return copied


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """The arrays that were written, by place; or what went wrong."""
    held: dict[int, Array] = {}

    def placed(value: Any) -> Any:
        if isinstance(value, tuple):
            return placed(value[0]), value[1]
        if not isinstance(value, np.ndarray):
            return value
        return held.setdefault(id(value), aligned(value))

    values = [placed(value) for value in request["values"]]
    try:
        named = ("text", "entry", "types", "grid", "writes", "cooperative")
        run(values=values, **{name: request[name] for name in named})
    except Exception:
        return {"error": traceback.format_exc()}
    written = {place: values[place] for place in request["writes"]}
    return {place: value[0] if isinstance(value, tuple) else value for place, value in written.items()}


def main() -> None:
    """Serves until the input ends."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a kernel prints must not come between the replies
    triton_shim.install()
    requests = sys.stdin.buffer
    while head := requests.read(8):
        request = pickle.loads(requests.read(struct.unpack("<Q", head)[0]))
        reply = pickle.dumps(answer(request))
        replies.write(struct.pack("<Q", len(reply)) + reply)
        replies.flush()


if __name__ == "__main__":
    main()
