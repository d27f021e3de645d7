"""Linux's permission to use AMX's tiles, which a process asks for once; threads and forks have it too."""

from __future__ import annotations

import ctypes
import platform
import sys
from functools import cache

# Of Linux on x86-64: the call, its request, and the number of the tiles among a thread's saved registers.
ARCH_PRCTL, REQUEST, TILES = 158, 0x1023, 18


@cache
def permitted() -> bool:
    """Whether this process may use tiles; the first call asks.

    A signal's frame has room for the tiles from then on, 8 KiB, which every stack for signals has to hold.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    call = ctypes.CDLL(None).syscall
    call.argtypes, call.restype = [ctypes.c_long] * 3, ctypes.c_long
    return bool(call(ARCH_PRCTL, REQUEST, TILES) == 0)
