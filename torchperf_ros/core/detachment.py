"""What a process that the node has spawned does first: leave the node's priority and CPUs, and die with it."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def leave_priority() -> None:
    """Normal priority and any CPU, whatever the node has for itself."""
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    if os.getpriority(os.PRIO_PROCESS, 0) < 0:
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))


def detach_from_node() -> None:
    """Leave its priority, and die with the thread of it that spawned this process."""
    leave_priority()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
