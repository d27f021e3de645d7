"""A forked child that has to answer: what hangs there is an error here, and not a test that never ends."""

import os
import signal
import traceback
from collections.abc import Callable

SECONDS = 30


def holds_in_child(claim: Callable[[], bool]) -> bool:
    """Whether the claim holds in a forked child, within SECONDS."""
    child = os.fork()
    if child == 0:
        status = 2
        try:
            signal.alarm(SECONDS)
            status = 0 if claim() else 1
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1] == 0
