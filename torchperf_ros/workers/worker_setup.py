"""What a stage's workers get at their start: their setup, and a folder for temporary files."""

import fcntl
import os
import shutil
import tempfile
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torchperf_ros.api.errors import ConfigError
from torchperf_ros.settings.build_options import BuildOptions, ShapeOptions
from torchperf_ros.settings.config import NodeConfig, StageConfig
from torchperf_ros.workers.calibration import Batching, Calibration
from torchperf_ros.workers.incident_folder import EvidenceLimits
from torchperf_ros.workers.package_cache import find_package, open_cache, package_folders
from torchperf_ros.workers.package_manifest import PackageError


@dataclass(frozen=True)
class WorkerSetup:
    """What a worker gets at its start; `control.pack_message` is how it leaves the node.

    Attributes:
        stage, adapter, options, tiers, build, packages, shapes, device, threads: as the parameters.
        scenes: names, as an adapter gives them.
        streams: names; empty: there is one, without a name.
        batch: most frames in one run; `batch_strict`: a model that takes fewer ends the start.
        loaded: numbers of the tiers that it is to run.
        lower: of each tier the one to run where memory does not suffice for it, -1: none.
        package_dirs: folders that packages may be taken from.
        nice, stream_priority: while it serves; on CUDA a stream of -1 runs ahead of one of 0.
        hang_ms: a run that takes longer ends the worker, so no input may take as long to decode.
        evidence: where captures are kept, None: nowhere.
        background: another worker serves while it loads.
        compile: it may compile while it loads; `compile_first` that the first worker does, too.
        device_before: where an earlier worker of the stage ran, "" for the first.
        calibrations, batching: what an earlier worker of the same kind has measured, empty for the first.
        swapped: the tier that it has a new package for, None: none.
        without_graphs: it captures no CUDA graphs, as a worker before it failed to.
        seed: of what models draw at random in a replay, None: as it comes.
        identify: it says what each tier's answers depend on, as a hash.
        definitions: a folder of message types that no installed package has; "": none.
    """

    stage: str
    adapter: str
    options: dict[str, Any]
    tiers: tuple[str, ...]
    build: tuple[BuildOptions, ...]
    packages: tuple[str, ...]
    loaded: tuple[int, ...]
    lower: tuple[int, ...]
    scenes: tuple[str, ...] = ()
    streams: tuple[str, ...] = ()
    batch: int = 1
    batch_strict: bool = False
    package_dirs: tuple[str, ...] = ()
    shapes: ShapeOptions = ShapeOptions()
    device: str = "cpu"
    threads: int = 1
    nice: int = 0
    stream_priority: int = -1
    hang_ms: float = 1000.0
    kept_mib: int = 0
    cache_dir: str = ""
    cache_mib: int = 1024
    compile_missing: bool = True
    compile_first: bool = False
    start_timeout_s: float = 60.0
    black_box_mib: int = 0
    evidence: EvidenceLimits | None = None
    background: bool = False
    compile: bool = True
    device_before: str = ""
    calibrations: tuple[Calibration, ...] = ()
    batching: Batching | None = None
    swapped: int | None = None
    without_graphs: bool = False
    seed: int | None = None
    identify: bool = False
    definitions: str = ""

    @property
    def compiles(self) -> bool:
        """Whether it compiles while it loads, which takes its time."""
        return self.compile and any(build.engine == "compile" for build in self.build)

    def options_of(self, stream: int) -> dict[str, Any]:
        """What the adapter of a stream gets: its name as well, where it has one."""
        return self.options | {"stream": self.streams[stream]} if self.streams else self.options


def worker_setup(stage: StageConfig, node: NodeConfig) -> WorkerSetup:
    """What a stage's workers get; the pool adds what depends on its other workers.

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
    tiers = range(len(stage.tiers))
    return WorkerSetup(
        stage=stage.name,
        adapter=stage.adapter,
        options=stage.options,
        tiers=stage.tiers,
        build=tuple(stage.build_options(tier) for tier in tiers),
        packages=stage.packages,
        loaded=tuple(tiers),
        streams=stage.streams,
        batch=stage.batch,
        batch_strict=stage.batch_strict,
        lower=tuple(_lower(stage, tier) for tier in tiers),
        scenes=tuple(scene.name for scene in stage.scenes),
        package_dirs=tuple(folders),
        shapes=stage.shapes,
        device=node.device,
        threads=node.worker_threads,
        nice=_nice(stage, node),
        hang_ms=stage.hang_ms,
        kept_mib=node.worker_kept_mib,
        cache_dir=node.cache_dir,
        cache_mib=node.cache_mib,
        compile_missing=node.compile_missing,
        start_timeout_s=node.start_timeout_s,
        black_box_mib=node.black_box_mib if node.recorder else 0,
        evidence=EvidenceLimits(node.evidence_dir, node.evidence_mib),
    )


def _lower(stage: StageConfig, tier: int) -> int:
    """The tier to run where memory does not suffice for this one.

    The next of the first scene that has it; -1: none.
    """
    tiers = next(scene.tiers for scene in stage.scenes if tier in scene.tiers)
    return next(iter(tiers[tiers.index(tier) + 1 :]), -1)


def _nice(stage: StageConfig, node: NodeConfig) -> int:
    """The nice value of a stage's workers: 10 more for each higher priority that there is, at most 19."""
    return min(
        19, 10 * len({each.priority for each in node.whole_stages if each.priority > stage.priority})
    )


_PREFIX: Final = "torchperf_worker_"
# a younger one may belong to a process that has made it and not yet locked it
_STARTS_WITHIN_S: Final = 60.0


class WorkerFolder:
    """Locked by this process for as long as it lives, so that others can tell what a killed one has left."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True)
        self.path = self._folder.name  # of the folder
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        self._unlock = weakref.finalize(self, os.close, descriptor)
        with suppress(
            OSError
        ):  # a file system without locks, where `remove_dead_folders` cannot take one either
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def remove(self) -> None:
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
