"""What a worker can record of itself for a while, on demand."""

from pathlib import Path
from typing import Protocol


class Recording(Protocol):
    """Begun and finished while the worker takes no frames, so both may take long; in between it serves."""

    def begin(self) -> None:
        """Start to record."""

    def frame_done(self) -> None:
        """A frame was run; costs next to nothing."""

    @property
    def full(self) -> bool:
        """Whether there is enough; recording goes on until `finish`, which follows soon."""

    def finish(self, folder: Path) -> str:
        """Stop, write what there is into the folder, and say in one line what it shows.

        Raises:
            OSError: the folder cannot be written.
        """
