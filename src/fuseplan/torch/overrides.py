"""Torch's tables of composite operators, which it fills for each export, with the entries that one needs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from unittest.mock import patch

import torch
from torch._export import utils
from torch.export import exported_program

from fuseplan.system.locks import Lock

KEYS = ("_AUTOGRAD_ALIAS_BACKEND_KEYS_TO_OVERRIDE", "_BACKEND_KEYS_TO_OVERRIDE")  # of dispatch, by torch
LOOK = "_materialize_cpp_cia_ops"
_patched = Lock()  # torch's modules are the process's


@contextlib.contextmanager
def few(device: torch.device) -> Iterator[None]:
    """Operators are looked up once, and overridden for this kind of device: 0.17 s an export, not 0.31.

    Torch looks all of them up for each of its 27 namespaces, and overrides them for 21 kinds of devices.
    """
    kinds = {"CPU", "META", device.type.upper()}
    with _patched, contextlib.ExitStack() as held:
        for name in KEYS:
            keys = getattr(exported_program, name, ())  # not in every torch
            known = [key for key in keys if key.name.removeprefix("Autograd").upper() in kinds]
            held.enter_context(patch.object(exported_program, name, known, create=True))
        once = functools.cache(getattr(utils, LOOK, lambda: None))
        held.enter_context(patch.object(utils, LOOK, once, create=True))
        yield
