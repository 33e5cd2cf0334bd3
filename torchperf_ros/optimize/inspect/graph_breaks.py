"""Graph breaks, one for each line of the user's code, and recompilations: what the compiler's trace says of them."""

import json
import re
import sysconfig
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from torchperf_ros.optimize.inspect.users_source import SourceLine, read_line

# frames of a traceback, with the underlines that Python 3.11 and later give them
_FRAME = re.compile(r'^  File "(.+)", line (\d+), in (.+)$(?:\n    .*$)?(?:\n    ( *[~^]+)\s*$)?', re.MULTILINE)
_RESUMED = re.compile(r"torch_dynamo_resume_in_(.+?)_at_(\d+)")
_STDLIB = Path(sysconfig.get_path("stdlib")).resolve()
_THIS_TOOL = Path(__file__).resolve().parent
_NOT_THE_USERS = (Path(torch.__file__).resolve().parent, Path(np.__file__).resolve().parent, _THIS_TOOL)
_HINT = re.compile(r"^\s*Hint: (?!.*(?:\bissue\b|is fundamental))(.*)$", re.MULTILINE)  # those that a user can follow
_PLACE = re.compile(r"#\s*(?P<text>[^#]*?)\s*#\s*(?P<file>\S+?):(?P<line>\d+) in \w+")
_ADVICE = {
    "size": "Happens once for each dimension that varies; torch._dynamo.mark_dynamic(x, dim) before the first call"
    " or torch.compile(dynamic=True) avoids it.",
    "unrolled": "The size is built into the graph, as by a Python loop over that dimension: each size is compiled"
    " anew. Work on the whole tensor instead.",
    "shape branch": "Each side is a graph of its own. Pad to one size, or mask instead of `if`.",
    "one": "Sizes 0 and 1 always get graphs of their own: pad to 2, or warm up with both.",
    "dtype": "Cast in preprocess, so that the model always gets the same type.",
    "stride": "Call .contiguous() on it before, so that the memory layout is always the same.",
    "value": "A Python value is built into the graph: pass it as a tensor, or keep it constant.",
    "limit": "The compiler has given up on this function, which now runs uncompiled.",
}


class Frame(NamedTuple):
    """One Python frame: where, in which function, and the compiler's underline below the line, if it has one."""

    file: str
    line: int
    function: str
    underline: str = ""


@dataclass
class GraphBreak:
    """All breaks at one line.

    Attributes:
        underline: `^^^` below the part of the line that breaks, with the line's own indentation taken off.
        before: the statement, where it can be rewritten; else empty.
        after: the statement rewritten, captured without the break and with the same results; else empty.
        reasons: the compiler's texts, the first one first.
        whole_function: the compiler left the function around it uncompiled, it did not only split it.
        ended: the compilations that it ended, each with the graph that had run last.
        splits: the functions that the compiler splits or leaves uncompiled because of it: callers are split as well.
        gaps: the gaps between graphs that it causes.
        gap_ms: time in these gaps in one run; NaN until measured.
    """

    line: SourceLine
    function: str
    underline: str
    input_set: int
    before: str = ""
    after: str = ""
    reasons: list[str] = field(default_factory=list)
    whole_function: bool = False
    ended: list[tuple[str, int]] = field(default_factory=list)
    splits: list[str] = field(default_factory=list)
    gaps: list[int] = field(default_factory=list)
    gap_ms: float = float("nan")

    @property
    def place(self) -> tuple[str, int]:
        """File and line."""
        return self.line.file, self.line.line

    @property
    def title(self) -> str:
        """The compiler's name for it, in one line."""
        return self.reasons[0].partition("\n")[0]

    @property
    def explanation(self) -> str:
        """The compiler's explanation in one line, empty where it has none."""
        found = re.search(r"Explanation: (.*?)(?:\n|$)", self.reasons[0])
        return found[1].strip() if found else ""

    @property
    def hints(self) -> list[str]:
        """What the compiler says could be done about it."""
        return _HINT.findall(self.reasons[0])


def parse_break(text: str) -> tuple[str, bool, Frame]:
    """Read the compiler's text about one break, `dynamo_graph_break_reason` in its trace.

    Returns:
        The reason without its introduction; whether the whole function is left uncompiled; the innermost frame in the
        user's code, else the innermost one.
    """
    body = text.partition("\nTraceback (most recent call last)")[0]
    head, _, traceback = body.partition("User code traceback:")
    reason = head.partition("Reason: ")[2] or head  # "Graph Break Reason: ", older: "Reason: "
    reason = reason.partition("\nStack variable source attribution:")[0]
    whole = "gracefully" in reason.partition("\n")[0]
    if named := re.search(r"^.+\n  Explanation: ", reason, re.MULTILINE):
        reason = reason[named.start() :]  # without an introduction about what breaks as well
    frames = [Frame(file, int(line), name, mark.rstrip()) for file, line, name, mark in _FRAME.findall(traceback)]
    ours = [n for n, frame in enumerate(frames, 1) if Path(frame.file).resolve().is_relative_to(_THIS_TOOL)]
    frames = frames[ours[-1] if ours else 0 :]  # what the model called, without what called the model
    if not frames:
        place = re.match(r"Graph break in user code at (.+):(\d+)", text)
        frames = [Frame(place[1], int(place[2]), "?") if place else Frame("?", 0, "?")]
    users = next((frame for frame in reversed(frames) if is_users(frame.file)), frames[-1])
    return reason.strip(), whole, users


def new_break(frame: Frame, input_set: int) -> GraphBreak:
    """The first break at a line."""
    line = read_line(frame.file, frame.line)
    code = re.sub(r":?(\s+#.*)?$", "", line.text)
    underline = frame.underline[: len(code)] or "^" * len(code)
    return GraphBreak(line, readable_function(frame.function), underline, input_set)


def is_users(file: str) -> bool:
    """Whether a file is neither torch's, NumPy's, the standard library's nor this tool's."""
    path = Path(file).resolve()
    in_stdlib = path.is_relative_to(_STDLIB) and "site-packages" not in path.parts
    return not (file.startswith("<") or in_stdlib or any(path.is_relative_to(folder) for folder in _NOT_THE_USERS))


def readable_function(name: str) -> str:
    """The user's name of a function that the compiler resumes in the middle."""
    match = _RESUMED.fullmatch(name)
    return f"{match[1]}, after line {match[2]}" if match else name


def own_function(name: str) -> str:
    """The same without where it is resumed."""
    return _RESUMED.sub(r"\1", name)


@dataclass(frozen=True)
class Recompilation:
    """One more compilation of a function that had been compiled.

    Attributes:
        kind: size, unrolled, shape branch, one, dtype, stride, value or limit.
        guard: the condition that the compiled code had assumed and that does not hold, in the compiler's words.
        source: `file:line: text` of the user's code that asked for this condition, where the compiler knows it.
    """

    function: str
    file: str
    line: int
    input_set: int
    kind: str
    guard: str
    source: str
    advice: str


def explain_recompilations(
    raw: list[tuple[str, int, str]], function_of: Callable[[str], tuple[str, str, int]]
) -> list[Recompilation]:
    """For each, the guard that failed and what would help.

    Args:
        raw: in order: compile id, input set, and `recompile_reasons` of the compiler's trace.
        function_of: name, file and line of the function that a compilation is of, by compile id.
    """
    config = torch._dynamo.config
    limit = int(getattr(config, "recompile_limit", 0) or getattr(config, "cache_size_limit", 8))
    found: list[Recompilation] = []
    guards = [_newest_guard(text) for _, _, text in raw]
    functions = [function_of(compile_id) for compile_id, _, _ in raw]
    sizes = Counter(zip(functions, (guard.partition("expected")[0] for guard in guards), strict=True))
    for (compile_id, input_set, _), reason, function in zip(raw, guards, functions, strict=True):
        place = _PLACE.search(reason)
        guard = re.sub(r"\. Guard failed on a parameter.*", "", re.sub(r"\s+#.*", "", reason)).strip()
        source = f"{place['file'].rpartition('/')[2]}:{place['line']}: {place['text']}" if place else ""
        kind = "limit" if int(compile_id.partition("/")[2] or 0) >= limit else _kind(guard, source)
        if kind == "size" and sizes[function, reason.partition("expected")[0]] > 1:
            kind = "unrolled"  # a size that the compiler could leave open fails once; one that it built in, each time
        name = readable_function(function[0])
        found.append(Recompilation(name, *function[1:], input_set, kind, guard, source, _ADVICE[kind]))
    return found


def _newest_guard(text: str) -> str:
    """The reasons are one text, or a JSON list with one for each earlier compilation, the newest first."""
    try:
        reasons = json.loads(text)
    except ValueError:
        reasons = [text]
    first = str(reasons[0]) if isinstance(reasons, list) and reasons else ""
    return re.sub(r"^\d+/\d+: ", "", first).partition("\n")[0]


def _kind(guard: str, source: str) -> str:
    if "dtype mismatch" in guard or "dispatch key" in guard:
        return "dtype"
    if "stride mismatch" in guard:
        return "stride"
    if "size mismatch" in guard or "rank mismatch" in guard:
        return "size"
    if "size()" in guard or "shape[" in guard:
        branches = re.search(r"\b(if|elif|while|else|assert)\b", source)
        if re.fullmatch(r"2 <= \S+", guard) and not branches:
            return "one"
        return "shape branch" if branches or "==" not in guard else "unrolled"
    return "value"
