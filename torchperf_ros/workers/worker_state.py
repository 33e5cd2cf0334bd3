"""Where a worker stands in its life, and which way that may go on."""

import enum
import threading
import time
from typing import Final


class WorkerState(enum.Enum):
    """A worker's state. Whether it runs a frame just now is no state: `WorkerProcess.seq` says it."""

    STARTING = enum.auto()  # it loads, and takes no frames yet
    SERVING = enum.auto()  # it takes frames
    AWAY = enum.auto()  # it takes no frames while it begins or ends a capture
    HELD = enum.auto()  # SIGSTOP has stopped it, wherever it is, until the stage has no frame
    WITHDRAWN = enum.auto()  # it takes no more frames: another takes its place, or its socket is closed
    ENDING = enum.auto()  # SIGKILL was sent
    STUCK = enum.auto()  # SIGKILL has not ended it in time: its place is given up
    GONE = enum.auto()  # the process has ended, and the node has nothing of it any more


_S = WorkerState
# a tuple: its entries are compared by identity, where a set calls the enum's own hash
_USABLE: Final = (_S.SERVING, _S.AWAY, _S.HELD)
_OVER: Final = frozenset({_S.WITHDRAWN, _S.ENDING, _S.STUCK, _S.GONE})
_ENDS: Final = frozenset({_S.WITHDRAWN, _S.ENDING, _S.GONE})

# The states that may follow each.
NEXT: Final[dict[WorkerState, frozenset[WorkerState]]] = {
    _S.STARTING: _ENDS | {_S.SERVING},
    _S.SERVING: _ENDS | {_S.AWAY, _S.HELD},
    _S.AWAY: _ENDS | {_S.SERVING},
    _S.HELD: _ENDS | {_S.SERVING},
    _S.WITHDRAWN: _ENDS - {_S.WITHDRAWN},
    _S.ENDING: frozenset({_S.STUCK, _S.GONE}),
    _S.STUCK: frozenset({_S.GONE}),
    _S.GONE: frozenset(),
}


class IllegalTransition(RuntimeError):
    """A worker is asked for what cannot follow its state: a mistake in this package."""


class WorkerLife:
    """One worker's state, when it was entered, and why it ends.

    Any thread may call: the pool's and the stage's both notice that a worker has ended, in any order. So
    what a worker can no longer enter because it has ended meanwhile is no mistake, and changes nothing.

    Attributes:
        state: read it without a lock.
        since_ns: monotonic time at which it was entered.
        reason: why it was killed, "" before; `hung`: as it did not come back from a frame.
    """

    def __init__(self) -> None:
        self.state = WorkerState.STARTING
        self.since_ns = time.monotonic_ns()
        self.reason = ""
        self.hung = False
        self._lock = threading.Lock()

    @property
    def is_usable(self) -> bool:
        return self.state in _USABLE

    def enter(self, state: WorkerState, reason: str = "", *, hung: bool = False) -> bool:
        """Go on to a state, for this `reason`; False: the worker has ended, and nothing changes.

        Raises:
            IllegalTransition: the state cannot follow the one that it is in, see `NEXT`.
        """
        with self._lock:
            if state in NEXT[self.state]:
                self.state, self.since_ns = state, time.monotonic_ns()
                self.reason, self.hung = reason or self.reason, hung or self.hung
                return True
            if self.state in _OVER and state is not WorkerState.STARTING:
                return False
            raise IllegalTransition(f"a worker that is {self.state.name} cannot be {state.name} next")

    def enter_from(self, before: WorkerState, state: WorkerState) -> bool:
        """Likewise, if it is in the state `before`; False: it is in another, and nothing changes."""
        with self._lock:
            if self.state is not before:
                return False
            if state not in NEXT[before]:
                raise IllegalTransition(f"a worker that is {before.name} cannot be {state.name} next")
            self.state, self.since_ns = state, time.monotonic_ns()
            return True
