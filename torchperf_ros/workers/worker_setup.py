"""What a stage's workers get at their start: their setup as JSON, and a folder for temporary files."""

import fcntl
import os
import shutil
import tempfile
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from torchperf_ros.api.errors import ConfigError
from torchperf_ros.settings.config import NodeConfig, StageConfig
from torchperf_ros.workers.package_cache import find_package, open_cache, package_folders
from torchperf_ros.workers.package_manifest import PackageError


def worker_setup(stage: StageConfig, node: NodeConfig) -> dict[str, Any]:
    """The setup message of a stage.

    The pool adds whether the worker loads in the background and may compile.

    Raises:
        ConfigError: a package cannot be taken from where it lies, which the worker would refuse as well.
    """
    folders = package_folders(node.cache_dir, node.package_dirs, stage.packages)
    try:
        for package in filter(None, stage.packages):
            find_package(Path(package), folders)
    except PackageError as error:
        raise ConfigError(f"parameter {stage.name}.packages: {error}") from error
    if stage.engine != "eager":
        open_cache(node.cache_dir, node.cache_mib).check_private()
    return {
        "stage": stage.name,
        "adapter": stage.adapter,
        "options": stage.options,
        "tiers": list(stage.tiers),
        "build": [stage.build_options(tier).as_dict() for tier in range(len(stage.tiers))],
        "packages": list(stage.packages),
        "scenes": [scene.name for scene in stage.scenes],
        "loaded": list(range(len(stage.tiers))),
        "lower": [_lower(stage, tier) for tier in range(len(stage.tiers))],
        "package_dirs": folders,
        "shapes": stage.shapes.as_dict(),
        "device": node.device,
        "nice": _nice(stage, node),
        "stream_priority": -1,  # on CUDA: ahead of those of another version beside it
        "threads": node.worker_threads,
        "kept_mib": node.worker_kept_mib,
        "cache_dir": node.cache_dir,
        "cache_mib": node.cache_mib,
        "compile_missing": node.compile_missing,
        "start_timeout_s": node.start_timeout_s,
        "black_box_mib": node.black_box_mib if node.recorder else 0,
        "evidence": {
            "evidence_dir": node.evidence_dir,
            "evidence_mib": node.evidence_mib,
        },
    }


def _lower(stage: StageConfig, tier: int) -> int:
    """The tier to run where memory does not suffice for this one.

    The next of the first scene that has it; -1: none.
    """
    tiers = next(scene.tiers for scene in stage.scenes if tier in scene.tiers)
    return next(iter(tiers[tiers.index(tier) + 1 :]), -1)


def _nice(stage: StageConfig, node: NodeConfig) -> int:
    """The nice value of a stage's workers: 10 more for each higher priority that there is, at most 19."""
    return min(19, 10 * len({each.priority for each in node.stages if each.priority > stage.priority}))


_PREFIX: Final = "torchperf_worker_"
# a younger one may belong to a process that has made it and not yet locked it
_STARTS_WITHIN_S: Final = 60.0


class WorkerFolder:
    """Locked by this process for as long as it lives, so that others can tell what a killed one has left."""

    def __init__(self) -> None:
        """Make it where temporary files go."""
        self._folder = tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True)
        self.path = self._folder.name  # of the folder
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        self._unlock = weakref.finalize(self, os.close, descriptor)
        with suppress(
            OSError
        ):  # a file system without locks, where `remove_dead_folders` cannot take one either
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def remove(self) -> None:
        """Remove it, with all that is in it."""
        self._folder.cleanup()
        self._unlock()


def remove_dead_folders(where: Path | None = None) -> int:
    """Remove this user's worker folders whose process was killed before it could.

    Returns how many bytes that frees.

    They are in `where`; None: where temporary files go.
    """
    youngest_s = time.time() - _STARTS_WITHIN_S
    freed = 0
    for folder in (where or Path(tempfile.gettempdir())).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # locked, gone meanwhile, or no folder
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                found = os.fstat(descriptor)
                if found.st_uid == os.getuid() and found.st_mtime < youngest_s:
                    size = sum(file.lstat().st_size for file in folder.rglob("*"))
                    shutil.rmtree(folder)
                    freed += size
            finally:
                os.close(descriptor)
    return freed
