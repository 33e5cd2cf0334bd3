"""What a profile shows, as tables: frames and their steps, operators, kernels and copies, and gaps."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torchperf_ros.runs.markdown_table import markdown_table

STEPS = ("decode", "observe", "preprocess", "inference", "postprocess")
"""The marks inside a frame; the frame's own is `<stage>/<tier>`."""
_ROWS = 20
_US_PER_MS = 1e3


class _Span(NamedTuple):
    """Something that took time, in us on the profiler's clock; `self_us` without what it called."""

    start_us: float
    end_us: float
    name: str
    self_us: float = 0.0

    @property
    def took_us(self) -> float:
        return self.end_us - self.start_us


class ProfileTables:
    """Reads the events of one window; everything counts inside the frames' marks only."""

    def __init__(self, stage: str, events: Iterable[Any]) -> None:
        """Sort torch.profiler's `FunctionEvent`s of the stage's frames."""
        self._stage = stage
        self._marks: dict[str, list[_Span]] = {}
        self._kernels: list[_Span] = []
        operators: list[_Span] = []
        outermost: list[_Span] = []
        for event in events:
            span = _Span(event.time_range.start, event.time_range.end, event.name, event.self_cpu_time_total)
            if event.device_type.name != "CPU":
                self._kernels += [] if event.is_user_annotation else [span]
            elif self._is_mark(event.name):
                self._marks.setdefault(event.name, []).append(span)
            elif not event.name.startswith("ProfilerStep#"):
                operators.append(span)
                if event.cpu_parent is None or self._is_mark(event.cpu_parent.name):
                    outermost.append(span)
        self._frames = sorted(span for name, spans in self._marks.items() if name not in STEPS for span in spans)
        self._operators = self._inside(operators, self._frames)
        self._outermost = self._inside(outermost, self._frames)

    def _is_mark(self, name: str) -> bool:
        return name in STEPS or name.startswith(f"{self._stage}/")

    @staticmethod
    def _inside(spans: Iterable[_Span], frames: Sequence[_Span]) -> list[_Span]:
        return [s for s in spans if any(f.start_us <= s.start_us and s.end_us <= f.end_us for f in frames)]

    @property
    def summary(self) -> str:
        """One line: the time of a frame, and the step and the operator that took most."""
        if not self._frames:
            return "no frame came while the profiler ran"
        words = [f"{len(self._frames)} frames of {_mean_ms(self._frames):.2f} ms"]
        if steps := [spans for name, spans in self._marks.items() if name in STEPS]:
            most = max(steps, key=lambda spans: sum(span.took_us for span in spans))
            words.append(f"most of it in {most[0].name} ({_mean_ms(most):.2f} ms)")
        if self._operators:
            name, count, self_us, _ = _by_name(self._operators)[0]
            words.append(f"most in {name} ({self_us / len(self._frames) / _US_PER_MS:.2f} ms, {count} calls in all)")
        return ", ".join(words)

    def markdown(self) -> str:
        """All tables as a report."""
        if not self._frames:
            return f"# Profile of {self._stage}\n\n{self.summary}\n"
        frames, whole_us = len(self._frames) * _US_PER_MS, sum(frame.took_us for frame in self._frames)
        kernels = sorted(_by_name(self._kernels), key=lambda row: -row[3])[:_ROWS]
        lines = [
            f"# Profile of {self._stage}",
            "",
            self.summary + ".",
            "Times are those of a profiled run: the profiler adds about a microsecond to each operator.",
            "`trace.json.gz` beside this file opens in https://ui.perfetto.dev.",
            *markdown_table("Frames and steps", ("", "count", "mean ms", "max ms"), self._step_rows()),
            *markdown_table(
                "Operators, by their own time on the CPU",
                ("operator", "calls", "own ms per frame", "with callees ms per frame", "own share"),
                [
                    (name, str(count), f"{own / frames:.3f}", f"{whole / frames:.3f}", f"{own / whole_us:.1%}")
                    for name, count, own, whole in _by_name(self._operators)[:_ROWS]
                ],
            ),
            *markdown_table(
                "Kernels and copies on the device",
                ("kernel or copy", "calls", "ms per frame", "share of the frame"),
                [(name, str(n), f"{took / frames:.3f}", f"{took / whole_us:.1%}") for name, n, _, took in kernels],
            ),
            *markdown_table(
                "Gaps: where nothing ran that torch knows of (Python, waiting; on a device: it idled)",
                ("after", "before", "ms"),
                self._gap_rows(),
            ),
            "",
        ]
        return "\n".join(lines)

    def _step_rows(self) -> Iterator[tuple[str, ...]]:
        tiers = [name for name in self._marks if name not in STEPS]
        for name in (*tiers, *STEPS):
            if spans := self._marks.get(name):
                most = max(span.took_us for span in spans) / _US_PER_MS
                yield name, str(len(spans)), f"{_mean_ms(spans):.3f}", f"{most:.3f}"

    def _gap_rows(self) -> Iterator[tuple[str, ...]]:
        """Between what ran at the top: on the device where there are kernels, else on the CPU."""
        gaps = []
        for frame in self._frames:
            last = _Span(frame.start_us, frame.start_us, "(begin of the frame)")
            inside = self._inside(self._kernels or self._outermost, [frame])
            for span in (*sorted(inside), _Span(frame.end_us, frame.end_us, "(end)")):
                gaps.append((span.start_us - last.end_us, last.name, span.name))
                last = span if span.end_us > last.end_us else last
        for gap_us, after, before in sorted(gaps, reverse=True)[:_ROWS]:
            yield after, before, f"{gap_us / _US_PER_MS:.3f}"


def _mean_ms(spans: Sequence[_Span]) -> float:
    return sum(span.took_us for span in spans) / len(spans) / _US_PER_MS


def _by_name(spans: Iterable[_Span]) -> list[tuple[str, int, float, float]]:
    """Name, calls, own time and whole time in us; most own time first."""
    sums: dict[str, list[float]] = {}
    for span in spans:
        entry = sums.setdefault(span.name, [0, 0.0, 0.0])
        entry[0] += 1
        entry[1] += span.self_us
        entry[2] += span.took_us
    rows = [(name, int(count), self_us, total_us) for name, (count, self_us, total_us) in sums.items()]
    return sorted(rows, key=lambda row: -row[2])
