"""Sets priorities, memory locking and affinity of the node, and low priority for its children."""

import contextlib
import ctypes
import gc
import os
import resource
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

LARGEST_KEPT_BYTES = 32 << 20  # DEFAULT_MMAP_THRESHOLD_MAX of malloc.c: a larger threshold is refused
_SWITCH_INTERVAL_S = 1e-4
_NICE = -10
_MCL_CURRENT_AND_FUTURE = 3
_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_TIMERSLACK = 1, 15, 29
_BACKGROUND_PRIORITY = 1
_HIGHEST_PRIORITY = 98  # 99 is for the kernel's own threads, as the one that moves tasks between processors
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_FLAGS, _PF_EXITING = (
    6,
    4,
)  # of /proc/PID/stat behind the name: its place (proc(5)), and the bit (linux/sched.h)
_INT_MAX = 2**31 - 1
_ENDINGS = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGPWR,
    signal.SIGTSTP,
    signal.SIGTTIN,
    signal.SIGTTOU,
)
_MADV_DONTNEED = 4
_libc = ctypes.CDLL(None, use_errno=True)


def prefer_this_process(priority: int) -> str:
    """SCHED_FIFO for every thread of the process; where that is not permitted nice, else a word of warning.

    Args:
        priority: 1 to 98; 0 leaves the scheduler alone.

    Returns:
        What holds now: `fifo 10`, `nice -10`, `normal`, or `normal: ...` with what to do about it.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    _libc.prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    if not priority:
        return "normal"
    try:
        _for_each_thread(
            lambda thread: os.sched_setscheduler(thread, os.SCHED_FIFO, os.sched_param(priority))
        )
    except PermissionError:
        try:
            set_nice(os.getpid(), _NICE)
        except PermissionError:
            return (
                "normal: SCHED_FIFO and nice are not permitted; give the user an rtprio limit, or"
                " CAP_SYS_NICE"
            )
        return f"nice {_NICE}"
    return f"fifo {priority}"


def prefer_this_thread() -> str:
    """The highest SCHED_FIFO priority that is permitted, for the calling thread of a process that has it.

    Returns:
        What holds now, for example `fifo 98`, or `normal`.
    """
    if os.sched_getscheduler(0) == os.SCHED_FIFO:
        for priority in (_HIGHEST_PRIORITY, resource.getrlimit(resource.RLIMIT_RTPRIO)[0]):
            with contextlib.suppress(OSError, OverflowError):  # not permitted; no limit
                os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(priority))
                break
        return f"fifo {os.sched_getparam(0).sched_priority}"
    return "normal"


def step_back() -> None:
    """Make the calling thread, which no frame waits for, give way to the process's others.

    It stays real-time where they are: a thread of normal priority that holds the interpreter lock would
    make them wait for the whole machine.
    """
    if os.sched_getscheduler(0) == os.SCHED_FIFO:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(_BACKGROUND_PRIORITY))


def stop_collecting() -> None:
    """Take what is there out of garbage collection, and collect from now on only when asked to.

    What an earlier call took out is looked at again first: stages of a configuration that has ended are
    garbage now.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    gc.disable()


def lock_memory() -> str:
    """Lock the process in memory; returns `locked`, or why not."""
    if _libc.mlockall(_MCL_CURRENT_AND_FUTURE) == 0:
        return "locked"
    return f"not locked: {os.strerror(ctypes.get_errno())}; raise the memlock limit"


def pin_this_process(cpus: tuple[int, ...]) -> None:
    """Let every thread of the process run on these CPUs only.

    Raises:
        OSError: a CPU that is not there.
    """
    _for_each_thread(lambda thread: os.sched_setaffinity(thread, cpus))


def _for_each_thread(act: Callable[[int], None]) -> None:
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            act(int(thread.name))


def leave_priority() -> None:
    """Normal priority and any CPU, also where the node has others."""
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    if os.getpriority(os.PRIO_PROCESS, 0) < 0:
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))


def outlive_the_group() -> None:
    """Ignore what a terminal, launch or a supervisor sends, to end or to reload.

    The node says when this process ends.

    Its parent starts it in a session of its own as well, so that what a terminal sends to a group does not
    arrive.
    """
    for number in _ENDINGS:
        signal.signal(number, signal.SIG_IGN)


def die_with_parent(parent: int | None = None) -> None:
    """Be killed when the thread ends that spawned this process.

    Now, if that was `parent`, which has ended already.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def name_process(name: str) -> None:
    """What `ps` and `top` call the process, of which they show 15 characters."""
    _libc.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def detach_from_node() -> None:
    """Leave its priority, and die with the thread of it that spawned this process."""
    leave_priority()
    die_with_parent()


def set_nice(pid: int, nice: int) -> None:
    """Give every thread of a process this nice value (-20 to 19).

    A process or thread that has just ended is left out.

    Raises:
        PermissionError: lower than the user may.
    """
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            os.setpriority(os.PRIO_PROCESS, int(thread), nice)
    # where the kernel shares out time by sessions (sched_autogroup_enabled), the nice value of a session
    # counts
    with contextlib.suppress(OSError):
        if os.getsid(pid) == pid:
            Path(f"/proc/{pid}/autogroup").write_text(str(nice), encoding="ascii")


def is_ending(pid: int) -> bool:
    """Whether the kernel ends a process, which shows on its sockets only when its memory is freed."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:  # this process has no descriptor left to look with
        return False
    flags = int(stat.rpartition(b")")[2].split()[_FLAGS])
    return bool(flags & _PF_EXITING)


def is_readable(descriptor: int, seconds: float) -> bool:
    """Wait until a descriptor is readable, at most so long; returns whether it is."""
    poll = select.poll()  # not `select`, which takes no descriptor above 1023
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def keep_freed_memory(largest_bytes: int, kept_bytes: int = 0) -> None:
    """Let glibc keep freed blocks instead of returning their pages to the kernel.

    A message of a few MB otherwise costs a page fault for every 4 KiB, several times over, each time it is
    taken: that was 3 of the 4 ms that taking a 2.7 MB image took. A model's temporaries cost likewise.

    Args:
        largest_bytes: of a block that is kept; glibc takes at most 32 MiB.
        kept_bytes: free bytes at the heap's end from which they go back; 0: eight of the largest.
    """
    if hasattr(_libc, "mallopt"):  # glibc; other C libraries have no such habit to change
        _libc.mallopt(_M_MMAP_THRESHOLD, min(largest_bytes, LARGEST_KEPT_BYTES))
        _libc.mallopt(_M_TRIM_THRESHOLD, min(kept_bytes or 8 * largest_bytes, _INT_MAX))


def return_freed_memory() -> None:
    """Give all freed memory back to the kernel, in spite of `keep_freed_memory`."""
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)


def return_code() -> None:
    """Give the pages of libraries' code back that were only needed to load them: 50 MiB of torch's.

    What runs is mapped again from the file. No one writes to these pages, so nothing is lost.
    """
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            words = line.split()
            if words[1] == "r-xp" and words[-1].endswith(".so"):
                begin, end = (int(word, 16) for word in words[0].split("-"))
                _libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_DONTNEED)


class _MallocInfo(ctypes.Structure):
    """`struct mallinfo2` of malloc.h: ten sizes, of which the ninth is of the free blocks, in bytes."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


def kept_bytes() -> int | None:
    """Freed memory that malloc keeps for this process, in bytes; None where the C library does not say."""
    if not hasattr(_libc, "mallinfo2"):  # glibc since 2.33
        return None
    _libc.mallinfo2.restype = _MallocInfo
    return int(_libc.mallinfo2().fordblks)


@contextlib.contextmanager
def held_interrupt() -> Iterator[None]:
    """Let Ctrl-C wait until the block has ended; a second one does not wait.

    A frame that is given to a stage by halves gets no answer, and what rclpy raises where
    `KeyboardInterrupt` comes into its C++ is another error. Where Ctrl-C does not raise
    `KeyboardInterrupt`, or does so in another thread, this does nothing.

    Raises:
        KeyboardInterrupt: Ctrl-C has waited.
    """
    here = threading.current_thread() is threading.main_thread()
    if not here or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    held = False

    def hold(_number: int, _frame: object) -> None:
        nonlocal held
        held = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if held:
        raise KeyboardInterrupt
