"""Golden outputs, and the fixtures `replay` and `golden` of the pytest plugin.

Golden outputs are what stages published on a log when all was well, in one MCAP file. The fixtures say what
differs from it now.
"""

import hashlib
import io
import itertools
import math
import os
import re
import shlex
import shutil
import sys
import warnings
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as copy_with
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
from mcap.reader import make_reader

from torchperf_ros.api.errors import TorchperfError
from torchperf_ros.replay.golden.message_rule import (
    BUILT_IN,
    Difference,
    Rules,
    check_rules,
    compare_messages,
)
from torchperf_ros.replay.golden.pytest_plugin import REFRESHED
from torchperf_ros.replay.replay import PublishedFrame, ReplayResult, replay, stamp_text, text_columns
from torchperf_ros.replay.replay_options import ReplayOptions
from torchperf_ros.replay.replay_record import OutputLog

_ORIGIN: Final = "torchperf_golden"
_WORD: Final = (1 << 64) - 1
# MCAP's times have no sign, stamps have.
#
# A stamp before 1970 stands in `publish_time` as its two's complement.
_SIGN: Final = 1 << 63
_OUTPUT: Final = "the output"
# Begins a key of the metadata: the guard's verdicts on a stage's frames.
_CHECKS: Final = "checks of "
# Begins a key of the metadata: how many of a stage's frames had no answer.
_SUPERSEDED: Final = "superseded of "
# Begins a key of the metadata: by which engines a stage ran.
_ENGINES: Final = "engines of "
_MOST_FIELDS: Final = 12


class GoldenError(TorchperfError):
    """Golden outputs cannot be made, read or compared; the message says why and what would do."""


@dataclass(frozen=True)
class Golden:
    """Outputs to compare with, by stage, and what they were made from: hashes of log, parameters, models.

    `superseded`: by stage, how many frames had no answer, as a newer one came first.
    """

    origin: Mapping[str, str]
    frames: Mapping[str, tuple[PublishedFrame, ...]]
    superseded: Mapping[str, int] = field(default_factory=dict)
    # By stage: by which engine each tier ran. Outputs that agree may come from others.
    engines: Mapping[str, str] = field(default_factory=dict)

    def changed_since(self, other: "Golden") -> list[str]:
        """What these were made from that the others were not, for example `parameters`."""
        mine, theirs = self.origin, other.origin
        return [what for what in mine if mine[what] and theirs.get(what) and mine[what] != theirs[what]]

    def more_superseded_than(self, other: "Golden") -> list[str]:
        """A line for each stage of which more frames had no answer than there."""
        return [
            f"{stage}: {count} frames had no answer, as a newer one came first; in the golden run {before}"
            for stage, count in self.superseded.items()
            if count > (before := other.superseded.get(stage, 0))
        ]


def golden_of(result: ReplayResult, stages: Collection[str]) -> Golden:
    """What these stages published, as golden outputs.

    Raises:
        GoldenError: the replay was interrupted, depends on the machine, or its outputs were not kept.
        ReplayError: its outputs were changed since.
    """
    of_machine = result.summary["pace"] == "real"
    obstacles = {
        "it was interrupted": not result.complete,
        "outputs with pace real depend on how fast this machine is: use fast or virtual": of_machine,
        "its outputs were not kept: give it an output file": result.output is None,
    }
    if why := [what for what, is_so in obstacles.items() if is_so]:
        raise GoldenError(f"replay of {result.log} cannot be compared with golden outputs: {why[0]}")
    summary = result.summary
    models = {f"model of {stage}": hashed for stage, hashed in summary["model"].items()}
    origin = {
        "log": summary["log"]["sha256"],
        "parameters": summary["params_sha256"],
        **models,
        "pace": summary["pace"],
        "seed": summary["seed"],
    }
    messages = {name: tuple(result.stage(name).messages) for name in stages}
    superseded = {name: count for name in stages if (count := result.stage(name).superseded)}
    engines = {name: str(text) for name, text in summary.get("engines", {}).items()}
    return Golden({what: str(value) for what, value in origin.items()}, messages, superseded, engines)


def write_golden(golden: Golden, path: Path) -> None:
    """Write golden outputs as an MCAP with message definitions: all of it, or nothing under this name.

    A topic is a stage, and messages are logged at their frame's stamp, so that they stand beside the log's
    in a viewer; at 0 if that is negative.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    checks = {
        f"{_CHECKS}{stage}": ",".join(frame.check for frame in frames)
        for stage, frames in golden.frames.items()
        if any(frame.check for frame in frames)
    }
    superseded = {f"{_SUPERSEDED}{stage}": str(count) for stage, count in golden.superseded.items()}
    engines = {f"{_ENGINES}{stage}": text for stage, text in golden.engines.items()}
    with OutputLog(path, metadata=(_ORIGIN, {**golden.origin, **checks, **superseded, **engines})) as file:
        for stage, frames in golden.frames.items():
            for frame in frames:
                stamp_ns = frame.stamp_ns
                file.write(
                    stage, frame.type_name, frame.data, max(0, stamp_ns), stamp_ns & _WORD, frame.seq
                )
        file.close()


def read_golden(path: Path) -> Golden:
    """Read what `write_golden` wrote.

    Raises:
        GoldenError: it is damaged, or no golden file.
        OSError: it cannot be read.
    """
    frames: dict[str, list[PublishedFrame]] = {}
    content = path.read_bytes()
    try:
        reader = make_reader(io.BytesIO(content), validate_crcs=True)
        origin = next(
            (dict(found.metadata) for found in reader.iter_metadata() if found.name == _ORIGIN), None
        )
        for schema, channel, message in reader.iter_messages(log_time_order=False):
            stamp_ns = message.publish_time - ((message.publish_time & _SIGN) << 1)
            frame = PublishedFrame(message.sequence, stamp_ns, message.data, schema.name if schema else "")
            frames.setdefault(channel.topic, []).append(frame)
    except Exception as error:
        # mcap and the decompressors raise many kinds of errors on damage: struct.error, ZstdError,
        # OverflowError, ...
        raise GoldenError(
            f"golden file {path}: cannot be read ({type(error).__name__}: {error})"
        ) from error
    if origin is None:
        raise GoldenError(f"golden file {path}: is an MCAP that holds no golden outputs")
    for stage, found in frames.items():
        checks = origin.pop(f"{_CHECKS}{stage}", "").split(",")
        if len(checks) == len(found):
            frames[stage] = [
                frame._replace(check=check) for frame, check in zip(found, checks, strict=True)
            ]
    counts, engines = (
        {key.removeprefix(begin): origin.pop(key) for key in list(origin) if key.startswith(begin)}
        for begin in (_SUPERSEDED, _ENGINES)
    )
    superseded = {stage: int(count) for stage, count in counts.items() if count.isdecimal()}
    return Golden(origin, {stage: tuple(found) for stage, found in frames.items()}, superseded, engines)


class GoldenComparison(NamedTuple):
    """A stage's outputs beside golden ones.

    Of `frames`, those that only one side has among them, which differ how.
    """

    stage: str
    frames: int
    differing: tuple[tuple[PublishedFrame, tuple[Difference, ...]], ...]

    def text(self) -> list[str]:
        """For people: how many frames differ, the first difference, and the worst one of each field."""
        first, differences = self.differing[0]
        some, others = differences[0], len(differences) - 1
        more = f", with {others} more field{'s' if others > 1 else ''}" if others else ""
        distance = ": off by {}, allowed {}".format(*some.shown) if some.shown[0] else ""
        return [
            f"{self.stage}: {len(self.differing)} of {self.frames} frames differ",
            f"  first in frame {_frame_text(first)}{more}:",
            f"    {some.path} is {_short(some.value)}, golden {_short(some.golden)}{distance}",
            "  by field, the worst of each:",
            *text_columns(list(self._worst()), "    "),
        ]

    def _worst(self) -> Iterator[tuple[str, ...]]:
        fields: dict[str, list[tuple[PublishedFrame, Difference]]] = {}
        for frame, differences in self.differing:
            for difference in differences:
                fields.setdefault(difference.field, []).append((frame, difference))
        yield "field", "frames", "is", "golden", "off by", "allowed", "in frame"
        for name, found in list(fields.items())[:_MOST_FIELDS]:
            frame, worst = max(found, key=lambda pair: -1.0 if math.isnan(pair[1].error) else pair[1].error)
            frames = len({id(frame) for frame, _ in found})
            yield (
                name,
                str(frames),
                _short(worst.value),
                _short(worst.golden),
                *worst.shown,
                _frame_text(frame),
            )
        if len(fields) > _MOST_FIELDS:
            yield f"and {len(fields) - _MOST_FIELDS} more", *[""] * 6


def compare_frames(
    stage: str, frames: Sequence[PublishedFrame], golden: Sequence[PublishedFrame], rules: Rules
) -> GoldenComparison:
    """Compare what a stage published with golden outputs.

    Frames belong together if their stamps are equal; of several with the same stamp the first, the second,
    and so on.
    """
    mine, theirs = _by_stamp(frames), _by_stamp(golden)
    both, differing = {**theirs, **mine}, []
    for key in sorted(both):
        if found := tuple(_differences(mine.get(key), theirs.get(key), rules)):
            differing.append((both[key], found))
    return GoldenComparison(stage, len(both), tuple(differing))


def _by_stamp(frames: Sequence[PublishedFrame]) -> dict[tuple[int, int], PublishedFrame]:
    counts: dict[int, Iterator[int]] = defaultdict(itertools.count)
    return {(frame.stamp_ns, next(counts[frame.stamp_ns])): frame for frame in frames}


def _differences(
    frame: PublishedFrame | None, golden: PublishedFrame | None, rules: Rules
) -> Iterator[Difference]:
    if frame is None or golden is None:
        yield Difference(_OUTPUT, "published" if frame else "none", "published" if golden else "none")
    elif frame.check != golden.check:
        yield Difference("the guard's verdict", frame.check or "none", golden.check or "none")
    elif frame.type_name != golden.type_name:
        yield Difference(_OUTPUT, frame.type_name, golden.type_name)
    elif frame.data != golden.data:
        yield from compare_messages(frame.message, golden.message, rules)


def _frame_text(frame: PublishedFrame) -> str:
    return f"seq {frame.seq}, stamp {stamp_text(frame.stamp_ns)}"


def _short(value: object) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)


_FOLDER: Final = "TORCHPERF_FIELDLOGS"
_OF_THE_LOG: Final = "log"
_EXAMPLE: Final = 'golden.check(result, "perception", name="night")'
# Results by what they are of.
Replays = dict[object, ReplayResult]


class ReplayFixture:
    """Replays logs for a test. Adapters may be in any module that the test could import."""

    def __init__(
        self, request: pytest.FixtureRequest, folders: pytest.TempPathFactory, replays: Replays
    ) -> None:
        self._request = request
        self._file = Path(str(request.module.__file__))
        self._folders = folders
        self._replays = replays

    def __call__(
        self,
        log: str | Path | None = None,
        *,
        params: str | Path | None = None,
        **options: Any,  # noqa: ANN401
    ) -> ReplayResult:
        """Replay a log.

        The same log with the same options only once in a session, unless its pace is `real`.

        Args:
            log: default: that of the test's marker `fieldlog`.
            params: a parameter file, beside the test's file or in the root folder; default: that of a
                folder of evidence, else every default.
            options: the other fields of `ReplayOptions`, for example `pace`, `overrides`, `duration_s`;
                `step_times` are looked for as `params` are.
        """
        __tracebackhide__ = True
        path = self._marked_log() if log is None else self._find_log(str(log), optional=False)
        if options.get("step_times", _OF_THE_LOG) != _OF_THE_LOG:
            options["step_times"] = str(self._beside("step_times", options["step_times"]))
        chosen = ReplayOptions(params=self._beside("params", params) if params else None, **options)
        key = tuple(_identity(part) for part in (path, chosen.params, chosen.step_times)) + (repr(chosen),)
        if chosen.pace == "real" or key not in self._replays:
            self._replays[key] = self._replay(path, chosen)
        return self._replays[key]

    def _replay(self, log: Path, options: ReplayOptions) -> ReplayResult:
        __tracebackhide__ = True
        if options.output is None:
            options = copy_with(options, output=self._folders.mktemp("replay") / "outputs.mcap")
        result, why = None, ""
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))  # for the workers
                result = replay(log, options, say=print)
        except (TorchperfError, OSError) as error:
            why = str(error)
        if result is None:  # out here the failure does not trail the error's own traceback
            pytest.fail(why)
        if not result.complete:
            raise KeyboardInterrupt
        return result

    def _marked_log(self) -> Path:
        __tracebackhide__ = True
        marker = self._request.node.get_closest_marker("fieldlog")
        if marker is None:
            pytest.fail(
                'replay() needs a log: replay("drive.mcap"), or @pytest.mark.fieldlog("drive.mcap")'
            )
        if len(marker.args) != 1 or marker.kwargs.keys() - {"optional"}:
            pytest.fail(
                '@pytest.mark.fieldlog takes one log and optional=..., as in fieldlog("drive.mcap"):'
                f" {marker}"
            )
        return self._find_log(str(marker.args[0]), optional=bool(marker.kwargs.get("optional")))

    def _find_log(self, name: str, *, optional: bool) -> Path:
        __tracebackhide__ = True
        config = self._request.config
        field_logs = config.getoption("--fieldlogs") or os.environ.get(_FOLDER, "")
        places = [
            *self._places(name),
            *([config.invocation_params.dir / field_logs / name] if field_logs else []),
        ]
        if found := next(filter(Path.exists, places), None):
            return found
        text = f"log {name} is not there: looked for {', '.join(dict.fromkeys(map(str, places)))}"
        if not field_logs and not Path(name).is_absolute():
            text += f"; --fieldlogs DIR or {_FOLDER} can say where field logs are"
        if optional:
            pytest.skip(text)
        pytest.fail(text)

    def _places(self, name: str | Path) -> list[Path]:
        return [folder / name for folder in (self._file.parent, self._request.config.rootpath)]

    def _beside(self, what: str, name: str | Path) -> Path:
        __tracebackhide__ = True
        if found := next(filter(Path.exists, self._places(name)), None):
            return found
        pytest.fail(f"{what} {name}: is neither beside {self._file} nor in {self._request.config.rootpath}")


def _identity(path: object) -> object:
    try:
        status = os.stat(str(path))
    except OSError:
        return path
    return str(path), status.st_mtime_ns, status.st_size


class OlderGolden(UserWarning):
    """Golden outputs were made from something else than those that they agree with."""


def file_stem(name: str) -> str:
    """A name as a file can have it on every system; other names, other files."""
    stem = re.sub(r"[^A-Za-z0-9_.-]+", "_", name)
    if stem == name:
        return name
    return f"{stem}-{hashlib.blake2b(name.encode(errors='surrogatepass'), digest_size=4).hexdigest()}"


class GoldenFixture:
    """Compares with the golden outputs of a test, in the folder `golden` beside its file."""

    def __init__(self, request: pytest.FixtureRequest, rules: Rules) -> None:
        self._request = request
        self._file = Path(str(request.module.__file__))
        self._rules = rules
        self._written: set[Path] = set()

    def path(self, name: str = "") -> Path:
        """The golden file: named after the test, and `name` where a test has several.

        Where a character is not fit for a file's name, a hash of the whole keeps names apart that differ
        there only.
        """
        test = self._request.node.nodeid.partition("::")[2].replace("::", ".")
        words = [self._file.stem, test, *filter(None, [name])]
        return self._file.parent / "golden" / f"{file_stem('.'.join(words))}.mcap"

    def check(self, result: ReplayResult, *stages: str, name: str = "", rules: Rules | None = None) -> None:
        """Compare what stages published with the golden outputs; with `--refresh-golden` write those.

        Outputs that agree pass, with a warning if parameters or models are others than those of the golden
        outputs. What one check of a test has written, the others of the same `name` are compared with.

        The `result` is of a whole replay; without `stages` all of them are compared. A `name` tells several
        golden files of a test apart; `rules` are for this check, before those of `golden_rules` and the
        built-in ones.

        Raises:
            AssertionError: they differ, there are none, or they are those of another log; the text says
                where they differ first and most, what has changed since they were made, and the command
                that refreshes them.
            KeyError: there is no such stage.
            TypeError: this is no result of a replay.
        """
        __tracebackhide__ = True
        if not isinstance(result, ReplayResult):
            raise TypeError(
                f"golden.check takes what replay() gave, and stages by name, as in {_EXAMPLE}; not"
                f" {result!r}"
            )
        path = self.path(name)
        names = tuple(result.stage(each).name for each in stages) or tuple(result.stages)
        own_rules = {**self._rules, **(rules or {})}
        try:
            check_rules(own_rules)
            now = golden_of(result, names)
            if self._request.config.getoption("--refresh-golden") and path not in self._written:
                self._write(now, path)
                return
            problem = self._problem(now, path, {**BUILT_IN, **own_rules}, result)
        except (TorchperfError, OSError) as error:
            raise AssertionError(str(error)) from None
        if problem:
            again = f"another check of this test has just written it: give each a name, as in {_EXAMPLE}"
            refresh = f"the command that refreshes it: {self._command()}"
            raise AssertionError("\n".join([*problem, again if path in self._written else refresh]))

    def _write(self, golden: Golden, path: Path) -> None:
        try:
            write_golden(golden, path)
        except OSError as error:
            raise GoldenError(
                f"golden file {self._shown(path)}: cannot be written ({error.strerror})"
            ) from error
        self._written.add(path)
        count = sum(map(len, golden.frames.values()))
        without = sum(golden.superseded.values())
        more = f"; {without} frames had none, as a newer one came first" if without else ""
        self._request.node.user_properties.append(
            (REFRESHED, f"{self._shown(path)} has {count} outputs{more}")
        )

    def _problem(self, now: Golden, path: Path, rules: Rules, result: ReplayResult) -> list[str]:
        shown = self._shown(path)
        if not path.exists():
            return [f"golden file {shown} is missing"]
        try:
            golden = read_golden(path)
        except GoldenError as error:
            return [str(error)]
        changes = now.changed_since(golden)
        if "log" in changes:
            return [f"golden file {shown} is stale: it is of another log than {result.log}"]
        if absent := [stage for stage, found in now.frames.items() if found and stage not in golden.frames]:
            return [
                f"golden file {shown} holds no outputs of {', '.join(absent)}, only of"
                f" {', '.join(golden.frames)}"
            ]
        compared = [
            compare_frames(name, found, golden.frames.get(name, ()), rules)
            for name, found in now.frames.items()
        ]
        superseded = now.more_superseded_than(golden)
        differing = [stage for stage in compared if stage.differing]
        if superseded or differing:
            cause = f" ({', '.join(changes)} changed since)" if changes else ""
            lines = [f"outputs differ from golden file {shown}{cause}", *superseded]
            for stage in differing:
                engines = [found.engines.get(stage.stage) or "not known" for found in (now, golden)]
                lines += [*stage.text(), "  engines: {}; golden: {}".format(*engines)]
            return lines
        if changes:
            text = f"golden file {shown} is older: {', '.join(changes)} changed since; the outputs agree. "
            warnings.warn(OlderGolden(f"{text}To refresh it: {self._command()}"), stacklevel=3)
        return []

    def _shown(self, path: Path) -> str:
        return os.path.relpath(path, self._request.config.invocation_params.dir)

    def _command(self) -> str:
        config = self._request.config
        python = Path(sys.executable)
        program = shutil.which("pytest")
        if program and Path(program).parent == python.parent:
            words = ["pytest"]
        else:
            near = python.is_relative_to(config.invocation_params.dir)
            words = [self._shown(python) if near else str(python), "-m", "pytest"]
        inner = self._request.node.nodeid.partition("::")[2]
        words += ["--refresh-golden", f"{self._shown(self._file)}::{inner}"]
        if folder := config.getoption("--fieldlogs"):
            words += ["--fieldlogs", folder]
        return shlex.join(words)
