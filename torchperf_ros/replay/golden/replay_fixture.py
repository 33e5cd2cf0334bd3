"""The fixture `replay` of the pytest plugin."""

import os
import sys
from collections.abc import Iterator
from dataclasses import replace as copy_with
from pathlib import Path
from typing import Any, Final

import pytest

from torchperf_ros.core.errors import TorchperfError
from torchperf_ros.replay.golden.asserted_stage import AssertedStage
from torchperf_ros.replay.replay import replay
from torchperf_ros.replay.replay_options import ReplayOptions
from torchperf_ros.replay.replay_result import ReplayResult

_FOLDER: Final = "TORCHPERF_FIELDLOGS"
_OF_THE_LOG: Final = "log"
Replays = dict[object, ReplayResult]
"""Results by what they are of."""


class ReplayFixture:
    """Replays logs for a test. Adapters may be in any module that the test could import."""

    def __init__(self, request: pytest.FixtureRequest, folders: pytest.TempPathFactory, replays: Replays) -> None:
        """Take what pytest knows of the test, and the replays so far."""
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
        """Replay a log; the same log with the same options only once in a session, unless its pace is `real`.

        Args:
            log: default: that of the test's marker `fieldlog`.
            params: a parameter file, beside the test's file or in the root folder; default: that of a folder of
                evidence, else every default.
            options: the other fields of `ReplayOptions`, for example `pace`, `overrides`, `duration_s`; `step_times`
                are looked for as `params` are.

        Returns:
            The result, with its messages; assertions on figures of its stages show frames when they fail.
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
        return copy_with(result, stages={name: AssertedStage.of(stage) for name, stage in result.stages.items()})

    def _marked_log(self) -> Path:
        __tracebackhide__ = True
        marker = self._request.node.get_closest_marker("fieldlog")
        if marker is None:
            pytest.fail(
                'replay() needs a log: replay("drive.mcap"), or @pytest.mark.fieldlog("drive.mcap") on the test'
            )
        if len(marker.args) != 1 or marker.kwargs.keys() - {"optional"}:
            pytest.fail(f'@pytest.mark.fieldlog takes one log and optional=..., as in fieldlog("drive.mcap"): {marker}')
        return self._find_log(str(marker.args[0]), optional=bool(marker.kwargs.get("optional")))

    def _find_log(self, name: str, *, optional: bool) -> Path:
        __tracebackhide__ = True
        places = [folder / name for folder in self._log_folders()]
        found = next((path for path in places if path.exists()), None)
        if found is not None:
            return found
        text = f"log {name} is not there: looked for {', '.join(dict.fromkeys(map(str, places)))}"
        if not self._field_logs and not Path(name).is_absolute():
            text += f"; --fieldlogs DIR or {_FOLDER} can say where field logs are"
        if optional:
            pytest.skip(text)
        pytest.fail(text)

    def _log_folders(self) -> Iterator[Path]:
        """In the order in which a log is looked for; an absolute path is found in each of them."""
        yield from (self._file.parent, self._root)
        if self._field_logs:
            yield self._request.config.invocation_params.dir / self._field_logs

    @property
    def _field_logs(self) -> str:
        """The folder that the option or the variable names, if any."""
        return self._request.config.getoption("--fieldlogs") or os.environ.get(_FOLDER, "")

    def _beside(self, what: str, name: str | Path) -> Path:
        """A file or folder that belongs to the test."""
        __tracebackhide__ = True
        places = (folder / name for folder in (self._file.parent, self._root))
        found = next((path for path in places if path.exists()), None)
        if found is None:
            pytest.fail(f"{what} {name}: is neither beside {self._file} nor in {self._root}")
        return found

    @property
    def _root(self) -> Path:
        return self._request.config.rootpath


def _identity(path: object) -> object:
    """What changes if a file does."""
    try:
        status = os.stat(str(path))
    except OSError:
        return path
    return str(path), status.st_mtime_ns, status.st_size
