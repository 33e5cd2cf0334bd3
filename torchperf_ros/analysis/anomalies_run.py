"""A series through the detector: a score for each row, and the events."""

import csv
from array import array
from collections.abc import Callable, Iterable, MutableSequence
from dataclasses import dataclass, field
from typing import TextIO

from torchperf_ros.analysis.anomalies_rows import Row
from torchperf_ros.core.anomaly.series_detector import SeriesDetector


@dataclass
class Event:
    """One anomaly, from the first sample that scored 0.5 until the evidence was gone.

    Attributes:
        first, last: timestamps, as written in the file.
        begin_s, end_s: the same in seconds.
        kind, value, baseline, score: of the sample that scored most.
        peak_s: when that was.
    """

    first: str
    last: str
    begin_s: float
    end_s: float
    kind: str
    value: float
    baseline: float
    score: float
    peak_s: float


@dataclass
class Course:
    """What a picture needs of every row, 40 bytes for each."""

    time_s: MutableSequence[float] = field(default_factory=lambda: array("d"))
    value: MutableSequence[float] = field(default_factory=lambda: array("d"))
    baseline: MutableSequence[float] = field(default_factory=lambda: array("d"))
    departure: MutableSequence[float] = field(default_factory=lambda: array("d"))
    score: MutableSequence[float] = field(default_factory=lambda: array("d"))


@dataclass
class Verdict:
    """What was found in a file.

    Attributes:
        rows, missing, repeated, backward: numbers of rows: all, without a finite value, with the same timestamp as
            the row before, with an earlier one.
        first_s, last_s: the earliest and the latest time.
        events: in order.
    """

    rows: int = 0
    missing: int = 0
    repeated: int = 0
    backward: int = 0
    first_s: float = 0.0
    last_s: float = 0.0
    events: list[Event] = field(default_factory=list)


def judge_rows(
    rows: Iterable[Row],
    detector: SeriesDetector,
    write: Callable[[Row, float], None],
    course: Course | None,
    advance: Callable[[], None],
) -> Verdict:
    """Score each row when it comes, and hand it to `write`; rows that follow are not looked at.

    Args:
        rows: in the order of the file.
        detector: a fresh one.
        write: takes a row and its score.
        course: is filled, if there is one.
        advance: called after each row.

    Raises:
        SeriesError: from `rows`.
    """
    verdict = Verdict()
    event: Event | None = None
    before_s = None
    for row in rows:
        reading = detector.update(row.time_s, row.value)
        write(row, reading.score)
        verdict.rows += 1
        verdict.missing += not abs(row.value) < float("inf")
        if before_s is None:
            verdict.first_s = verdict.last_s = row.time_s
        else:
            verdict.repeated += row.time_s == before_s
            verdict.backward += row.time_s < before_s
        before_s = row.time_s
        verdict.first_s, verdict.last_s = min(verdict.first_s, row.time_s), max(verdict.last_s, row.time_s)
        if not detector.active:
            event = None
        elif event is None:
            event = Event(row.timestamp, row.timestamp, row.time_s, row.time_s, reading.kind, row.value,
                          reading.baseline, reading.score, row.time_s)  # fmt: skip
            verdict.events.append(event)
        else:
            event.last, event.end_s = row.timestamp, row.time_s
            if reading.score > event.score:
                event.kind, event.value, event.baseline = reading.kind, row.value, reading.baseline
                event.score, event.peak_s = reading.score, row.time_s
        if course is not None:
            course.time_s.append(row.time_s)
            course.value.append(row.value)
            course.baseline.append(reading.baseline)
            course.departure.append(detector.usual_departure)
            course.score.append(reading.score)
        advance()
    return verdict


def csv_writer(file: TextIO) -> Callable[[Row, float], None]:
    """Writes `timestamp,value,anomaly_score` rows, the header first; the first two as they were read."""
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(("timestamp", "value", "anomaly_score"))

    def write(row: Row, score: float) -> None:
        writer.writerow((row.timestamp, row.text, f"{score:.6f}"))

    return write
