"""The share of the processor that others took, from counters that are made up here."""

import math
import os
from pathlib import Path

import pytest

from torchperf_ros.demo.processor_share import ProcessorShare

PER_S = os.sysconf("SC_CLK_TCK")


def counters(busy_s: float, idle_s: float) -> str:
    return f"cpu  {round(busy_s * PER_S)} 0 0 {round(idle_s * PER_S)} 0 0 0 0 0 0\ncpu0 1 2 3\n"


def test_given_a_machine_that_was_busy_when_asked_then_what_is_not_our_own_is_the_others(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text(counters(1000, 1000))
    share = ProcessorShare(stat)
    stat.write_text(counters(1600, 1400))
    assert share.of_others() == pytest.approx(0.6, abs=0.01)


def test_given_an_idle_machine_when_asked_then_our_own_work_does_not_make_it_negative(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text(counters(0, 0))
    share = ProcessorShare(stat)
    stat.write_text(counters(0, 100))
    assert share.of_others() == 0.0


@pytest.mark.parametrize("text", [None, "", "cpu a b\n"])
def test_given_no_counters_when_asked_then_it_is_unknown(tmp_path: Path, text: str | None) -> None:
    stat = tmp_path / "stat"
    if text is not None:
        stat.write_text(text)
    assert math.isnan(ProcessorShare(stat).of_others())
