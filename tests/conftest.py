"""Settings of all tests."""

from __future__ import annotations

import os

from hypothesis import settings

# Examples have no deadline: how long one takes says more about what else the machine does. Continuous
# integration draws the same ones each time, so what fails there fails for its commit; elsewhere they are new.
settings.register_profile("fuseplan", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("fuseplan")
