"""What stands beside a compiled package: what it was built from and for, and what was measured of it."""

import dataclasses
import hashlib
import json
import os
import zipfile
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torchperf_ros.api.errors import ProtocolError, TorchperfError
from torchperf_ros.settings.files import open_regular, read_bounded, sha256_of
from torchperf_ros.workers.calibration import Calibration
from torchperf_ros.workers.control import from_json

_LONGEST_WRITTEN = 60  # by people; hashes are longer
FORMAT = 4  # 3: listed plain values among the outputs in another way


class PackageError(TorchperfError):
    """A package or its manifest cannot be used; the message names the file and why."""


@dataclass(frozen=True)
class Identity:
    """What a package was built from and for. Two builds with the same identity are interchangeable.

    Attributes:
        device, capability: `cpu` and its instruction set, or the CUDA device's name and compute capability.
        options: `BuildOptions` as a dict.
        signature: type and shape of each example input.
        dynamic: dimensions that may vary: [input, dimension, smallest, largest].
        weights, code: hashes, see `fingerprint`.
        threads: CPU threads, which compiled loops are split for; 0 on CUDA.
        library: what built it and runs it besides torch, with its version; "" where torch does.
        quantised: what int8 depends on besides: torchao's version, and a hash of the inputs that ranges
            come from.
        format: version of the manifest.
    """

    torch: str
    device: str
    capability: str
    options: dict[str, Any]
    signature: list[str]
    dynamic: list[list[int]]
    weights: str
    code: str
    threads: int = 0
    library: str = ""
    quantised: str = ""
    format: int = FORMAT

    @property
    def key(self) -> str:
        """Name of the package's files in the cache: 32 hexadecimal digits."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:32]

    def differences(self, wanted: "Identity") -> list[str]:
        """In words, what this package has other than is wanted; empty: it fits."""
        words = []
        for name, needed in asdict(wanted).items():
            found = getattr(self, name)
            if name == "options":
                names = [
                    option for option in {**found, **needed} if found.get(option) != needed.get(option)
                ]
                words += [
                    f"option {each} {found.get(each)!r}, wanted {needed.get(each)!r}" for each in names
                ]
            elif found != needed:
                words.append(f"{name} {_short(found, needed)}, wanted {_short(needed, found)}")
        return words


@dataclass(frozen=True)
class Manifest:
    """The JSON file beside a package.

    Attributes:
        adapter, tier: whose model this is; for people.
        parity: relative_l2, max_error against eager, and score or loss where that decided, see
            `Parity`.
        timings: shape -> {"p50_ms", "p99_ms", "eager_p50_ms", "eager_p99_ms"}.
        peak_memory_bytes: of the process (or device) that built and ran it.
        compile_s: seconds from export to package.
        built: UTC time, ISO 8601.
        variants_ms: p50 of each variant that was compiled, the one that was kept first: `frozen` (weights
            folded and packed), `frozen channels_last`, `plain`.
        outputs: how the package's flat outputs are nested; "" where the package itself holds that.
        int8: of a quantised one, by kind of layer: how many are there, are quantised, and run in int8 as
            compiled.
        calibration: hash of the log's frames that ranges of activations were taken from; "" without a log.
    """

    identity: Identity
    adapter: str
    tier: str
    package_sha256: str
    package_bytes: int
    graph: str
    parity: dict[str, Any]
    timings: dict[str, dict[str, float]]
    peak_memory_bytes: int
    compile_s: float
    built: str
    variants_ms: dict[str, float] = dataclasses.field(default_factory=dict)
    outputs: str = ""
    int8: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)
    calibration: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"


def manifest_path(package: Path) -> Path:
    return package.with_suffix(".json")


def read_manifest(package: Path) -> Manifest:
    """The manifest beside a package.

    A `PackageError` where it is missing, damaged, or of another format.
    """
    path = manifest_path(package)
    try:
        fields_found = json.loads(read_bounded(path))
        number = fields_found["identity"]["format"]
        if fields_found.pop("parts", ""):  # of an earlier version
            raise PackageError(
                f"package {package} is of parts of a model; leave it out, as engine compile takes those"
            )
        if number == FORMAT:
            manifest = from_json(Manifest, fields_found)
            if not manifest.timings:
                raise ValueError("timings is empty")
            return manifest
    except FileNotFoundError as error:
        raise PackageError(
            f"package {package} has no manifest {path.name}; `torchperf compile` writes both"
        ) from error
    except (OSError, ValueError, TypeError, KeyError, RecursionError, ProtocolError) as error:
        raise PackageError(
            f"manifest {path} cannot be read ({type(error).__name__}: {error}); build the package again"
        ) from error
    raise PackageError(
        f"manifest {path} has format {number!r}; this version reads {FORMAT}; build the package again"
    )


def made_for(package: Path) -> tuple[str, str] | None:
    """Adapter and tier that a package was built for, None without a manifest.

    A `PackageError` where it is damaged.
    """
    if not manifest_path(package).is_file():
        return None
    manifest = read_manifest(package)
    return manifest.adapter, manifest.tier


def check_package(package: Path, wanted: Identity | None) -> Manifest:
    """The manifest of a package that is what this says, and what is wanted (None.

    Anything); or a `PackageError`.
    """
    manifest = read_manifest(package)
    differences = [] if wanted is None else manifest.identity.differences(wanted)
    if differences:
        raise PackageError(f"package {package} does not fit: {'; '.join(differences)}")
    try:
        with open_regular(package) as file:
            size, digest = os.fstat(file.fileno()).st_size, sha256_of(file)
    except OSError as error:
        raise PackageError(f"package {package} cannot be read: {error}") from error
    if size != manifest.package_bytes:
        raise PackageError(
            f"package {package} has {size} bytes; its manifest says {manifest.package_bytes}: it is"
            " truncated"
        )
    if digest != manifest.package_sha256:
        raise PackageError(
            f"package {package} is corrupt: its SHA-256 is {digest[:12]}..., not"
            f" {manifest.package_sha256[:12]}..."
        )
    return manifest


def is_exported_program(path: Path) -> bool:
    """Whether a `.pt2` file holds an exported program, which can be built, instead of a compiled package."""
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            names = archive.namelist()
    except (OSError, zipfile.BadZipFile):
        return False
    programs = ("models/model.json", "serialized_exported_program.json")
    return not any("/aotinductor/" in name for name in names) and any(
        name.endswith(programs) for name in names
    )


def file_sha256(path: Path) -> str:
    with open_regular(path) as file:
        return sha256_of(file)


def _short(value: object, other: object) -> str:
    """A value beside another one: of lists what only this one has, of hashes the beginning."""
    if isinstance(value, list) and isinstance(other, list):
        return ", ".join(str(item) for item in value if item not in other) or f"{len(value)} entries"
    text = str(value)
    return text if len(text) <= _LONGEST_WRITTEN else f"{text[:12]}..."


EAGER = "eager"
_TIE = 0.03
_TAIL = 1.25


def choose_engine(calibrations: Mapping[str, Calibration]) -> str:
    """The engine with the smallest median among those that beat eager, all measured in turns.

    `eager` if none does.

    An engine beats eager if its median is more than 3 % smaller (at a tie, eager: nothing to load, nothing
    to go stale) and its p99 at most 1.25 times eager's (a p99 scatters more than a median; an engine that
    is quick on average and late when it counts is no gain).
    """
    least, most = calibrations[EAGER].median_ms * (1 - _TIE), calibrations[EAGER].p99_ms * _TAIL
    better = [name for name, one in calibrations.items() if one.median_ms < least and one.p99_ms <= most]
    return min(better, key=lambda name: calibrations[name].median_ms, default=EAGER)


@dataclass(frozen=True)
class EngineChoice:
    """What engine `auto` has chosen for a tier on this machine, as it lies beside the packages.

    `timings_ms` are [median, p99] of all that were timed in turns, eager among them; `left_out` is why
    others were not.
    """

    engine: str
    timings_ms: dict[str, list[float]]
    left_out: dict[str, str] = field(default_factory=dict)

    def best_of(self, names: Collection[str]) -> str:
        """The chosen engine; of these names the one that would have been chosen, if it was timed."""
        if self.engine in names:
            return self.engine
        timed = {name: Calibration(*self.timings_ms[name]) for name in self.timings_ms if name in names}
        return choose_engine(timed)

    @property
    def words(self) -> str:
        """Which and by how much.

        The chosen engine first, the others from fast to slow, then why some are left out.

        `paced`: timed with a pause before each call, as a camera makes it.
        """
        order = sorted(self.timings_ms, key=lambda name: (name != self.engine, self.timings_ms[name][0]))
        parts = [", ".join(f"{name} {self.timings_ms[name][0]:.3g}" for name in order) + " ms (p50, paced)"]
        parts += [f"left out: {name}: {why}" for name, why in self.left_out.items()]
        return "; ".join(parts)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"


def read_choice(path: Path) -> EngineChoice | None:
    """The choice in a file; None where there is none that can be read: it is made anew."""
    try:
        choice = EngineChoice(**json.loads(path.read_text(encoding="utf-8")))
        _ = choice.words
    except (OSError, ValueError, TypeError, AttributeError, LookupError):
        return None
    return choice if {choice.engine, EAGER} <= choice.timings_ms.keys() else None
