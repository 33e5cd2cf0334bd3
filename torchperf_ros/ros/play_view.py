"""How far a log has been played: a line that is drawn again and again in a terminal, plain lines elsewhere."""

import time
from types import TracebackType
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from torchperf_ros.core.clock import NS_PER_S
from torchperf_ros.replay.player import Player

_PLAIN_EVERY_S: Final = 10.0


class PlayView:
    """Shows a player's state; while it is open, a terminal has its line."""

    def __init__(self, player: Player[Any], span_ns: tuple[int, int], rate: float, console: Console) -> None:
        """Show this player.

        Args:
            player: what is shown.
            span_ns: begin and end of the log's part that is played; equal if unknown.
            rate: how much faster than recorded it is played.
            console: where to.
        """
        self._player = player
        self._begin_ns, self._end_ns = span_ns
        self._rate = rate
        self._console = console
        self._began_s = time.monotonic()
        self._next_plain_s = 0.0
        self._was_paused = False
        self._bar = Progress(BarColumn(30), TextColumn("{task.description}"), console=console, transient=True)
        self._task = self._bar.add_task("", total=max(self._end_ns - self._begin_ns, 1))

    def __enter__(self) -> "PlayView":
        self._began_s = time.monotonic()
        self._next_plain_s = self._began_s + _PLAIN_EVERY_S
        if self._console.is_terminal:
            self._console.print("space pauses and goes on, n plays the next message, q ends", style="dim")
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    def show(self) -> None:
        """Show the state of now."""
        if self._console.is_terminal:
            self._bar.update(self._task, completed=self._done_ns, description=self._state())
        elif self._player.paused is not self._was_paused or time.monotonic() >= self._next_plain_s:
            self._console.print(self._state())
            self._next_plain_s = time.monotonic() + _PLAIN_EVERY_S
        self._was_paused = self._player.paused

    @property
    def _done_ns(self) -> int:
        """How much of the part has been played in this round."""
        if not self._player.tally.rounds:
            return 0
        return min(max(self._player.log_ns - self._begin_ns, 0), max(self._end_ns - self._begin_ns, 0))

    def _state(self) -> str:
        total_ns, tally = self._end_ns - self._begin_ns, self._player.tally
        text = f"{self._done_ns / NS_PER_S:.1f} of {total_ns / NS_PER_S:.1f} s" if total_ns > 0 else "playing"
        if total_ns > 0:
            text += f", {(total_ns - self._done_ns) / NS_PER_S / self._rate:.0f} s left"
        if tally.rounds > 1:
            text += f", round {tally.rounds}"
        return f"{text}, {self._played}{self._late()}" + (", paused" if self._player.paused else "")

    @property
    def _played(self) -> str:
        count = self._player.tally.played
        return f"{count:,} message{'' if count == 1 else 's'}"

    def _late(self) -> str:
        tally = self._player.tally
        return f", {tally.late} late, the worst by {tally.worst_late_ms:.1f} ms" if tally.late else ""

    def summary(self) -> str:
        """What was played, in one line."""
        tally = self._player.tally
        rounds = f" in {tally.rounds} rounds" if tally.rounds > 1 else ""
        late = self._late() or f", none later than 5 ms (the worst {tally.worst_late_ms:.1f} ms)"
        return f"played {self._played}{rounds} in {time.monotonic() - self._began_s:.1f} s{late}"
