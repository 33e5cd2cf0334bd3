"""What a profile shows, as tables: frames and their steps, operators, kernels and copies, and gaps."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torchperf_ros.core.markdown_table import markdown_table

STEPS = ("decode", "observe", "preprocess", "inference", "postprocess")
"""The marks inside a frame; the frame's own is `<stage>/<tier>`."""
_ROWS = 20
_US_PER_MS = 1e3


@dataclass(frozen=True)
class _Span:
    """Something that took time, in us on the profiler's clock; `self_us` without what it called."""

    name: str
    start_us: float
    end_us: float
    self_us: float = 0.0

    @property
    def took_us(self) -> float:
        return self.end_us - self.start_us

    def holds(self, other: "_Span") -> bool:
        """Whether the other one lies inside."""
        return self.start_us <= other.start_us and other.end_us <= self.end_us


class ProfileTables:
    """Reads the events of one window; everything counts inside the frames' marks only."""

    def __init__(self, stage: str, events: Iterable[Any]) -> None:
        """Sort torch.profiler's `FunctionEvent`s of the stage's frames."""
        self._stage = stage
        self._frames: list[_Span] = []
        self._steps: dict[str, list[_Span]] = {}
        operators: list[_Span] = []
        self._kernels: list[_Span] = []
        outermost: list[_Span] = []
        for event in events:
            span = _Span(event.name, event.time_range.start, event.time_range.end, event.self_cpu_time_total)
            if event.device_type.name != "CPU":
                if not event.is_user_annotation:
                    self._kernels.append(span)
            elif event.name.startswith(f"{stage}/"):
                self._frames.append(span)
            elif event.name in STEPS:
                self._steps.setdefault(event.name, []).append(span)
            elif not event.name.startswith("ProfilerStep#"):
                operators.append(span)
                parent = "" if event.cpu_parent is None else event.cpu_parent.name
                if not parent or parent in STEPS or parent.startswith(f"{stage}/"):
                    outermost.append(span)
        self._frames.sort(key=lambda span: span.start_us)
        self._operators = [span for span in operators if self._frame_of(span) is not None]
        self._outermost = [span for span in outermost if self._frame_of(span) is not None]

    def _frame_of(self, span: _Span) -> _Span | None:
        return next((frame for frame in self._frames if frame.holds(span)), None)

    @property
    def summary(self) -> str:
        """One line: how long frames took, and the step and the operator that took most."""
        if not self._frames:
            return "no frame came while the profiler ran"
        words = [f"{len(self._frames)} frames of {self._mean_ms(self._frames):.2f} ms"]
        if self._steps:
            name = max(self._steps, key=lambda step: sum(span.took_us for span in self._steps[step]))
            words.append(f"most of it in {name} ({self._mean_ms(self._steps[name]):.2f} ms)")
        if self._operators:
            name, count, self_us, _ = _by_name(self._operators)[0]
            words.append(f"most in {name} ({self_us / len(self._frames) / _US_PER_MS:.2f} ms, {count} calls in all)")
        return ", ".join(words)

    def markdown(self) -> str:
        """All tables as a report."""
        if not self._frames:
            return f"# Profile of {self._stage}\n\n{self.summary}\n"
        return "\n".join(
            [
                f"# Profile of {self._stage}",
                "",
                self.summary + ".",
                "Times are those of a profiled run: the profiler adds about a microsecond to each operator.",
                "`trace.json.gz` beside this file opens in https://ui.perfetto.dev.",
                *markdown_table("Frames and steps", ("", "count", "mean ms", "max ms"), self._step_rows()),
                *markdown_table(
                    "Operators, by their own time on the CPU",
                    ("operator", "calls", "own ms per frame", "with callees ms per frame", "own share"),
                    self._operator_rows(),
                ),
                *markdown_table(
                    "Kernels and copies on the device",
                    ("kernel or copy", "calls", "ms per frame", "share of the frame"),
                    self._kernel_rows(),
                ),
                *markdown_table(
                    "Gaps: where nothing ran that torch knows of (Python, waiting; on a device: it idled)",
                    ("after", "before", "ms"),
                    self._gap_rows(),
                ),
                "",
            ]
        )

    def _mean_ms(self, spans: Sequence[_Span]) -> float:
        return sum(span.took_us for span in spans) / len(spans) / _US_PER_MS

    def _step_rows(self) -> Iterator[tuple[str, ...]]:
        tiers = defaultdict(list)
        for frame in self._frames:
            tiers[frame.name].append(frame)
        for name, spans in (*tiers.items(), *((step, self._steps.get(step, [])) for step in STEPS)):
            if spans:
                most = max(span.took_us for span in spans) / _US_PER_MS
                yield name, str(len(spans)), f"{self._mean_ms(spans):.3f}", f"{most:.3f}"

    def _operator_rows(self) -> Iterator[tuple[str, ...]]:
        frames, whole_us = len(self._frames) * _US_PER_MS, sum(frame.took_us for frame in self._frames)
        for name, count, self_us, total_us in _by_name(self._operators)[:_ROWS]:
            share = f"{self_us / whole_us:.1%}"
            yield name, str(count), f"{self_us / frames:.3f}", f"{total_us / frames:.3f}", share

    def _kernel_rows(self) -> Iterator[tuple[str, ...]]:
        frames, whole_us = len(self._frames) * _US_PER_MS, sum(frame.took_us for frame in self._frames)
        for name, count, _, total_us in sorted(_by_name(self._kernels), key=lambda row: -row[3])[:_ROWS]:
            yield name, str(count), f"{total_us / frames:.3f}", f"{total_us / whole_us:.1%}"

    def _gap_rows(self) -> Iterator[tuple[str, ...]]:
        """Between what ran at the top: on the device where there are kernels, else on the CPU."""
        gaps = []
        for frame in self._frames:
            inside = [span for span in self._kernels or self._outermost if frame.holds(span)]
            last = _Span("(begin of the frame)", frame.start_us, frame.start_us)
            for span in (*sorted(inside, key=lambda each: each.start_us), _Span("(end)", frame.end_us, frame.end_us)):
                gaps.append((span.start_us - last.end_us, last.name, span.name))
                last = span if span.end_us > last.end_us else last
        for gap_us, after, before in sorted(gaps, reverse=True)[:_ROWS]:
            yield after, before, f"{gap_us / _US_PER_MS:.3f}"


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
