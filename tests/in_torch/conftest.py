"""Settings of the tests of plans inside torch."""

from __future__ import annotations

import pytest

from fuseplan.torch import cutting, gaps


@pytest.fixture
def estimated() -> None:
    """Plans of small tensors are torch's operators where these are estimated to be faster."""


@pytest.fixture(autouse=True)
def _every_plan(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests have small tensors: what the host takes for calls and copies does not count."""
    if "estimated" not in request.fixturenames:
        monkeypatch.setattr(cutting, "HOST", 0.0)
        monkeypatch.setattr(gaps, "COPY", 0.0)
        monkeypatch.setattr(cutting, "saved_by", lambda *_: None)
