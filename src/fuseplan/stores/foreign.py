"""Code from outside the package that kernels follow from: it is part of the cache's key."""

from __future__ import annotations

import functools
import hashlib
import sys
from pathlib import Path

from fuseplan.stores.cache import fingerprint_of

OWN = ("fuseplan", "builtins", *sys.stdlib_module_names)


@functools.cache
def fingerprint(kind: type) -> str | None:
    """SHA-256 over the source files of the packages in which a class and its bases are written.

    Empty for fuseplan's own classes, whose sources are in the key of every kernel. Of a package all files
    count, of a module outside of packages its own file; other packages that these import do not.

    Returns:
        The hash; None where there is no file, as for a class of a notebook: its kernels are not cached.
    """
    tops = {base.__module__.partition(".")[0] for base in kind.__mro__} - set(OWN)
    try:
        return hashlib.sha256("".join(map(_texts, sorted(tops))).encode()).hexdigest() if tops else ""
    except (AttributeError, KeyError, OSError, TypeError):
        return None


def _texts(top: str) -> str:
    """The name of a module at the top and the hash of its files."""
    module = sys.modules[top]
    path = Path(str(module.__file__)) if module.__file__ else Path()
    is_package = hasattr(module, "__path__")
    data = fingerprint_of(path.parent).encode() if is_package else path.read_bytes()
    return f"{top} {hashlib.sha256(data).hexdigest()}\n"
