"""What a profile shows, as tables: frames and their steps, operators, kernels and copies, and gaps."""

from collections.abc import Iterable
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


def profile_report(stage: str, events: Iterable[Any]) -> tuple[str, str]:
    """One line, the time of a frame and what took most of it, and all tables, of what ran inside of the frames' marks.

    `events` are torch.profiler's `FunctionEvent`s of one window of the stage.
    """
    marks: dict[str, list[_Span]] = {}
    kernels: list[_Span] = []
    operators: list[_Span] = []
    outermost: list[_Span] = []
    for event in events:
        span = _Span(event.time_range.start, event.time_range.end, event.name, event.self_cpu_time_total)
        if event.device_type.name != "CPU":
            kernels += [] if event.is_user_annotation else [span]
        elif event.name in STEPS or event.name.startswith(f"{stage}/"):
            marks.setdefault(event.name, []).append(span)
        elif not event.name.startswith("ProfilerStep#"):
            operators.append(span)
            parent = event.cpu_parent.name if event.cpu_parent else f"{stage}/"
            outermost += [span] if parent in STEPS or parent.startswith(f"{stage}/") else []
    frames = sorted(span for name, spans in marks.items() if name not in STEPS for span in spans)
    if not frames:
        summary = "no frame came while the profiler ran"
        return summary, f"# Profile of {stage}\n\n{summary}\n"
    by_name, per_frame = _by_name(_inside(operators, frames)), len(frames) * _US_PER_MS
    words = [f"{len(frames)} frames of {_mean_ms(frames):.2f} ms"]
    if steps := [spans for name, spans in marks.items() if name in STEPS]:
        most = max(steps, key=lambda spans: sum(span.took_us for span in spans))
        words.append(f"most of it in {most[0].name} ({_mean_ms(most):.2f} ms)")
    if by_name:
        name, count, self_us, _ = by_name[0]
        words.append(f"most in {name} ({self_us / per_frame:.2f} ms, {count} calls in all)")
    summary, whole_us = ", ".join(words), sum(frame.took_us for frame in frames)
    tables = [
        *markdown_table("Frames and steps", ("", "count", "mean ms", "max ms"), [
            (name, str(len(marks[name])), f"{_mean_ms(marks[name]):.3f}",
             f"{max(span.took_us for span in marks[name]) / _US_PER_MS:.3f}")
            for name in (*(name for name in marks if name not in STEPS), *(name for name in STEPS if name in marks))
        ]),
        *markdown_table(
            "Operators, by their own time on the CPU",
            ("operator", "calls", "own ms per frame", "with callees ms per frame", "own share"),
            [(name, str(count), f"{own / per_frame:.3f}", f"{whole / per_frame:.3f}", f"{own / whole_us:.1%}")
             for name, count, own, whole in by_name[:_ROWS]],
        ),
        *markdown_table(
            "Kernels and copies on the device", ("kernel or copy", "calls", "ms per frame", "share of the frame"),
            [(name, str(count), f"{took / per_frame:.3f}", f"{took / whole_us:.1%}")
             for name, count, _, took in sorted(_by_name(kernels), key=lambda row: -row[3])[:_ROWS]],
        ),
        *markdown_table(
            "Gaps: where nothing ran that torch knows of (Python, waiting; on a device: it idled)",
            ("after", "before", "ms"),
            [(after, before, f"{gap_us / _US_PER_MS:.3f}")
             for gap_us, after, before in _gaps(frames, kernels or outermost)[:_ROWS]],
        ),
    ]  # fmt: skip
    head = (
        f"# Profile of {stage}\n\n{summary}.\n"
        "Times are those of a profiled run: the profiler adds about a microsecond to each operator.\n"
        "`trace.json.gz` beside this file opens in https://ui.perfetto.dev.\n"
    )
    return summary, head + "\n".join([*tables, ""])


def _inside(spans: Iterable[_Span], frames: list[_Span]) -> list[_Span]:
    return [span for span in spans if any(f.start_us <= span.start_us and span.end_us <= f.end_us for f in frames)]


def _gaps(frames: list[_Span], spans: list[_Span]) -> list[tuple[float, str, str]]:
    """Us between two of the spans inside of a frame, and their names; the longest first."""
    gaps = []
    for frame in frames:
        last = _Span(frame.start_us, frame.start_us, "(begin of the frame)")
        for span in (*sorted(_inside(spans, [frame])), _Span(frame.end_us, frame.end_us, "(end)")):
            gaps.append((span.start_us - last.end_us, last.name, span.name))
            last = span if span.end_us > last.end_us else last
    return sorted(gaps, reverse=True)


def _mean_ms(spans: list[_Span]) -> float:
    return sum(span.took_us for span in spans) / len(spans) / _US_PER_MS


def _by_name(spans: Iterable[_Span]) -> list[tuple[str, int, float, float]]:
    """Name, calls, own time and whole time in us; most own time first."""
    sums: dict[str, tuple[int, float, float]] = {}
    for span in spans:
        count, self_us, took_us = sums.get(span.name, (0, 0.0, 0.0))
        sums[span.name] = count + 1, self_us + span.self_us, took_us + span.took_us
    return sorted(((name, *found) for name, found in sums.items()), key=lambda row: -row[2])
