"""What two processes find that share the tensors of fused modules: `mesh.py` is their program."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

NORM, UP, DOWN = "16 -> layer_norm", "16 -> linear(64) -> bias -> gelu", "64 -> linear(16) -> bias"
COLUMNS, ROWS = "16 -> linear(32) -> bias -> gelu", "32 -> linear(16) -> bias"  # the shares of one process

# The plans that each process runs: the last extent of the input, and the operators.
CHECKS = {
    "dtensors": [NORM, COLUMNS, ROWS],
    "whole_modules": [NORM, COLUMNS, f"{ROWS} -> add"],
    "rows": [NORM, UP, DOWN],
    "compiled": ["16 -> add -> layer_norm", COLUMNS, ROWS],
    "fully_sharded": [NORM, UP, DOWN],
    "fully_sharded_whole": [NORM, UP, f"{DOWN} -> add"],
}


def told(folder: Path, device: str) -> dict[str, list[Any]]:
    """What the processes tell of each check: the plans that each ran, or a traceback."""
    program = Path(__file__).with_name("mesh.py")
    subprocess.run([sys.executable, program, str(folder), device], check=True, timeout=240)
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    return {check: [each[check] for each in found] for check in CHECKS}
