"""ROS domains that no other test process of this machine uses."""

import fcntl
import functools
import os
import tempfile

DOMAINS = range(1, 101)  # the ports of higher ones may be those of any connection

_locks = []


@functools.cache
def own_domain(user=""):
    """A domain that this process has until it ends; each of its users gets another one."""
    first = os.getpid() % len(DOMAINS)
    for number in (*DOMAINS[first:], *DOMAINS[:first]):
        lock = open(f"{tempfile.gettempdir()}/torchperf_test_domain_{number}", "ab")  # noqa: SIM115
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
        else:
            _locks.append(lock)
            return number
    raise RuntimeError("every ROS domain is in use")
