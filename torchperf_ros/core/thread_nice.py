"""The nice value of a whole process: on Linux every thread has its own."""

import contextlib
import os


def set_nice(pid: int, nice: int) -> None:
    """Give every thread of a process this nice value (-20 to 19); a process or thread that has just ended is left out.

    Raises:
        PermissionError: lower than the user may.
    """
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            os.setpriority(os.PRIO_PROCESS, int(thread), nice)
