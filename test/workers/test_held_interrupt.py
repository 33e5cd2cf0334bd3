"""Ctrl-C while something is half done."""

import signal
import threading

import pytest

from torchperf_ros.workers.process_setup import held_interrupt


@pytest.mark.parametrize(("times", "reached"), [(1, ["block"]), (2, [])])  # a second one does not wait
def test_given_ctrl_c_in_the_block_when_held_then_it_comes_at_its_end_and_later_ones_at_once(
    times, reached
):
    done = []

    def block():
        with held_interrupt():
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
            done.append("block")

    with pytest.raises(KeyboardInterrupt):
        block()
    assert done == reached
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_given_another_answer_to_ctrl_c_or_another_thread_when_held_then_nothing_is_changed():
    seen = []
    before = signal.signal(signal.SIGINT, lambda *_: seen.append("own"))
    try:
        with held_interrupt():
            signal.raise_signal(signal.SIGINT)
            assert seen == ["own"]
    finally:
        signal.signal(signal.SIGINT, before)

    def in_a_thread():
        with held_interrupt():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
    assert seen == ["own", before]
