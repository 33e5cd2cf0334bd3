"""A mailbox that keeps only the newest frame."""

from torchperf_ros.core.frame import Frame


class Mailbox:
    """Holds at most one frame that waits for its turn.

    Attributes:
        superseded: frames replaced by a newer one before their turn.
        stale: frames whose deadline had passed when their turn came.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._frame: Frame | None = None
        self.superseded = 0
        self.stale = 0

    @property
    def waiting(self) -> Frame | None:
        """The frame that waits for its turn."""
        return self._frame

    def put(self, frame: Frame) -> None:
        """Keep `frame`; a frame that was waiting is superseded."""
        if self._frame is not None:
            self.superseded += 1
        self._frame = frame

    def take(self, now_ns: int) -> Frame | None:
        """The waiting frame, unless its deadline has passed: then it is dropped as stale."""
        frame, self._frame = self._frame, None
        if frame is not None and frame.deadline_ns <= now_ns:
            self.stale += 1
            return None
        return frame

    def clear(self) -> None:
        """Drop a waiting frame, counted as superseded."""
        if self._frame is not None:
            self._frame = None
            self.superseded += 1
