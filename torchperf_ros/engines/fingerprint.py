"""What a model is, in hashes.

Weights, source files, signature, and the machine that a package is built for.
"""

import ast
import contextlib
import dataclasses
import enum
import functools
import hashlib
import importlib.metadata
import importlib.util
import inspect
import site
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from torchperf_ros.api.adapter import Adapter
from torchperf_ros.api.errors import AdapterError, one_line
from torchperf_ros.api.text import listed
from torchperf_ros.engines.built_tier import BuiltTier, build_model
from torchperf_ros.engines.model_transforms import cpu_flags
from torchperf_ros.engines.outputs import numbers_of, signature_of
from torchperf_ros.engines.parity import NEVER_CHANGES, OF_EVERY_MODULE, DynamicDims
from torchperf_ros.settings.build_options import INT8_PRECISIONS, INT8_STATIC, BuildOptions, installed
from torchperf_ros.settings.config import STAGE_PARAMETERS
from torchperf_ros.workers.package_manifest import Identity

_KNOWN: Final = sys.stdlib_module_names | {
    "builtins",
    "numpy",
    "torch",
    "triton",
}  # their versions count, and parity is checked
_OURS, _OUR_MODELS = "torchperf_ros", "torchperf_ros.models"
# Beside torch, and Debian's, lie libraries as well, also where this Python's own folder is another one. A folder of
# that name elsewhere may be a workspace's, whose files change without their version.
_LIBRARIES: Final = (
    *site.getsitepackages(),
    site.getusersitepackages(),
    str(Path(torch.__file__).parents[1]),
    *(folder for folder in sys.path if folder.endswith("/dist-packages")),
)
_INSTALLED: Final = tuple(f"{folder}/" for folder in dict.fromkeys(_LIBRARIES))
_USUAL: tuple[str, ...] = tuple(next(one.default for one in STAGE_PARAMETERS if one.name == "tiers"))
_HOOKS: Final = ("_forward_pre_hooks", "_forward_hooks")
_OF_FX = frozenset(vars(torch.fx.GraphModule({}, torch.fx.Graph())))


def identify(tier: BuiltTier, options: BuildOptions, library: str = "") -> Identity:
    """The identity of the package of this model here, by an engine's library and version.

    It takes as long as hashing the weights. Options that a package does not depend on do not count.
    """
    plain = BuildOptions()
    of_package = replace(options, mode=plain.mode, dynamic=plain.dynamic, cuda_graphs=plain.cuda_graphs)
    name, capability = machine_facts(tier.device)
    return Identity(
        torch=torch.__version__,
        device=name,
        capability=capability,
        options=of_package.as_identity(),
        signature=[signature_of(tensor) for tensor in tier.example],
        dynamic=declared_dims(tier.dims),
        weights=weights_hash(tier.model),
        code=code_hash(tier.model),
        threads=torch.get_num_threads() if tier.device.type == "cpu" else 0,
        library=library,
        quantised=_quantised(tier, options.precision),
    )


def _quantised(tier: BuiltTier, precision: str) -> str:
    if precision not in INT8_PRECISIONS:
        return ""
    digest = hashlib.sha256()
    for inputs in tier.scored_inputs() if precision == INT8_STATIC else ():
        for tensor in inputs:
            digest.update(signature_of(tensor).encode() + _content(tensor))
    return f"{installed(['torchao'])} {digest.hexdigest()[:16]}"


def declared_dims(dynamic_dims: DynamicDims) -> list[list[int]]:
    """As manifests hold them: [input, dimension, smallest, largest]."""
    return [
        [i, dim, *span] for i, dims in sorted(dynamic_dims.items()) for dim, span in sorted(dims.items())
    ]


def machine_facts(device: torch.device) -> tuple[str, str]:
    """The CUDA device's name and capability, or `cpu`, its vector instructions and a hash of its flags."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return torch.cuda.get_device_name(device), f"{major}.{minor}"
    # packages are compiled with `-march=native`: another CPU may not know all of their instructions
    flags = hashlib.sha256(" ".join(sorted(cpu_flags())).encode()).hexdigest()[:8]
    return "cpu", f"{torch.backends.cpu.get_cpu_capability()} flags {flags}"


def weights_hash(model: torch.nn.Module) -> str:
    """Hash of every parameter and buffer, and of what else its state holds.

    Name, type, shape and values.
    """
    digest, tensors, others = hashlib.sha256(), dict(_tensors(model)), dict[str, Any]()
    for name, tensor in tensors.items():
        digest.update(f"{name} ".encode() + _content(tensor))
    # A module may refuse its state. Beside tensors it keeps packed weights there.
    with contextlib.suppress(Exception):
        others = {key: value for key, value in model.state_dict().items() if key not in tensors}
    for key, value in sorted(others.items()):
        digest.update(f"{key}={_described(value, set())};".encode())
    return digest.hexdigest()


def uninitialised(model: torch.nn.Module) -> str:
    """Which weights a model does not have yet, as those of a lazy module; "" where it has all."""
    names = [name for name, each in [*model.named_parameters(), *model.named_buffers()] if is_lazy(each)]
    why = "is not initialised: its values would be drawn at the first frame"
    remedy = "run the model once in build, or load its weights"
    return f"{names[0]} {why}; {remedy}" if names else ""


def changing_weights(tier: str, model: torch.nn.Module, again: torch.nn.Module) -> str:
    """Why no package of a tier could be kept.

    Two builds of it have other weights; "" where they have the same.
    """
    others = {name: _content(tensor) for name, tensor in _tensors(again)}
    names = [name for name, tensor in _tensors(model) if others.get(name) != _content(tensor)]
    if not names:
        return ""
    return (
        f"no package can be kept: build({tier!r}) gives other weights at every call ({listed(names, 1)});"
        " load them from a file, or call torch.manual_seed before they are drawn"
    )


def tiers_of(adapter: Adapter) -> tuple[str, ...]:
    """Those of the node's default tiers that it builds, of several with one model the first.

    Or an `AdapterError`.
    """
    found, reason = dict[str, str](), ""
    for tier in _USUAL:
        try:
            model = build_model(adapter, tier)
            shapes = [f"{name} {signature_of(tensor)}" for name, tensor in _tensors(model)]  # of any values
            found.setdefault("\n".join([*shapes, code_hash(model)]), tier)
        except Exception as error:  # the user's code: a tier that it does not have may raise anything
            reason = reason or one_line(error)
    if not found:
        raise AdapterError(
            f"{type(adapter).__name__} builds none of the tiers {', '.join(_USUAL)} ({reason}); name its"
            " own, most accurate first"
        )
    return tuple(found.values())


def _tensors(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return sorted({**dict(model.named_parameters()), **dict(model.named_buffers())}.items())


def _content(tensor: torch.Tensor) -> bytes:
    """A hash of a tensor's type, shape and values.

    Of a kind whose values cannot be read, its class counts.
    """
    if is_lazy(tensor):
        return b"not initialised"
    digest = hashlib.sha256(f"{signature_of(tensor)};".encode())
    with contextlib.suppress(RuntimeError, NotImplementedError, TypeError, AttributeError):
        for part in numbers_of(tensor.detach()):
            digest.update(part.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return digest.digest()
    return digest.digest() + name_of(type(tensor)).encode()


def code_hash(model: torch.nn.Module) -> str:
    """Hash of the structure, of the modules' attributes, and of the source files of the model's classes.

    Files that these import count as well, however deep; of an installed package its version and the
    imported file do. What cannot be named, as a class that is written in C, counts by its type: the
    comparison with eager at every load refuses a package that has become wrong in a way that no file shows.
    """
    lines, roots = list[str](), set[str]()
    for name, module in model.named_modules(remove_duplicate=False):
        kind = type(module)
        roots |= {base.__module__ for base in kind.__mro__ if isinstance(base.__module__, str)}
        # What distinguishes this module from others of its class, apart from weights and submodules.
        own = _OF_FX if isinstance(module, torch.fx.GraphModule) else OF_EVERY_MODULE
        values = {key: value for key, value in vars(module).items() if key not in own}
        values |= {key: list(vars(module)[key].values()) for key in _HOOKS if vars(module).get(key)}
        attributes = sorted(f"{key}={_described(value, roots)}" for key, value in values.items())
        lines.append(f"{name} {name_of(kind)} {attributes};")
        lines.append(_code_of(module))  # of a graph or a script, whose class is made at run time
    return _digest([*lines, *_sources(roots)])


def files_hash(kind: type) -> str:
    return _digest(_sources({base.__module__ for base in kind.__mro__ if base is not Adapter}))


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode(errors="surrogatepass")).hexdigest()


def _code_of(value: object) -> str:
    with contextlib.suppress(Exception):  # of a script without `forward`, asking for its code raises
        code = getattr(value, "code", "")
        return code if isinstance(code, str) else ""
    return ""


# one a kind
def _described(value: object, roots: set[str], within: tuple[int, ...] = ()) -> str:  # noqa: PLR0911
    """The value as text that is the same in every process; of an unknown kind its class.

    `roots` gets the names of the modules that functions and classes come from; `within` are the tables that
    the value is in, as one may hold itself.
    """
    if isinstance(value, NEVER_CHANGES):
        return repr(value)
    if isinstance(value, torch.Tensor):  # a constant that is no buffer
        return _content(value).hex()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return f"{value.dtype} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}"
    if id(value) in within:
        return "itself"
    within = (*within, id(value))
    if isinstance(value, functools.partial):
        return _described((value.func, value.args, value.keywords), roots, within)
    if isinstance(value, (tuple, list, set, frozenset)):
        items = [_described(item, roots, within) for item in value]
        return f"[{', '.join(items if isinstance(value, (tuple, list)) else sorted(items))}]"
    named = value if isinstance(value, type) or inspect.isroutine(value) else type(value)
    if isinstance(where := getattr(named, "__module__", None), str):
        roots.add(where)
    if isinstance(value, enum.Enum):
        return f"{name_of(named)}.{value.name}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        pairs = [": ".join(_described(item, roots, within) for item in pair) for pair in value.items()]
        return f"{name_of(named)}{{{', '.join(pairs)}}}"
    return name_of(named) + _code_of(value)


def name_of(value: Any) -> str:  # noqa: ANN401 - a function or a class
    """The name of a function or class with its module's, as far as it has them.

    Code in C may have neither.
    """
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"


def _sources(roots: Iterable[str]) -> list[str]:
    """A line for every source file that modules of these names come from and import, with its hash."""
    found, waiting = dict[str, str](), list(roots)
    while waiting:
        name = waiting.pop()
        top = name.partition(".")[0]
        if name in found or top in _KNOWN or name == "__main__" or not (file := _file_of(name)):
            continue
        content = file.read_bytes()
        found[name] = hashlib.sha256(content).hexdigest()
        if str(file).startswith(_INSTALLED):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found[top] = importlib.metadata.version(top)
        elif file.suffix == ".py":
            package = name if file.stem == "__init__" else name.rpartition(".")[0]
            # of this package itself only the models are followed: the rest is no model's code
            waiting += [
                one
                for one in _imports(content, package)
                if one.partition(".")[0] != _OURS or one.startswith(_OUR_MODELS)
            ]
    return [f"{name} {digest}" for name, digest in sorted(found.items())]


def _file_of(name: str) -> Path | None:
    """The file of a module, without importing it or what it lies in."""
    file, (package, _, own) = None, name.rpartition(".")
    if name in sys.modules:
        file = getattr(sys.modules[name], "__file__", None)
    elif not package:
        with contextlib.suppress(ImportError, ValueError, AttributeError):
            file = getattr(importlib.util.find_spec(name), "origin", None)
    elif (within := _file_of(package)) and within.stem == "__init__":
        candidates = (within.parent / own / "__init__.py", within.parent / f"{own}.py")
        file = next((each for each in candidates if each.is_file()), None)
    return Path(file) if file and Path(file).is_file() else None


def _imports(source: bytes, package: str) -> Iterator[str]:
    with contextlib.suppress(SyntaxError, ValueError):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = package.rsplit(".", node.level - 1)[0] if node.level else ""
                where = ".".join(filter(None, (base, node.module)))
                yield where
                file = _file_of(where)
                if file is not None and file.stem == "__init__":
                    yield from (f"{where}.{alias.name}" for alias in node.names)
