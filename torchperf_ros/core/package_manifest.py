"""What stands beside a compiled package: what it was built from and for, and what was measured of it."""

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from torchperf_ros.core.errors import TorchperfError

FORMAT = 1


class PackageError(TorchperfError):
    """A package or its manifest cannot be used; the message names the file and why."""


@dataclass(frozen=True)
class Identity:
    """What a package was built from and for. Two builds with the same identity are interchangeable.

    Attributes:
        torch: version of torch.
        device: `cpu`, or the CUDA device's name.
        capability: instruction set of the CPU, or the device's compute capability.
        options: `BuildOptions` as a dict.
        signature: type and shape of each example input.
        dynamic: dimensions that may vary: [input, dimension, smallest, largest].
        weights: hash of the names, types, shapes and values of parameters and buffers.
        code: hash of the model's structure and of the sources that its modules come from.
        threads: CPU threads, which compiled loops are split for; 0 on CUDA.
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
    format: int = FORMAT

    @property
    def key(self) -> str:
        """Name of the package's files in the cache: 32 hexadecimal digits."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:32]

    def differences(self, wanted: "Identity") -> list[str]:
        """In words, what this package has other than is wanted; empty: it fits."""
        words = []
        for field in fields(self):
            found, needed = getattr(self, field.name), getattr(wanted, field.name)
            if field.name == "options" and found != needed:
                names = [name for name in {**found, **needed} if found.get(name) != needed.get(name)]
                words += [f"option {name} {found.get(name)!r}, wanted {needed.get(name)!r}" for name in names]
            elif found != needed:
                words.append(f"{field.name} {_short(found, needed)}, wanted {_short(needed, found)}")
        return words


@dataclass(frozen=True)
class Manifest:
    """The JSON file beside a package.

    Attributes:
        identity: what it was built from and for.
        adapter, tier: whose model this is; for people.
        package_sha256, package_bytes: of the `.pt2` file.
        graph: hash of the exported graph.
        parity: relative_l2, cosine, max_error against eager.
        timings: shape -> {"p50_ms", "p99_ms", "eager_p50_ms", "eager_p99_ms"}.
        peak_memory_bytes: of the process (or device) that built and ran it.
        compile_s: seconds from export to package.
        built: UTC time, ISO 8601.
    """

    identity: Identity
    adapter: str
    tier: str
    package_sha256: str
    package_bytes: int
    graph: str
    parity: dict[str, float]
    timings: dict[str, dict[str, float]]
    peak_memory_bytes: int
    compile_s: float
    built: str

    def as_dict(self) -> dict[str, Any]:
        """As it stands in the file."""
        return asdict(self)

    def to_json(self) -> str:
        """As text, for people, too."""
        return json.dumps(self.as_dict(), indent=2) + "\n"


def manifest_path(package: Path) -> Path:
    """The manifest of a package file."""
    return package.with_suffix(".json")


def read_manifest(package: Path) -> Manifest:
    """Read the manifest beside a package.

    Raises:
        PackageError: it is missing, not readable, or not a manifest of this format.
    """
    path = manifest_path(package)
    try:
        fields_found = json.loads(path.read_text(encoding="utf-8"))
        identity_found = fields_found.pop("identity")
        number = identity_found["format"]
        if number == FORMAT:
            return _checked(Manifest(Identity(**identity_found), **fields_found))
    except FileNotFoundError as error:
        msg = f"package {package} has no manifest {path.name}; `torchperf compile` writes both"
        raise PackageError(msg) from error
    except (OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        msg = f"manifest {path} cannot be read ({type(error).__name__}: {error}); build the package again"
        raise PackageError(msg) from error
    msg = f"manifest {path} has format {number!r}; this version reads {FORMAT}; build the package again"
    raise PackageError(msg)


def _checked(manifest: Manifest) -> Manifest:
    """The same, if every value has its type, and there is something to show of the timings.

    Raises:
        TypeError: names the value.
    """
    for part in (manifest.identity, manifest):
        for field in fields(part):
            value: object = getattr(part, field.name)
            kind: Any = getattr(field.type, "__origin__", field.type)
            good = isinstance(value, (int, float)) if kind is float else isinstance(value, kind)
            if not good or (field.name == "timings" and not value):
                msg = f"{field.name} is {value!r}"
                raise TypeError(msg)
    return manifest


def check_package(package: Path, wanted: Identity | None) -> Manifest:
    """Whether a package is what its manifest says and what is wanted (None: whatever it is).

    Raises:
        PackageError: names the file and everything that does not fit.
    """
    manifest = read_manifest(package)
    differences = [] if wanted is None else manifest.identity.differences(wanted)
    if differences:
        msg = f"package {package} does not fit: {'; '.join(differences)}"
        raise PackageError(msg)
    try:
        size = package.stat().st_size
        if size != manifest.package_bytes:
            msg = f"package {package} has {size} bytes; its manifest says {manifest.package_bytes}: it is truncated"
            raise PackageError(msg)
        digest = file_sha256(package)
    except OSError as error:
        msg = f"package {package} cannot be read: {error}"
        raise PackageError(msg) from error
    if digest != manifest.package_sha256:
        msg = f"package {package} is corrupt: its SHA-256 is {digest[:12]}..., not {manifest.package_sha256[:12]}..."
        raise PackageError(msg)
    return manifest


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _short(value: object, other: object) -> str:
    """A value beside another one: of lists what only this one has, of hashes the beginning."""
    if isinstance(value, list) and isinstance(other, list):
        return ", ".join(str(item) for item in value if item not in other) or f"{len(value)} entries"
    text = str(value)
    return text if len(text) <= 60 else f"{text[:12]}..."  # noqa: PLR2004 - hashes are longer than what people write
