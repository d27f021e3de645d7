"""The software that a measurement was made with: versions of packages, and the checked-out commit."""

from __future__ import annotations

import functools
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import numpy as np

from fuseplan.system import limits


def version_of(package: str) -> str | None:
    """The installed version of a package, None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def versions(*packages: str) -> dict[str, str]:
    """Versions of Python, numpy, llvmlite, fuseplan and of the named packages that are installed."""
    named = {name: version_of(name) for name in ("fuseplan", "llvmlite", *packages)}
    found = {name: version for name, version in named.items() if version is not None}
    return {"python": sys.version.split()[0], "numpy": np.__version__, **found}


def gpu_versions() -> dict[str, str]:
    """Versions of Python, numpy, fuseplan, torch and the toolchain, and of torch's CUDA and cuDNN."""
    import torch

    from fuseplan.backends.triton import toolchain

    cudnn = torch.backends.cudnn.version()
    told = {"torch": str(torch.__version__), "cuda": torch.version.cuda, "hip": torch.version.hip}
    told["cudnn"] = None if cudnn is None else str(cudnn)
    told["toolchain"] = toolchain.fingerprint()
    return versions("torch", "triton") | {name: version for name, version in told.items() if version}


@functools.cache
def commit(folder: Path = Path(__file__).parent) -> str:
    """The checked-out commit, `+` behind it where files differ from it; empty outside a repository."""

    def git(*words: str) -> str:
        told = subprocess.run(
            ["git", *words],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=limits.TOOL_SECONDS,
        )
        return told.stdout.strip() if told.returncode == 0 else ""

    try:
        head = git("rev-parse", "--short=12", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no") if head else ""
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return head + ("+" if changed else "")
