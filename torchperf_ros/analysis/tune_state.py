"""What tuning has measured, kept on disk as JSON lines, so that a run that ended early goes on where it was."""

import contextlib
import hashlib
import json
from pathlib import Path

from torchperf_ros.core.errors import ConfigError
from torchperf_ros.core.tune_trial import HUNG, Candidate, Trial

_MOST_FILES = 64


class TuneState:
    """The trials in one file, those of this model on this machine; others in it are left alone.

    Attributes:
        path: the file.
    """

    def __init__(self, path: Path, key: str, *, resume: bool) -> None:
        """Read what is there.

        Args:
            path: one JSON object per line; made when something is added. A line cut off by a kill is skipped.
            key: what was tuned where, see `state_key`; only trials under the same one are found.
            resume: False: as if nothing was there; what is added counts next time.

        Raises:
            ConfigError: the file cannot be read.
        """
        self.path = path
        self._key = key
        self._found: dict[tuple[str, Candidate], Trial] = {}
        if resume and path.exists():
            try:
                lines = path.read_text(encoding="utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                msg = f"--state {path}: cannot be read ({error}); it has to be a file that this command wrote"
                raise ConfigError(msg) from error
            for line in lines:
                with contextlib.suppress(ValueError, TypeError, KeyError):
                    values = json.loads(line)
                    if values["key"] == key:
                        trial = Trial.from_dict(values["trial"])
                        self._found[trial.tier, trial.candidate] = trial

    def of_tier(self, tier: str) -> dict[Candidate, Trial]:
        """All that is known of a tier."""
        return {candidate: trial for (name, candidate), trial in self._found.items() if name == tier}

    def find(self, tier: str, candidate: Candidate, timeout_s: float) -> Trial | None:
        """What became of it earlier; None where that is unknown, or it hung and is given more time now."""
        trial = self._found.get((tier, candidate))
        if trial is not None and trial.outcome == HUNG and timeout_s > trial.timeout_s:
            return None
        return trial

    def add(self, trial: Trial) -> None:
        """Keep a trial; it is in the file when this returns.

        Raises:
            ConfigError: the file cannot be written.
        """
        self._found[trial.tier, trial.candidate] = trial
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a+b") as file:
                if file.tell() and not _ends_with_newline(self.path):  # a kill cut the last line off
                    file.write(b"\n")
                file.write(json.dumps({"key": self._key, "trial": trial.as_dict()}).encode() + b"\n")
        except OSError as error:
            msg = f"--state {self.path}: cannot be written: {error.strerror}; it has to be a file in your own folder"
            raise ConfigError(msg) from error


def state_key(*parts: object) -> str:
    """Hash of what results depend on: identity of the model, its options, the machine, seconds of measuring."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def default_path(cache_folder: Path, key: str) -> Path:
    """The file in the cache's folder `tune`; all but the newest 64 in there are removed."""
    folder = cache_folder / "tune"
    files = sorted(folder.glob("*.jsonl"), key=lambda path: path.stat().st_mtime) if folder.is_dir() else []
    for path in files[:-_MOST_FILES]:
        path.unlink(missing_ok=True)
    return folder / f"{key}.jsonl"


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) == b"\n"
