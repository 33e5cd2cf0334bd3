"""What a profile shows, as tables: frames and their steps, operators, kernels and copies, and gaps."""

from collections.abc import Iterable
from operator import attrgetter
from statistics import mean
from typing import Any

from torch.profiler import profile

from torchperf_ros.runs.markdown_table import markdown_table

STEPS = ("decode", "observe", "preprocess", "inference", "postprocess")
"""The marks inside a frame; the frame's own is `<stage>/<tier>`."""
_ROWS = 20
_US_PER_MS = 1e3


def profile_report(stage: str, profiler: profile) -> tuple[str, str]:
    """One line, the time of a frame and what took most of it, and all tables, of a window of the stage's frames."""
    marks: dict[str, list[Any]] = {}
    kernels, outermost = [], []
    for event in profiler.events() or ():
        parent = event.cpu_parent.name if event.cpu_parent else ""
        if event.device_type.name != "CPU":
            kernels += [] if event.is_user_annotation else [event]
        elif event.name in STEPS or event.name.startswith(f"{stage}/"):
            marks.setdefault(event.name, []).append(event)
        elif parent in STEPS or parent.startswith(f"{stage}/"):
            outermost.append(event)
    frames = [frame for name in marks if name not in STEPS for frame in marks[name]]
    if not frames:
        summary = "no frame came while the profiler ran"
        return summary, f"# Profile of {stage}\n\n{summary}\n"
    per_frame, whole_us = len(frames) * _US_PER_MS, sum(frame.time_range.elapsed_us() for frame in frames)
    times_ms = {name: [one.time_range.elapsed_us() / _US_PER_MS for one in marks[name]] for name in marks}
    found = [each for each in profiler.key_averages() if each.key not in marks and "ProfilerStep" not in each.key]
    operators = [each for each in found if each.device_type.name == "CPU"]
    on_device = [each for each in found if each.device_type.name != "CPU" and not each.is_user_annotation]
    operators.sort(key=attrgetter("self_cpu_time_total"), reverse=True)
    on_device.sort(key=attrgetter("device_time_total"), reverse=True)
    steps, words = [name for name in STEPS if name in marks], [f"{len(frames)} frames of {whole_us / per_frame:.2f} ms"]
    if steps:
        most = max(steps, key=lambda name: sum(times_ms[name]))
        words.append(f"most of it in {most} ({mean(times_ms[most]):.2f} ms)")
    for first in operators[:1]:
        words.append(
            f"most in {first.key} ({first.self_cpu_time_total / per_frame:.2f} ms, {first.count} calls in all)"
        )
    summary = ", ".join(words)
    tables = [
        *markdown_table("Frames and steps", ("", "count", "mean ms", "max ms"), [
            (name, str(len(times_ms[name])), f"{mean(times_ms[name]):.3f}", f"{max(times_ms[name]):.3f}")
            for name in (*sorted(marks.keys() - set(STEPS)), *steps)
        ]),
        *markdown_table(
            "Operators, by their own time on the CPU",
            ("operator", "calls", "own ms per frame", "with callees ms per frame", "own share"),
            [(each.key, str(each.count), f"{each.self_cpu_time_total / per_frame:.3f}",
              f"{each.cpu_time_total / per_frame:.3f}", f"{each.self_cpu_time_total / whole_us:.1%}")
             for each in operators[:_ROWS]],
        ),
        *markdown_table(
            "Kernels and copies on the device", ("kernel or copy", "calls", "ms per frame", "share of the frame"),
            [(each.key, str(each.count), f"{each.device_time_total / per_frame:.3f}",
              f"{each.device_time_total / whole_us:.1%}") for each in on_device[:_ROWS]],
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


def _gaps(frames: Iterable[Any], events: Iterable[Any]) -> list[tuple[float, str, str]]:
    """Us between two of the events inside of a frame, and their names; the longest first."""
    gaps = []
    spans = sorted((each.time_range.start, each.time_range.end, each.name) for each in events)
    for begin_us, end_us in ((frame.time_range.start, frame.time_range.end) for frame in frames):
        last_us, last = begin_us, "(begin of the frame)"
        inside = (span for span in spans if begin_us <= span[0] and span[1] <= end_us)
        for start_us, stop_us, name in (*inside, (end_us, end_us, "(end)")):
            gaps.append((start_us - last_us, last, name))
            last_us, last = max((last_us, last), (stop_us, name))
    return sorted(gaps, reverse=True)
