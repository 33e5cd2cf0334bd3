"""Graph breaks, one for each place in the user's code: reason, place, category, advice and cost."""

import os
import re
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from torchperf_ros.analysis.break_advice import Advice, advise
from torchperf_ros.analysis.break_category import Category, categorize
from torchperf_ros.analysis.compiler_trace import TraceEvent
from torchperf_ros.analysis.graph_capture import Graph
from torchperf_ros.analysis.source_line import SourceLine, read_line

BREAK_EVENT = "dynamo_graph_break_reason"

_FRAME = re.compile(r'^  File "(.+)", line (\d+), in (.+)$')
_RESUMED = re.compile(r"torch_dynamo_resume_in_(.+?)_at_(\d+)")
_CARETS = re.compile(r"^\s*[~^]+\s*$")
_WRAPPERS = (
    re.compile(r"^Encountered graph break when attempting to trace .*?:\s*\n+", re.DOTALL),
    re.compile(r"^(Failed to handle|Encountered) graph break .*?Graph break encountered:\s*\n+", re.DOTALL),
)
_THIS_TOOL = f"{Path(__file__).resolve().parent}{os.sep}"
_NOT_THE_USERS = tuple(
    f"{Path(path).resolve()}{os.sep}"
    for path in (
        sysconfig.get_path("stdlib"),
        Path(torch.__file__).parent,
        Path(np.__file__).parent,
        Path(__file__).parent,
    )
)
_INSTALLED = "site-packages"


@dataclass(frozen=True)
class Frame:
    """One Python frame: where, in which function, and the compiler's underline below the line, if it has one."""

    file: str
    line: int
    function: str
    underline: str = ""


@dataclass(frozen=True)
class RawBreak:
    """One break as the compiler reports it.

    Attributes:
        compile_id: the compilation that it ended.
        after_graph: the graph that had run last.
        input_set: which inputs were running.
        reason: the compiler's text without its introduction.
        whole_function: the function is left uncompiled, not only split.
        stack: outermost first.
    """

    compile_id: str
    after_graph: int
    input_set: int
    reason: str
    whole_function: bool
    stack: tuple[Frame, ...]


@dataclass
class GraphBreak:
    """All breaks at one line.

    Attributes:
        line: where in the user's code.
        function: its name.
        underline: `^^^` below the part of the line that breaks, with the line's own indentation taken off.
        category: what kind it is.
        reasons: the compiler's texts, the first one first.
        advice: what to do instead.
        whole_function: the compiler left the function around it uncompiled.
        splits: the functions that the compiler splits or leaves uncompiled because of it: callers are split as well.
        input_set: the first one that ran into it.
        gaps: the gaps between graphs that it causes.
        gap_ms: time in these gaps in one run; NaN until measured.
    """

    line: SourceLine
    function: str
    underline: str
    category: Category
    reasons: list[str]
    advice: Advice
    whole_function: bool
    splits: list[str]
    input_set: int
    gaps: list[int] = field(default_factory=list)
    gap_ms: float = float("nan")

    @property
    def title(self) -> str:
        """The compiler's name for it, in one line."""
        return self.reasons[0].partition("\n")[0]

    @property
    def explanation(self) -> str:
        """The compiler's explanation in one line, empty where it has none."""
        found = re.search(r"Explanation: (.*?)(?:\n|$)", self.reasons[0])
        return found[1].strip() if found else ""


def parse_break(event: TraceEvent, after_graph: int, input_set: int) -> RawBreak:
    """Read the compiler's text about one break."""
    body = event.text.partition("\nTraceback (most recent call last)")[0]
    head, _, traceback = body.partition("User code traceback:")
    reason = head.partition("Reason: ")[2] or head  # "Graph Break Reason: ", older: "Reason: "
    reason = reason.partition("\nStack variable source attribution:")[0]
    whole = "gracefully" in reason.partition("\n")[0]
    for wrapper in _WRAPPERS:
        reason = wrapper.sub("", reason)
    frames = _below_this_tool(read_frames(traceback))
    place = re.match(r"Graph break in user code at (.+):(\d+)", event.text)
    if not frames and place:
        frames = [Frame(place[1], int(place[2]), "?")]
    return RawBreak(event.compile_id, after_graph, input_set, reason.strip(), whole, tuple(frames))


def _below_this_tool(frames: list[Frame]) -> list[Frame]:
    """What the model called, without what called the model."""
    own = [index for index, frame in enumerate(frames) if str(Path(frame.file).resolve()).startswith(_THIS_TOOL)]
    return frames[own[-1] + 1 :] if own else frames


def read_frames(text: str) -> list[Frame]:
    """Frames of a formatted traceback, with the underline that Python 3.11 and later give them."""
    frames: list[Frame] = []
    for line in text.splitlines():
        if match := _FRAME.match(line):
            frames.append(Frame(match[1], int(match[2]), match[3]))
        elif frames and _CARETS.match(line):
            last = frames[-1]
            frames[-1] = Frame(last.file, last.line, last.function, line[4:].rstrip())
    return frames


def innermost_users(frames: tuple[Frame, ...] | list[Frame]) -> Frame | None:
    """The innermost frame in the user's code: not in torch, NumPy, the standard library or this tool."""
    return next((frame for frame in reversed(frames) if is_users(frame.file)), None)


def is_users(file: str) -> bool:
    """Whether a file is neither torch's, NumPy's, the standard library's nor this tool's."""
    path = str(Path(file).resolve())
    if file.startswith("<"):
        return False
    in_stdlib = path.startswith(_NOT_THE_USERS[0]) and _INSTALLED not in path
    return not in_stdlib and not path.startswith(_NOT_THE_USERS[1:])


def merge_breaks(
    raw: list[RawBreak], graphs: list[Graph], functions: dict[str, tuple[str, str, int]]
) -> list[GraphBreak]:
    """One break for each line of the user's code, in the order in which the compiler met them.

    Args:
        raw: as the compiler reports them.
        graphs: all that were captured.
        functions: name, file and line of the compiled functions, by frame, the first number of a compile id.
    """
    own_graph = {graph.compile_id: graph.index for graph in graphs}
    found: dict[tuple[str, int], GraphBreak] = {}
    for item in raw:
        frame = innermost_users(item.stack) or (item.stack[-1] if item.stack else Frame("?", 0, "?"))
        line = read_line(frame.file, frame.line)
        gap = own_graph.get(item.compile_id, item.after_graph)
        name, file, _ = functions.get(item.compile_id.partition("/")[0], ("?", "?", 0))
        splits = [_RESUMED.sub(r"\1", name)] if is_users(file) else []
        known = found.get((frame.file, frame.line))
        if known is None:
            category = categorize(item.reason, line)
            found[frame.file, frame.line] = GraphBreak(
                line, readable_function(frame.function), _underline(frame, line), category, [item.reason],
                advise(category, line), item.whole_function, splits, item.input_set, [gap],
            )  # fmt: skip
            continue
        known.splits += [name for name in splits if name not in known.splits]
        known.whole_function |= item.whole_function
        known.underline = known.underline or frame.underline
        if item.reason not in known.reasons:
            known.reasons.append(item.reason)
        if gap not in known.gaps:
            known.gaps.append(gap)
    return list(found.values())


def _underline(frame: Frame, line: SourceLine) -> str:
    """The compiler's, which is the finer one, without a comment that it may run on into."""
    statement = line.underline()
    return (frame.underline[: len(statement)] if statement else frame.underline) or statement


def put_cost(breaks: list[GraphBreak], gap_ms: list[dict[int, float]]) -> None:
    """Give each break the time of its gaps, from the input set that met it first, and sort by it, dearest first.

    Args:
        breaks: sorted in place.
        gap_ms: for each input set, time by gap; see `graph_capture.BEFORE_FIRST`.
    """
    for item in breaks:
        times = gap_ms[item.input_set] if item.input_set < len(gap_ms) else {}
        if known := [times[gap] for gap in item.gaps if gap in times]:
            item.gap_ms = sum(known)
    breaks.sort(key=lambda item: -(item.gap_ms if item.gap_ms == item.gap_ms else 0.0))


def readable_function(name: str) -> str:
    """The user's name of a function that the compiler resumes in the middle."""
    match = _RESUMED.fullmatch(name)
    return f"{match[1]}, after line {match[2]}" if match else name
