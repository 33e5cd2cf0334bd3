"""Runs that others are measured against, kept by name: what each was a run of stands in its file."""

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final

from torchperf_ros.observe.runs.run_file import SUFFIXES
from torchperf_ros.observe.runs.run_log import RunLog, RunLogError
from torchperf_ros.observe.runs.run_log_source import load_run
from torchperf_ros.settings.user_folder import make_private, user_folder

AUTO: Final = "auto"
"""Instead of a name: the baseline that fits a run."""
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
_CARD: Final = "baseline.json"
_VERSION: Final = 1


@dataclass(frozen=True)
class Baseline:
    """One baseline.

    Attributes:
        card: what they are runs of: `saved_at` (ISO, UTC), `commit`, `log_sha256`, `log`, `fingerprint`,
            `cpu`, `model` (hash by stage), `params_sha256`, `frames` (answered, by stage); texts may be
            empty.
    """

    name: str
    runs: tuple[Path, ...]
    card: Mapping[str, Any]


class BaselineStore:
    """A folder with a folder for each baseline: the runs, and a card that says what they are runs of."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or user_folder("XDG_STATE_HOME", ".local/state") / "baselines"

    def save(self, paths: Sequence[Path], name: str, commit: str = "", replace: bool = False) -> Baseline:
        """Keep runs, files that `torchperf replay` wrote: all of them, or nothing under this name.

        An empty `commit` is what the first run says.

        Raises:
            RunLogError: the name is taken or none, or a path is no such file or cannot be read.
            OSError: it cannot be written.
        """
        card: dict[str, Any] = {}
        for path in paths:
            if path.suffix not in SUFFIXES or not path.is_file():
                raise RunLogError(
                    f"run {path}: has to be a .json or .parquet file that `torchperf replay` wrote"
                )
            run = load_run(path)
            if run.fact("complete") is False:
                raise RunLogError(f"run {path}: was interrupted; a baseline has to be complete")
            card = card or _card(run, commit)
        if not _NAME.fullmatch(name) or name == AUTO:
            msg = f"--save {name!r}: has to be letters, digits, '.', '_' and '-', not begin with '.' or '-'"
            raise RunLogError(f"{msg}, and not be '{AUTO}'")
        place = self.folder / name
        part, old = (self.folder / f".{name}.{os.getpid()}.{word}" for word in ("part", "old"))
        if place.exists() and not replace:
            raise RunLogError(f"baseline {name} is there already, in {place}; --replace, or another name")
        make_private(part)
        try:
            for number, path in enumerate(paths, 1):
                shutil.copyfile(path, part / f"run{number if len(paths) > 1 else ''}{path.suffix}")
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
        found = [self._read(folder) for folder in self._folders().values()]
        return sorted(found, key=lambda one: str(one.card["saved_at"]), reverse=True)

    def get(self, name: str) -> Baseline:
        """One baseline; a `RunLogError` names those that there are where there is none of this name."""
        folders = self._folders()
        if name not in folders:
            raise RunLogError(
                f"no baseline {name!r} in {self.folder}; there are: {', '.join(folders) or 'none'}"
            )
        return self._read(folders[name])

    def best_for(self, run: RunLog, across_machines: bool = False) -> Baseline:
        """The baseline that a run is to be compared with: of the same log, on the same machine.

        Of several, one of the same model counts for more, then one of the same parameters, then the newest.

        With `across_machines` one of another machine will do, if there is none of this.

        Raises:
            RunLogError: there is none; the message says why each that there is does not fit.
        """
        own = _card(run, "")
        reasons: list[str] = []
        fitting: list[tuple[tuple[bool, bool, bool, str], Baseline]] = []
        for one in self.all():
            same = {key: bool(own[key]) and one.card[key] == own[key] for key in own}
            known = own["fingerprint"] and one.card["fingerprint"]
            if same["log_sha256"] and (same["fingerprint"] or across_machines or not known):
                rank = same["fingerprint"], same["model"], same["params_sha256"], str(one.card["saved_at"])
                fitting.append((rank, one))
            reasons.append(f"{one.name} ({'another machine' if same['log_sha256'] else 'another log'})")
        if not fitting:
            msg = (
                f"no baseline for {run.name} in {self.folder}: {', '.join(reasons) or 'it is empty'}; name"
                " one with --baseline, or save one with `torchperf compare RUN --save NAME`"
            )
            raise RunLogError(msg)
        return max(fitting, key=lambda one: one[0])[1]

    def _folders(self) -> dict[str, Path]:
        return {card.parent.name: card.parent for card in sorted(self.folder.glob(f"[!.]*/{_CARD}"))}

    def _read(self, folder: Path) -> Baseline:
        try:
            card = json.loads((folder / _CARD).read_text(encoding="utf-8"))
            runs = tuple(path for path in sorted(folder.glob("run*")) if path.suffix in SUFFIXES)
            if card["v"] != _VERSION or not runs:
                raise ValueError("of another version" if runs else "no run")
            return Baseline(folder.name, runs, card)
        except (OSError, ValueError, KeyError, TypeError) as error:
            msg = f"baseline {folder}: is damaged ({error}); remove this folder, and save it anew"
            raise RunLogError(msg) from error


def _card(run: RunLog, commit: str) -> dict[str, Any]:
    def text(*path: str) -> str:
        return str(run.fact(*path) or "")

    model = run.fact("model")
    return {
        "v": _VERSION,
        "saved_at": datetime.now(timezone.utc).isoformat(timespec="microseconds"),
        "commit": commit or text("commit"),
        "log_sha256": text("log", "sha256"),
        "log": Path(text("log", "path")).name,
        "fingerprint": text("machine", "fingerprint"),
        "cpu": text("machine", "cpu"),
        "model": (
            {str(stage): str(value) for stage, value in model.items()} if isinstance(model, Mapping) else {}
        ),
        "params_sha256": text("params_sha256"),
        "frames": {stage.name: int(stage.counted.sum()) for stage in run.stages},
    }
