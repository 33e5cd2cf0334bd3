"""What is said while a log is played; needs no ROS."""

import io
from typing import NamedTuple

import pytest
from rich.console import Console

from torchperf_ros.core.clock import NS_PER_S, VirtualClock
from torchperf_ros.replay.player import Player
from torchperf_ros.ros.play_view import PlayView

START_NS = 1_600_000_000 * NS_PER_S


class Message(NamedTuple):
    t_ns: int


def seen(*, terminal, span_s=10.0, rate=2.0, late_ms=0.0):
    """A player that has played three messages, the last after four seconds of the log; what was shown of it."""
    clock, shown = VirtualClock(), io.StringIO()
    player = Player(
        lambda message: message.t_ns > START_NS + NS_PER_S and clock.advance_ms(late_ms),
        rate=rate, clock=clock, wait=lambda s: clock.advance_ms(s * 1e3),
    )  # fmt: skip
    view = PlayView(
        player,
        (START_NS, START_NS + round(span_s * NS_PER_S)),
        rate,
        Console(file=shown, width=120, force_terminal=terminal),
    )
    with view:
        player.play([Message(START_NS + s * NS_PER_S) for s in (0, 3, 3)] + [Message(START_NS + 4 * NS_PER_S)])
        player.pause()
        view.show()
        view.show()
        player.resume()
        view.show()
    return shown.getvalue(), view.summary()


def test_given_no_terminal_when_shown_then_a_line_comes_where_something_has_changed():
    text, _ = seen(terminal=False)
    assert text.splitlines() == ["4.0 of 10.0 s, 3 s left, 4 messages, paused", "4.0 of 10.0 s, 3 s left, 4 messages"]


def test_given_a_terminal_when_shown_then_there_is_a_bar_and_a_word_on_the_keys():
    text, _ = seen(terminal=True)
    assert "space pauses and goes on" in text
    assert "━" in text
    assert "4.0 of 10.0 s" in text


def test_given_a_log_that_does_not_say_how_long_it_is_when_shown_then_no_time_is_made_up():
    text, _ = seen(terminal=False, span_s=0.0)
    assert text.splitlines()[0] == "playing, 4 messages, paused"


@pytest.mark.parametrize(
    ("late_ms", "says"),
    [(2.0, ", none later than 5 ms (the worst 2.0 ms)"), (30.0, ", 1 late, the worst by 30.0 ms")],
)
def test_given_messages_when_all_is_over_then_the_summary_says_how_late_they_were(late_ms, says):
    _, summary = seen(terminal=False, late_ms=late_ms)
    assert summary.startswith("played 4 messages in ")
    assert summary.endswith(says)
