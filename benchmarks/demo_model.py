"""The demo's model: a network of ONNX with random weights, cut into plans, beside ONNX Runtime."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from fuseplan.measure import ground
from fuseplan.measure.clock import HostClock, Protocol

ROUNDS = 9


@dataclass(frozen=True)
class ModelOutcome:
    """What fusing a model gave.

    Attributes:
        model: its name.
        operators: those of the model.
        kernels: launches of the fused model.
        fused, runtime: seconds a run, of fuseplan and of ONNX Runtime; medians of interleaved blocks.
        bytes_saved: bytes that the operators one at a time move and the fused model does not.
        difference: the largest distance from ONNX Runtime's result, over the largest output.
    """

    model: str
    operators: int
    kernels: int
    fused: float
    runtime: float
    bytes_saved: int
    difference: float

    def __str__(self) -> str:
        return (
            f"{self.model}: {self.operators} operators in {self.kernels} kernels, "
            f"{self.bytes_saved / 1e6:.0f} MB saved; {self.fused * 1e3:.1f} ms a run, "
            f"ONNX Runtime {self.runtime * 1e3:.1f} ms; results differ by {self.difference:.0e}"
        )

    def to_json(self) -> dict[str, object]:
        """The fields as JSON values."""
        return asdict(self)


def measure_model(name: str, size: int, threads: int | None = None) -> ModelOutcome:
    """A model of `benchmarks.networks` on one image of `size` rows and columns, beside ONNX Runtime.

    Raises:
        ImportError: onnx is not installed.
        BuildError: ONNX Runtime is not installed.
    """
    import fuseplan.onnx  # noqa: PLC0415 - onnx is optional
    from benchmarks.networks import NETWORKS, Network  # noqa: PLC0415 - it imports onnx

    model = fuseplan.onnx.load(NETWORKS[name](Network(size=size)), threads=threads)
    feed = {"x": np.random.default_rng(1).standard_normal((1, 3, size, size)).astype(np.float32)}
    peer = model.peer(feed)
    (got,), (want,) = model.run(None, feed), peer()
    clock = HostClock(Protocol(rounds=ROUNDS, block_seconds=ground.HOST_BLOCK))
    timed = clock.interleave({"fuseplan": lambda: model.run(None, feed), "onnxruntime": peer})
    report = model.report()
    return ModelOutcome(
        model=name,
        operators=len(report.operators),
        kernels=report.launches.after,
        fused=timed["fuseplan"].median,
        runtime=timed["onnxruntime"].median,
        bytes_saved=report.moved_before - report.moved_after,
        difference=float(np.abs(got - want).max() / np.abs(want).max()),
    )
