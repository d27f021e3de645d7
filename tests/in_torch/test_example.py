"""What becomes of a module's example call: plans are measured on its values, and torch's trace is told."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fuseplan
import fuseplan.torch as fused
from fuseplan.graph.cut import Site
from fuseplan.stores import sites
from fuseplan.torch.dynamo import compile_graph
from fuseplan.torch.eager import Eager


@pytest.mark.usefixtures("resting")
def test_plans_are_measured_on_the_example_s_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of inputs, parameters, and what torch's operators make of them; in bf16, which NumPy lacks."""
    monkeypatch.setenv("FUSEPLAN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(sites.KEPT, "unsaved", {})
    seen: dict[str, torch.Tensor] = {}
    launch = Eager.fused

    def watched(self: Eager, site: Site, values: dict[str, object]) -> Callable[[], object]:
        types = self._read.graph.types
        seen.update({name: self._tensor(each, types[name].dtype) for name, each in values.items()})
        return launch(self, site, values)

    monkeypatch.setattr(Eager, "fused", watched)
    module = nn.Sequential(nn.Conv2d(6, 8, 3), nn.MaxPool2d(2), nn.Conv2d(8, 4, 1)).bfloat16()
    src = 1e3 * torch.randn(2, 6, 8, 8, dtype=torch.bfloat16)
    fused.fuse(module, src, choose="measured")
    with torch.no_grad():
        want = {"p_0_weight": module[0].weight, "input_1": src, "max_pool2d.0": module[:2](src)}
    for name, each in want.items():
        assert seen[name].dtype == torch.bfloat16
        assert (seen[name] - each).abs().max() <= 0.02 * each.abs().max()


class Sine(nn.Module):  # type: ignore[misc]
    """No plan computes it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin()


def test_reports_go_to_torchs_structured_trace() -> None:
    """As the handler of TORCH_TRACE is given them: what became of each operator, and why."""
    module, src = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Flatten(0), Sine()), torch.randn(2, 6)
    rules = [fuseplan.rule("relu(x) -> relu", name="mine")]
    seen, handler = list[Any](), logging.Handler()
    handler.emit = seen.append  # type: ignore[method-assign, assignment]
    torch._logging._internal.trace_log.addHandler(handler)
    try:
        with torch.no_grad():
            report = fused.fuse(module, src, rules=rules).report
            torch.compile(module, backend=compile_graph, options={"rules": rules})(src)
    finally:
        torch._logging._internal.trace_log.removeHandler(handler)
    artifacts = [(each.metadata.get("artifact"), each.payload) for each in seen]
    told = [payload for artifact, payload in artifacts if artifact and artifact["name"] == "fuseplan_report"]
    assert len(told) == 2
    assert told[0] == json.dumps(report.to_json())
    codes = [{each["code"] for each in json.loads(payload)["left"]} for payload in told]
    assert codes == [{each.code for each in report.left}] * 2
    assert "not-in-table" in codes[0]
    assert [each["rules"] for payload in told for each in json.loads(payload)["sites"]] == [["mine"]] * 2
