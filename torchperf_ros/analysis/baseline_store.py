"""Runs that others are measured against, kept by name: what each was a run of stands in its file."""

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final

from torchperf_ros.analysis.regress_run import RegressError, RunFrames, load_run
from torchperf_ros.analysis.run_log_run_file import SUFFIXES
from torchperf_ros.core.user_folder import user_folder

_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
_ODD: Final = re.compile(r"[^A-Za-z0-9._-]+")
_CARD: Final = "baseline.json"
_VERSION: Final = 1
_SHOWN: Final = 8


class BaselineError(RegressError):
    """A baseline cannot be kept or found; the message says which, why, and what would do."""


@dataclass(frozen=True)
class Baseline:
    """One baseline.

    Attributes:
        name: in its store.
        run: the run's file.
        saved_at: ISO time, UTC, to the microsecond.
        commit: what the code was; may be empty.
        log_sha256, log: the log's hash and name; may be empty.
        fingerprint, cpu: of the machine; may be empty.
        model: hash by stage.
        params_sha256: hash of the parameters.
        frames: answered frames by stage.
    """

    name: str
    run: Path
    saved_at: str
    commit: str
    log_sha256: str
    log: str
    fingerprint: str
    cpu: str
    model: Mapping[str, str]
    params_sha256: str
    frames: Mapping[str, int]


class BaselineStore:
    """A folder with a folder for each baseline: the run, and a card that says what it is a run of."""

    def __init__(self, folder: Path | None = None) -> None:
        """Use this folder; None: `baselines` where the user's state lies (`XDG_STATE_HOME`)."""
        self.folder = folder or user_folder("XDG_STATE_HOME", ".local/state") / "baselines"

    def save(self, path: Path, name: str = "", commit: str = "", replace: bool = False) -> Baseline:
        """Keep a run: all of it, or nothing under this name.

        Args:
            path: a `.json` or `.parquet` file that `torchperf replay` wrote.
            name: of the baseline; empty: made of commit, log, machine and model.
            commit: what the code was; empty: what the run says.
            replace: whether a baseline of this name gives way.

        Raises:
            BaselineError: the name is taken or none, or it is no such file.
            RunFileError: the run cannot be read.
            OSError: it cannot be written.
        """
        if path.suffix not in SUFFIXES or not path.is_file():
            msg = f"run {path}: has to be a .json or .parquet file that `torchperf replay` wrote"
            raise BaselineError(msg)
        run = load_run(path)
        if run.fact("complete") is False:
            msg = f"run {path}: was interrupted; a baseline has to be complete"
            raise BaselineError(msg)
        card = _card(run, commit)
        name = name or _name_of(card)
        if not _NAME.fullmatch(name):
            msg = f"--name {name!r}: has to be letters, digits, '.', '_' and '-', and not begin with '.' or '-'"
            raise BaselineError(msg)
        place = self.folder / name
        part, old = self._hidden(name, "part"), self._hidden(name, "old")
        if place.exists() and not replace:
            msg = f"baseline {name} is there already, in {place}; --replace, or another --name"
            raise BaselineError(msg)
        part.mkdir(parents=True)
        try:
            shutil.copyfile(path, part / f"run{path.suffix}")
            (part / _CARD).write_text(json.dumps(card, indent=1) + "\n", encoding="utf-8")
            if place.exists():
                place.rename(old)
            part.rename(place)
        finally:
            for left in (part, old):
                shutil.rmtree(left, ignore_errors=True)
        return self.get(name)

    def all(self) -> list[Baseline]:
        """Every baseline, the newest first."""
        found = [self._read(folder) for folder in self._folders()]
        return sorted(found, key=lambda one: one.saved_at, reverse=True)

    def get(self, name: str) -> Baseline:
        """One baseline.

        Raises:
            BaselineError: there is none of this name; the message names those that there are.
        """
        return self._read(self._folder_of(name))

    def delete(self, name: str, dry_run: bool = False) -> Path:
        """Delete a baseline, damaged or not: all of it, or nothing.

        Args:
            name: of the baseline.
            dry_run: find it, and leave it as it is.

        Returns:
            Its folder.

        Raises:
            BaselineError: there is none of this name; the message names those that there are.
            OSError: it cannot be deleted.
        """
        place = self._folder_of(name)
        if not dry_run:
            old = self._hidden(name, "old")
            place.rename(old)
            shutil.rmtree(old)
        return place

    def best_for(self, run: RunFrames, across_machines: bool = False) -> Baseline:
        """The baseline that a run is to be compared with: of the same log, on the same machine.

        Of several, one of the same model counts for more, then one of the same parameters, then the newest.

        Args:
            run: the run.
            across_machines: one of another machine will do, if there is none of this.

        Raises:
            BaselineError: there is none; the message says why each that there is was passed over.
        """
        log, machine = _text(run.fact("log", "sha256")), _text(run.fact("machine", "fingerprint"))
        there = self.all()
        fitting = [
            one for one in there
            if log and one.log_sha256 == log and (across_machines or not machine or one.fingerprint in {machine, ""})
        ]  # fmt: skip
        if not fitting:
            reasons = [f"{one.name} ({'another log' if one.log_sha256 != log or not log else 'another machine'})"
                       for one in there]  # fmt: skip
            msg = (
                f"no baseline for {run.name} in {self.folder}: {', '.join(reasons) or 'it is empty'}; name one with "
                "--to, or save one with `torchperf baseline save`"
            )
            raise BaselineError(msg)
        model, params = run.fact("model"), _text(run.fact("params_sha256"))
        return max(fitting, key=lambda one: (
            one.fingerprint == machine, one.model == model, one.params_sha256 == params, one.saved_at))  # fmt: skip

    def _hidden(self, name: str, word: str) -> Path:
        return self.folder / f".{name}.{os.getpid()}.{word}"

    def _folders(self) -> list[Path]:
        return [card.parent for card in sorted(self.folder.glob(f"[!.]*/{_CARD}"))]

    def _folder_of(self, name: str) -> Path:
        folders = {folder.name: folder for folder in self._folders()}
        if name not in folders:
            msg = f"no baseline {name!r} in {self.folder}; there are: {', '.join(folders) or 'none'}"
            raise BaselineError(msg)
        return folders[name]

    def _read(self, folder: Path) -> Baseline:
        try:
            card = json.loads((folder / _CARD).read_text(encoding="utf-8"))
            if card.pop("v", None) != _VERSION:
                msg = "of another version"
                raise ValueError(msg)
            run = next(path for suffix in SUFFIXES if (path := folder / f"run{suffix}").is_file())
            return Baseline(folder.name, run, **card)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, StopIteration) as error:
            why = str(error) or "no run"
            msg = f"baseline {folder}: is damaged ({why}); `torchperf baseline delete {folder.name}` and save it anew"
            raise BaselineError(msg) from error


def _card(run: RunFrames, commit: str) -> dict[str, Any]:
    model = run.fact("model")
    return {
        "v": _VERSION,
        "saved_at": datetime.now(timezone.utc).isoformat(timespec="microseconds"),
        "commit": commit or _text(run.fact("commit")),
        "log_sha256": _text(run.fact("log", "sha256")),
        "log": Path(_text(run.fact("log", "path"))).name,
        "fingerprint": _text(run.fact("machine", "fingerprint")),
        "cpu": _text(run.fact("machine", "cpu")),
        "model": {str(stage): str(value) for stage, value in model.items()} if isinstance(model, Mapping) else {},
        "params_sha256": _text(run.fact("params_sha256")),
        "frames": {name: len(stage) for name, stage in run.stages.items()},
    }


def _name_of(card: Mapping[str, Any]) -> str:
    """Commit, log, machine and model in a few letters each."""
    model = "-".join(value[:_SHOWN] for value in card["model"].values() if value)
    parts = (card["commit"][:_SHOWN], Path(card["log"]).stem, card["fingerprint"][:_SHOWN], model)
    return (_ODD.sub("_", "-".join(filter(None, parts))).lstrip(".-") or "baseline")[:100]


def _text(value: object) -> str:
    return "" if value is None else str(value)
