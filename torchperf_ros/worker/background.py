"""A worker that gives way to the one that serves, while it loads or writes evidence."""

import os
import resource
from collections.abc import Callable

from torchperf_ros.core.thread_nice import set_nice

_RLIMIT_NICE_0 = 20
_BACKGROUND_NICE = 5


def step_into_background() -> Callable[[], None]:
    """Give way with every thread of this process; returns what makes it a normal process again.

    Only where the way back is permitted: to root, or with an RLIMIT_NICE that allows nice 0 (20).
    """
    if os.geteuid() != 0 and resource.getrlimit(resource.RLIMIT_NICE)[0] < _RLIMIT_NICE_0:
        return lambda: None
    set_nice(os.getpid(), _BACKGROUND_NICE)
    return lambda: set_nice(os.getpid(), 0)
