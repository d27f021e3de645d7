"""What a kernel and the threads that run it agree on; needs no toolchain."""

from __future__ import annotations

import sys

COUNTERS = 16  # words at the head of a kernel's argument block
PHASES = 8
PATIENCE = 1000  # pauses, some 25 us, after which a thread that waits gives its processor to another
YIELD = "call i32 @SwitchToThread()" if sys.platform == "win32" else "call i32 @sched_yield()"
YIELD_DECLARATION = YIELD.replace("call", "declare")


def relax(machine: str) -> tuple[str, str]:
    """The instruction that tells the processor it is waiting, and its declaration."""
    if machine in ("x86_64", "AMD64"):
        return "call void @llvm.x86.sse2.pause()", "declare void @llvm.x86.sse2.pause()"
    if machine in ("aarch64", "arm64"):
        return "call void @llvm.aarch64.hint(i32 1)", "declare void @llvm.aarch64.hint(i32)"
    return "fence seq_cst", ""
