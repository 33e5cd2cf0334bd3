"""The fixtures `replay` and `golden` of the pytest plugin."""

import hashlib
import os
import re
import shlex
import shutil
import sys
import warnings
from dataclasses import replace as copy_with
from pathlib import Path
from typing import Any, Final

import pytest

from torchperf_ros.api.errors import TorchperfError
from torchperf_ros.replay.golden import golden_file
from torchperf_ros.replay.golden.message_rule import BUILT_IN, Rules, check_rules
from torchperf_ros.replay.golden.pytest_plugin import REFRESHED
from torchperf_ros.replay.replay import ReplayResult, replay
from torchperf_ros.replay.replay_options import ReplayOptions

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
        for place in places:
            if place.exists():
                return place
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
        for place in self._places(name):
            if place.exists():
                return place
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
            now = golden_file.golden_of(result, names)
            if self._request.config.getoption("--refresh-golden") and path not in self._written:
                self._write(now, path)
                return
            problem = self._problem(now, path, {**BUILT_IN, **own_rules}, result)
        except (TorchperfError, OSError) as error:
            raise AssertionError(str(error)) from None
        if problem:
            advice = f"the command that refreshes it: {self._command()}"
            if path in self._written:
                advice = (
                    f"another check of this test has just written it: give each a name, as in {_EXAMPLE}"
                )
            raise AssertionError("\n".join([*problem, advice]))

    def _write(self, golden: golden_file.Golden, path: Path) -> None:
        try:
            golden_file.write_golden(golden, path)
        except OSError as error:
            raise golden_file.GoldenError(
                f"golden file {self._shown(path)}: cannot be written ({error.strerror})"
            ) from error
        self._written.add(path)
        count = sum(map(len, golden.frames.values()))
        without = sum(golden.superseded.values())
        more = f"; {without} frames had none, as a newer one came first" if without else ""
        self._request.node.user_properties.append(
            (REFRESHED, f"{self._shown(path)} has {count} outputs{more}")
        )

    def _problem(
        self, now: golden_file.Golden, path: Path, rules: Rules, result: ReplayResult
    ) -> list[str]:
        shown = self._shown(path)
        if not path.exists():
            return [f"golden file {shown} is missing"]
        try:
            golden = golden_file.read_golden(path)
        except golden_file.GoldenError as error:
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
            golden_file.compare_frames(name, found, golden.frames.get(name, ()), rules)
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
