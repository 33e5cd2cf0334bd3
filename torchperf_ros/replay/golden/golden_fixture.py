"""The fixture `golden` of the pytest plugin."""

import hashlib
import os
import re
import shlex
import shutil
import sys
import warnings
from pathlib import Path

import pytest

from torchperf_ros.core.errors import TorchperfError
from torchperf_ros.replay.golden.golden_comparison import compare_frames
from torchperf_ros.replay.golden.golden_file import Golden, GoldenError, golden_of, published, read_golden, write_golden
from torchperf_ros.replay.golden.message_rule import BUILT_IN, Rules, check_rules
from torchperf_ros.replay.golden.pytest_plugin import REFRESHED
from torchperf_ros.replay.replay_result import ReplayResult

_FOLDER = "golden"
_HASH_BYTES = 4
_EXAMPLE = 'golden.check(result, "perception", name="night")'


class OlderGolden(UserWarning):
    """Golden outputs were made from something else than those that they agree with."""


def file_stem(name: str) -> str:
    """A name as a file can have it on every system; other names, other files."""
    stem = re.sub(r"[^A-Za-z0-9_.-]+", "_", name)
    if stem == name:
        return name
    return f"{stem}-{hashlib.blake2b(name.encode(errors='surrogatepass'), digest_size=_HASH_BYTES).hexdigest()}"


class GoldenFixture:
    """Compares with the golden outputs of a test, in the folder `golden` beside its file."""

    def __init__(self, request: pytest.FixtureRequest, rules: Rules) -> None:
        """Take what pytest knows of the test, and the rules that count instead of the built-in ones."""
        self._request = request
        self._file = Path(str(request.module.__file__))
        self._rules = rules
        self._written: set[Path] = set()

    def path(self, name: str = "") -> Path:
        """The golden file: named after the test, and `name` where a test has several.

        Where a character is not fit for a file's name, a hash of the whole keeps names apart that differ there only.
        """
        test = self._request.node.nodeid.partition("::")[2].replace("::", ".")
        words = [self._file.stem, test, *filter(None, [name])]
        return self._file.parent / _FOLDER / f"{file_stem('.'.join(words))}.mcap"

    def check(self, result: ReplayResult, *stages: str, name: str = "", rules: Rules | None = None) -> None:
        """Compare what stages published with the golden outputs; with `--refresh-golden` write those.

        Outputs that agree pass, with a warning if parameters or models are others than those of the golden outputs.
        What one check of a test has written, the others of the same `name` are compared with.

        Args:
            result: of a replay; all of it, not one of its stages.
            stages: which ones; default: all.
            name: tells several golden files of a test apart.
            rules: for this check only, before those of `golden_rules` and the built-in ones.

        Raises:
            AssertionError: they differ, there are none, or they are those of another log; the text says where they
                differ first and most, what has changed since they were made, and the command that refreshes them.
            KeyError: there is no such stage.
            TypeError: this is no result of a replay.
        """
        __tracebackhide__ = True
        if not isinstance(result, ReplayResult):
            msg = f"golden.check takes what replay() gave, and stages by name, as in {_EXAMPLE}; not {result!r}"
            raise TypeError(msg)
        path = self.path(name)
        names = tuple(result.stage(each).name for each in stages) or tuple(result.stages)
        own_rules = {**self._rules, **(rules or {})}
        try:
            check_rules(own_rules)
            if self._request.config.getoption("--refresh-golden") and path not in self._written:
                self._write(golden_of(result, names), path)
                return
            problem = self._problem(result, names, path, {**BUILT_IN, **own_rules})
        except (TorchperfError, OSError) as error:
            raise AssertionError(str(error)) from None
        if problem:
            raise AssertionError("\n".join([*problem, self._advice(path)]))

    def _advice(self, path: Path) -> str:
        if path in self._written:
            return f"another check of this test has just written it: give each a name, as in {_EXAMPLE}"
        return f"the command that refreshes it: {self._command()}"

    def _write(self, golden: Golden, path: Path) -> None:
        try:
            write_golden(golden, path)
        except OSError as error:
            msg = f"golden file {self._shown(path)}: cannot be written ({error.strerror})"
            raise GoldenError(msg) from error
        self._written.add(path)
        count = sum(map(len, golden.frames.values()))
        self._request.node.user_properties.append((REFRESHED, f"{self._shown(path)} has {count} outputs"))

    def _problem(self, result: ReplayResult, stages: tuple[str, ...], path: Path, rules: Rules) -> list[str]:
        shown = self._shown(path)
        frames = {stage: list(published(result, result.stage(stage))) for stage in stages}
        if not path.exists():
            return [f"golden file {shown} is missing"]
        try:
            golden = read_golden(path)
        except GoldenError as error:
            return [str(error)]
        changes = golden.changes(result)
        if "log" in changes:
            return [f"golden file {shown} is stale: it is of another log than {result.log}"]
        absent = [stage for stage, found in frames.items() if found and stage not in golden.frames]
        if absent:
            return [f"golden file {shown} holds no outputs of {', '.join(absent)}, only of {', '.join(golden.frames)}"]
        comparisons = [
            compare_frames(stage, found, golden.frames.get(stage, ()), rules) for stage, found in frames.items()
        ]
        lines = [line for comparison in comparisons if comparison.differing for line in comparison.text()]
        if lines:
            cause = f" ({', '.join(changes)} changed since)" if changes else ""
            return [f"outputs differ from golden file {shown}{cause}", *lines]
        if changes:
            text = f"golden file {shown} is older: {', '.join(changes)} changed since; the outputs agree. "
            warnings.warn(OlderGolden(f"{text}To refresh it: {self._command()}"), stacklevel=3)
        return []

    def _shown(self, path: Path) -> str:
        return os.path.relpath(path, self._request.config.invocation_params.dir)

    def _command(self) -> str:
        """What refreshes this test's golden outputs, from the folder in which pytest was started."""
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
