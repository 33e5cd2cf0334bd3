"""How well anomalies are found in series that are labelled.

Ours, a frozen z-score, an EWMA and a rolling median.

Two series are recorded here and now, while a model runs and is really disturbed; the others are generated.
Every detector has its defaults for all of them, sees each sample once, and calls a score of 0.5 and more an
anomaly. Then
drives: the latency of frames at 30 Hz, for hours in which nothing happens, and with a change in the middle.
"""

import math
import statistics
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.rig.anomaly_series import DRIVE_HZ, Labelled, drive, generated, recorded
from benchmarks.rig.arguments import arguments_of, callers_path
from benchmarks.rig.report import Report, Target, say
from torchperf_ros.observe.watch.series_detector import FRAME_CAUTION, SeriesDetector
from torchperf_ros.workers.calibration import SortedWindow

OURS, CAUTIOUS = "torchperf_ros", "torchperf_ros, cautious"
_HOUR = 3600 * DRIVE_HZ  # frames
_DRIVES = 8  # of ten minutes, for each kind of change
_THRESHOLD = 0.5
_SIGMAS = 3.0
_WARM_UP = 200  # samples that count for no detector
_SAME_ALARM, _SAME_DRIVE_ALARM = 12, 150  # samples: alarms closer than that are one
_EPILOG = """\
the targets are for all series together

recall: anomalies with an alarm in them; precision: alarms in an anomaly; delay: samples to the first alarm;
AUC-PR: every sample in an anomaly against every other, over all thresholds, mean of the series.

example:
  ./run bench anomalies --samples 2000 --json anomalies.json"""


def score_of(departure: float, spread: float, sigmas: float) -> float:
    """From 0 to 1: 0.5 at `sigmas` times the spread, so that all detectors have the same threshold."""
    if departure <= 0:
        return 0.0
    return departure / (departure + sigmas * spread)


class Ours:
    """`SeriesDetector` with its defaults, or more cautious."""

    def __init__(self, caution=1.0):
        self._detector = SeriesDetector(caution=caution)

    def update(self, time_s, value):
        return self._detector.update(time_s, value).score


class FrozenZScore:
    """Mean and deviation of the first 100 samples, for ever; an anomaly is 3 deviations off."""

    _FIRST = 100

    def __init__(self):
        self._samples = []
        self._mean = self._deviation = 0.0

    def update(self, time_s, value):
        if not math.isfinite(value):
            return 0.0
        if len(self._samples) < self._FIRST:
            self._samples.append(value)
            self._mean, self._deviation = statistics.fmean(self._samples), statistics.pstdev(self._samples)
            return 0.0
        return score_of(abs(value - self._mean), self._deviation, _SIGMAS)


class Ewma:
    """Exponentially weighted mean and deviation that learn the sample before they judge it."""

    _WEIGHT = 0.05

    def __init__(self):
        self._mean = math.nan
        self._variance = 0.0

    def update(self, time_s, value):
        if not math.isfinite(value):
            return 0.0
        if math.isnan(self._mean):
            self._mean = value
        self._mean += self._WEIGHT * (value - self._mean)
        departure = abs(value - self._mean)
        self._variance += self._WEIGHT * (departure**2 - self._variance)
        return score_of(departure, math.sqrt(self._variance), _SIGMAS)


class RollingMad:
    """Median and median absolute deviation of the last 200 samples.

    An anomaly is 6 robust deviations off.
    """

    _SIZE, _FIRST, _ROBUST_SIGMAS, _TO_SIGMA = 200, 50, 6.0, 1.4826

    def __init__(self):
        self._values = SortedWindow(self._SIZE)
        self._last = deque(maxlen=self._SIZE)

    def update(self, time_s, value):
        if not math.isfinite(value):
            return 0.0
        score = 0.0
        if len(self._last) >= self._FIRST:
            median = self._values.median()
            spread = self._TO_SIGMA * statistics.median(abs(one - median) for one in self._last)
            score = score_of(abs(value - median), spread, self._ROBUST_SIGMAS)
        self._values.add(value)
        self._last.append(value)
        return score


DETECTORS = {
    "torchperf_ros": Ours,
    "torchperf_ros, cautious": lambda: Ours(FRAME_CAUTION),
    "frozen z-score": FrozenZScore,
    "EWMA": Ewma,
    "rolling median, MAD": RollingMad,
}


@dataclass
class Tally:
    anomalies: int = 0
    found: int = 0
    alarms: int = 0
    false_alarms: int = 0
    samples: int = 0
    hours: float = 0.0
    delays: list[int] = field(default_factory=list)
    areas: list[float] = field(default_factory=list)

    def add(self, series: Labelled, scores: list[float]) -> None:
        inside = [False] * len(scores)
        for first, end in series.anomalies:
            if first == end:
                continue
            self.anomalies += 1
            inside[first:end] = [True] * (end - first)
            delay = next((i for i in range(end - first) if scores[first + i] >= _THRESHOLD), None)
            if delay is not None:
                self.found += 1
                self.delays.append(delay)
        last = -math.inf
        for i in range(_WARM_UP, len(scores)):
            if scores[i] >= _THRESHOLD:
                if i - last > _SAME_ALARM:
                    self.alarms += 1
                    self.false_alarms += not inside[i]
                last = i
        self.samples += len(scores) - _WARM_UP
        self.hours += (series.times[-1] - series.times[_WARM_UP]) / 3600
        if any(inside):
            self.areas.append(_area(scores[_WARM_UP:], inside[_WARM_UP:]))

    def figures(self) -> dict[str, float]:
        return {
            "recall": self.found / self.anomalies if self.anomalies else math.nan,
            "precision": 1 - self.false_alarms / self.alarms if self.alarms else math.nan,
            "auc_pr": statistics.fmean(self.areas) if self.areas else math.nan,
            "delay_samples": float(statistics.median(self.delays)) if self.delays else math.nan,
            "false_alarms_per_10000": 1e4 * self.false_alarms / self.samples,
            "false_alarms_per_hour": self.false_alarms / self.hours,
        }


def _area(scores: list[float], inside: list[bool]) -> float:
    """Average precision; samples with the same score count together."""
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    positives, hits, area, i = sum(inside), 0, 0.0, 0
    while i < len(order):
        end = i
        while end < len(order) and scores[order[end]] == scores[order[i]]:
            end += 1
        gained = sum(inside[k] for k in order[i:end])
        hits += gained
        area += gained / positives * hits / end
        i = end
    return area


def main() -> int:
    parser = arguments_of(__doc__ or "", _EPILOG)
    parser.add_argument(
        "--samples", type=int, default=4000, help="of each recorded series, 1000 and more (default 4000)"
    )
    parser.add_argument("--hours", type=int, default=3, help="of usual drives (default 3)")
    parser.add_argument("--seed", type=int, default=1, help="of the generated series (default 1)")
    parser.add_argument(
        "--save",
        type=callers_path,
        metavar="FOLDER",
        help="write each series there as timestamp,value,anomaly",
    )
    arguments = parser.parse_args()
    if arguments.samples < 1000:
        parser.error(f"--samples {arguments.samples}: 1000 at least, for a warm-up and four disturbances")
    report = Report("anomalies", arguments)
    say("recording latency and memory of a model")
    series = [*recorded(arguments.samples), *generated(arguments.seed)]
    if arguments.save:
        _save(series, arguments.save)
    groups: dict[str, dict[str, Tally]] = {}
    cost_us = {}
    for name, make in DETECTORS.items():
        say(name)
        began, count = time.process_time(), 0
        for one in series:
            detector = make()
            scores = [detector.update(at, value) for at, value in zip(one.times, one.values, strict=True)]
            count += len(scores)
            for group in ("all", one.group):
                groups.setdefault(group, {}).setdefault(name, Tally()).add(one, scores)
        cost_us[name] = (time.process_time() - began) / count * 1e6
    figures = {
        group: {name: tally.figures() for name, tally in found.items()} for group, found in groups.items()
    }
    _show(report, series, figures, cost_us)
    say("drives")
    drives = {name: _drives(DETECTORS[name], arguments.hours) for name in (OURS, CAUTIOUS)}
    report.table(
        f"Drives at {DRIVE_HZ} Hz: {arguments.hours} hours of usual latency, {_DRIVES} changes of each"
        " kind",
        ("detector", *drives[OURS]),
        [(name, *found.values()) for name, found in drives.items()],
    )
    total, others = (
        figures["all"],
        [figures["all"][name] for name in DETECTORS if name not in {OURS, CAUTIOUS}],
    )

    def best(what: str) -> float:
        return max(other[what] for other in others)

    report.finish(
        {"groups": figures, "cost_us": cost_us, "drives": drives},
        [
            Target("recall", total[OURS]["recall"], ">=", 0.8),
            Target(
                "cautious: precision over the best of the others",
                total[CAUTIOUS]["precision"] / best("precision"),
                ">=",
                2.0,
            ),
            Target(
                "cautious: false alarms per 10,000 samples",
                total[CAUTIOUS]["false_alarms_per_10000"],
                "<=",
                2.0,
            ),
            Target("cautious: levels of 20 % found within 3 s", drives[CAUTIOUS]["levels"], ">=", _DRIVES),
        ],
    )
    return 0


def _drives(make, hours: int) -> dict[str, float]:
    """False alarms an hour in usual drives, and how many changes were found.

    Levels in 3 s, others in 80 s.
    """

    def alarms(values: list[float]) -> list[int]:
        detector = make()
        found = [i for i, value in enumerate(values) if detector.update(i / DRIVE_HZ, value) >= _THRESHOLD]
        return [
            i for before, i in zip([-_HOUR, *found], found, strict=False) if i - before > _SAME_DRIVE_ALARM
        ]

    figures = {
        "false alarms an hour": sum(len(alarms(drive(seed, _HOUR))) for seed in range(hours)) / hours
    }
    for what, within_s in (("levels", 3), ("ramps", 80), ("variances", 80)):
        figures[what] = 0.0
        for seed in range(100, 100 + _DRIVES):
            begin, values = _HOUR // 12, drive(seed, _HOUR // 6, what)
            figures[what] += any(begin <= i < begin + within_s * DRIVE_HZ for i in alarms(values))
    return figures


def _save(series: list[Labelled], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for one in series:
        inside = {i for first, end in one.anomalies for i in range(first, end)}
        rows = (
            f"{at},{value},{int(i in inside)}"
            for i, (at, value) in enumerate(zip(one.times, one.values, strict=True))
        )
        path = folder / (one.name.replace(",", "").replace(" ", "_") + ".csv")
        path.write_text("\n".join(["timestamp,value,anomaly", *rows, ""]), encoding="utf-8")


def _show(report: Report, series: list[Labelled], figures: dict, cost_us: dict[str, float]) -> None:
    columns = (
        "detector",
        "recall",
        "precision",
        "AUC-PR",
        "delay",
        "false per 10,000",
        "false per hour",
        "us a sample",
    )
    report.table(
        f"All {len(series)} series, {sum(len(one.values) for one in series)} samples",
        columns,
        [(name, *figures["all"][name].values(), cost_us[name]) for name in DETECTORS],
    )
    rows = []
    for group, found in figures.items():
        if group != "all":
            rows.append((group, *(_cell(found[name]) for name in DETECTORS)))
    report.table(
        "By kind: recall / precision / median delay in samples / false alarms per 10,000 samples",
        ("anomaly", *DETECTORS),
        rows,
    )


def _cell(figures: dict[str, float]) -> str:
    keys = ("recall", "precision", "delay_samples", "false_alarms_per_10000")
    return " / ".join("-" if math.isnan(figures[key]) else f"{figures[key]:.3g}" for key in keys)


if __name__ == "__main__":
    sys.exit(main())
