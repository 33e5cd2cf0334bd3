"""What a model is, in hashes: weights, code, signature, and the machine that a package is built for."""

import contextlib
import dataclasses
import enum
import functools
import hashlib
import inspect
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from torchperf_ros.config.build_options import INT8_PRECISIONS, INT8_STATIC, BuildOptions, installed
from torchperf_ros.config.config import STAGE_PARAMETERS
from torchperf_ros.engines.built_tier import BuiltTier, build_model
from torchperf_ros.engines.model_transforms import cpu_flags
from torchperf_ros.engines.parity import DynamicDims, signature_of
from torchperf_ros.frame.errors import AdapterError
from torchperf_ros.model.adapter import Adapter
from torchperf_ros.packages.package_manifest import Identity

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_LASTING: Final = (*_PLAIN, tuple, list, set, frozenset, dict, type, enum.Enum, functools.partial)
_KNOWN: Final = sys.stdlib_module_names | {"builtins", "numpy", "torch", "triton"}  # whose code is not followed
_INNER: Final = ("__func__", "__wrapped__", "fget", "fset", "func", "fn")  # what methods, properties, wrappers hold
_USUAL: tuple[str, ...] = tuple(next(one.default for one in STAGE_PARAMETERS if one.name == "tiers"))
_HOOKS: Final = ("_forward_pre_hooks", "_forward_hooks")
_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))
_OF_FX = frozenset(vars(torch.fx.GraphModule({}, torch.fx.Graph())))


def identify(tier: BuiltTier, options: BuildOptions, library: str = "") -> Identity:
    """The identity of the package that this model would be built into here, by an engine's library and version.

    It takes as long as hashing the weights. Options that a package does not depend on do not count.
    """
    plain = BuildOptions()
    name, capability = machine_facts(tier.device)
    return Identity(
        torch=torch.__version__,
        device=name,
        capability=capability,
        options=replace(options, mode=plain.mode, dynamic=plain.dynamic, cuda_graphs=plain.cuda_graphs).as_identity(),
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
    for tensor in (each for inputs in tier.scored_inputs() for each in inputs) if precision == INT8_STATIC else ():
        digest.update(signature_of(tensor).encode())
        digest.update(_bytes_of(tensor))
    return f"{installed(['torchao'])} {digest.hexdigest()[:16]}"


def declared_dims(dynamic_dims: DynamicDims) -> list[list[int]]:
    """As manifests hold them: [input, dimension, smallest, largest]."""
    return [[i, dim, *span] for i, dims in sorted(dynamic_dims.items()) for dim, span in sorted(dims.items())]


def machine_facts(device: torch.device) -> tuple[str, str]:
    """The CUDA device's name and compute capability, or `cpu`, its vector instructions and a hash of all its flags."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return torch.cuda.get_device_name(device), f"{major}.{minor}"
    # packages are compiled with `-march=native`: another CPU may not know all of their instructions
    flags = hashlib.sha256(" ".join(sorted(cpu_flags())).encode()).hexdigest()[:8]
    return "cpu", f"{torch.backends.cpu.get_cpu_capability()} flags {flags}"


def weights_hash(model: torch.nn.Module) -> str:
    """Hash of every parameter and buffer: name, type, shape and values."""
    digest = hashlib.sha256()
    for name, tensor in _tensors(model):
        digest.update(f"{name} {signature_of(tensor)};".encode())
        digest.update(_bytes_of(tensor))
    return digest.hexdigest()


def changing_weights(tier: str, model: torch.nn.Module, again: torch.nn.Module) -> str:
    """Why no package of a tier could be kept: two builds of it have other weights; "" where they have the same."""
    others = {name: _bytes_of(tensor) for name, tensor in _tensors(again)}
    names = [n for n, t in _tensors(model) if n not in others or not np.array_equal(_bytes_of(t), others[n])]
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return "" if not names else (
        f"no package can be kept: build({tier!r}) gives other weights at every call ({names[0]}{more});"
        " load them from a file, or call torch.manual_seed before they are drawn"
    )  # fmt: skip


def tiers_of(adapter: Adapter) -> tuple[str, ...]:
    """Those of the node's default tiers that it builds, of several with one model the first; or an `AdapterError`."""
    found: dict[str, str] = {}
    reason = ""
    for tier in _USUAL:
        try:
            model = build_model(adapter, tier)
            shapes = [f"{name} {signature_of(tensor)}" for name, tensor in _tensors(model)]  # of any values
            found.setdefault("\n".join([*shapes, code_hash(model)]), tier)
        except Exception as error:  # the user's code: a tier that it does not have may raise anything
            reason = reason or f"{type(error).__name__}: {error}"
    if not found:
        raise AdapterError(
            f"{type(adapter).__name__} builds none of the tiers {', '.join(_USUAL)} ({reason}); name its own, most"
            " accurate first"
        )
    return tuple(found.values())


def _tensors(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return sorted({**dict(model.named_parameters()), **dict(model.named_buffers())}.items())


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def code_hash(model: torch.nn.Module) -> str:
    """Hash of the structure, of the modules' attributes, and of the code that runs.

    The code is the source of all methods of the modules' classes and bases, and of every function, class and constant
    that these name, however deep: an edit elsewhere in a file, as in `postprocess`, changes nothing. What code reaches
    by no name (a function looked up by a string, an operator in C++) is not seen; there the comparison with eager at
    every load refuses a package that has become wrong.
    """
    reached, lines = _Code(), []
    for name, module in model.named_modules(remove_duplicate=False):
        kind = type(module)
        lines.append(f"{name} {_name(kind)} {reached.attributes(module)};")
        if isinstance(module, torch.fx.GraphModule):  # its class is made at run time: the code is in the graph
            lines.append(module.code)
        reached.follow(kind)
    return hashlib.sha256("\n".join([*lines, *sorted(reached.found)]).encode()).hexdigest()


def files_hash(kind: type) -> str:
    """Hash of the files of an adapter's class and its bases, without those of torch, Python and `Adapter` itself."""
    files = set()
    for base in kind.__mro__:
        with contextlib.suppress(TypeError, OSError):  # a class made at run time has no file
            files.add("" if _is_known(base) or base is Adapter else inspect.getsourcefile(base) or "")
    return hashlib.sha256(b"".join(Path(file).read_bytes() for file in sorted(filter(None, files)))).hexdigest()


class _Code:
    """Follows code from name to name; `found` has a line for each function, and each constant that one names."""

    def __init__(self) -> None:
        self.found: set[str] = set()
        self._seen: dict[int, object] = {}  # the objects too: the number of one that is gone is given to another

    def attributes(self, module: torch.nn.Module) -> list[str]:
        """What distinguishes this module from others of its class, apart from weights and submodules."""
        own = _OF_FX if isinstance(module, torch.fx.GraphModule) else _OF_EVERY_MODULE
        values = {key: value for key, value in vars(module).items() if key not in own}
        hooks = {key: list(vars(module)[key].values()) for key in _HOOKS if vars(module)[key]}
        return sorted(f"{key}={self._described(value)}" for key, value in {**values, **hooks}.items())

    def follow(self, value: object) -> None:
        """Take in the code behind a value: a function, what wraps one, a class, or the class of an object."""
        if isinstance(value, types.FunctionType):
            if self._is_new(value):
                self._function(value)
        elif isinstance(value, type):
            for kind in value.__mro__:
                if self._is_new(kind):
                    self._class(kind)
        else:
            if _is_known(type(value)):
                for name in _INNER:
                    if callable(inner := getattr(value, name, None)):
                        self.follow(inner)
            self.follow(type(value))

    def _is_new(self, value: Any) -> bool:  # noqa: ANN401 - a function or a class
        if _is_known(value) or id(value) in self._seen:
            return False
        self._seen[id(value)] = value
        return True

    def _function(self, function: types.FunctionType) -> None:
        codes = [function.__code__]
        for code in codes:  # it grows: functions within it are among its constants
            codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
        try:
            text = inspect.getsource(function.__code__)  # of a function itself, it would be that of what it wraps
        except OSError:  # it was made at run time
            constants = [each for code in codes for each in code.co_consts if not isinstance(each, types.CodeType)]
            text = f"{[(code.co_code, code.co_names) for code in codes]} {self._described(constants)}"
        given = [function.__defaults__, function.__kwdefaults__]
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # an empty one
                given.append(cell.cell_contents)
        self.found.add(f"{_name(function)} {self._described(given, shared=True)}\n{text}")
        names = {name for code in codes for name in code.co_names}
        self._named(names, function.__globals__, function.__module__, {id(function.__globals__)})

    def _named(self, names: set[str], space: dict[str, Any], where: str, seen: set[int]) -> None:
        for name in names & space.keys():
            value = space[name]
            if not isinstance(value, types.ModuleType):
                self.found.add(f"{where}.{name}={self._described(value, shared=True)}")
            elif not _is_known(value) and id(vars(value)) not in seen:
                self._named(names, vars(value), value.__name__, seen | {id(vars(value))})

    def _class(self, kind: type) -> None:
        for name, member in vars(kind).items():
            is_code = inspect.isroutine(member)
            # what a module's `__init__` comes to is in its attributes and weights
            if (name == "__init__" and issubclass(kind, torch.nn.Module)) or (name.startswith("__") and not is_code):
                continue
            self.found.add(f"{_name(kind)}.{name}={self._described(member, shared=True)}")

    def _described(self, value: object, *, shared: bool = False, within: tuple[int, ...] = ()) -> str:
        """The value as text that is the same in every process, with its code followed; of an unknown kind its class.

        Of `shared` tables, which no model has to itself, tensors and objects are left out: one may be a cache, which
        is filled as models run. `within` are the tables that the value is in.
        """
        if isinstance(value, _PLAIN):
            return repr(value)
        if isinstance(value, (torch.Tensor, np.ndarray)):  # a constant that is no buffer
            content = _bytes_of(value) if isinstance(value, torch.Tensor) else value.tobytes()
            return f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(content).hexdigest()}"
        if id(value) in within:
            return "itself"
        if isinstance(value, functools.partial):
            value = (value.func, value.args, value.keywords)
        within = (*within, id(value))
        if isinstance(value, (tuple, list, set, frozenset)):
            items = [self._described(i, shared=shared, within=within) for i in value if not shared or _is_lasting(i)]
            return f"[{', '.join(items if isinstance(value, (tuple, list)) else sorted(items))}]"
        self.follow(value)
        name = _name(value if isinstance(value, type) or inspect.isroutine(value) else type(value))
        name += f".{value.name}" if isinstance(value, enum.Enum) else ""
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        if isinstance(value, dict):
            pairs = [pair for pair in value.items() if not shared or _is_lasting(pair[1])]
            items = [": ".join(self._described(i, shared=shared, within=within) for i in pair) for pair in pairs]
            return f"{name}{{{', '.join(sorted(items) if shared else items)}}}"
        return name


def _is_known(value: Any) -> bool:  # noqa: ANN401 - a module, or something with `__module__`
    name = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
    return str(name or "builtins").partition(".")[0] in _KNOWN


def _is_lasting(value: object) -> bool:
    return isinstance(value, _LASTING) or inspect.isroutine(value)


def _name(value: Any) -> str:  # noqa: ANN401 - a function or a class
    return f"{value.__module__}.{getattr(value, '__qualname__', type(value).__qualname__)}"
