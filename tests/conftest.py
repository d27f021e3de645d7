"""Settings of all tests."""

from __future__ import annotations

from hypothesis import settings

# Examples have no deadline: how long one takes says more about what else the machine does.
settings.register_profile("fuseplan", deadline=None)
settings.load_profile("fuseplan")
