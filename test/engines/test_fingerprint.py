import dataclasses
import functools
import importlib.util
import sys
import threading

import numpy as np
import PIL.Image
import pytest
import scipy.spatial
import torch
import zstandard

from torchperf_ros.engines.built_tier import BuiltTier
from torchperf_ros.engines.fingerprint import code_hash, identify, machine_facts, weights_hash
from torchperf_ros.settings.build_options import BuildOptions

CPU = torch.device("cpu")
OPTIONS = BuildOptions("aoti")


@dataclasses.dataclass
class Settings:
    scale: float = 1.0
    names: tuple = ("a",)

    @functools.cached_property
    def both(self):
        return self.scale, self.names


class Net(torch.nn.Module):
    def __init__(self, **attributes):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        self.register_buffer("offset", torch.zeros(2))
        self.register_buffer("hidden", torch.zeros(2), persistent=False)
        values = {
            "_factor": 2.0,
            "mode": "nearest",
            "sizes": (1, [2, 3]),
            "by_name": {"a": 1},
            "names": {"a", "b", "c"},
            "anchors": torch.arange(3.0),
            "table": np.arange(3),
            "dtype": torch.float32,
            "settings": Settings(),
            "act": torch.relu,
            "kind": torch.nn.ReLU,
            "empty": torch.zeros(0),
            "other": object(),
            **attributes,
        }
        for name, value in values.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.second(self.act(self.first(x))) + self.offset


# never written to
def key_of(model, options=OPTIONS, example=(torch.zeros(1, 2),), dims=None):  # noqa: B008
    return identify(BuiltTier(model, example, dims or {}, CPU), options).key


def changed(change):
    model = Net()
    with torch.no_grad():
        change(model)
    return model


def test_given_the_same_model_twice_when_identified_then_the_key_is_the_same():
    assert key_of(Net()) == key_of(Net())
    assert key_of(Net().eval()) == key_of(Net().train())
    with torch.inference_mode():
        made_there = Net()
    assert key_of(made_there) == key_of(Net())


def test_given_the_same_model_in_another_process_when_identified_then_the_key_is_the_same(python):
    code = f"""
import importlib.util, sys, torch
torch.set_num_threads({torch.get_num_threads()})
spec = importlib.util.spec_from_file_location({__name__!r}, {__file__!r})
sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(module.key_of(module.Net()))
"""
    assert python(code, PYTHONHASHSEED="1").strip() == key_of(Net())  # here it is another


ATTRIBUTES = {
    "_factor": 2.5,
    "mode": "bilinear",
    "sizes": (1, [2, 4]),
    "by_name": {"a": 2},
    "names": {"a", "b", "d"},
    "anchors": torch.arange(1.0, 4.0),
    "table": np.arange(1, 4),
    "dtype": torch.float16,
    "settings": Settings(1.5),
    "act": torch.sigmoid,
    "kind": torch.nn.GELU,
    "more": 0,
}


TABLE = [1]
TABLE.append({"table": TABLE})  # it holds itself
ATTRIBUTES["by_itself"] = TABLE


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_given_another_attribute_when_identified_then_the_key_is_another(name):
    assert code_hash(Net(**{name: ATTRIBUTES[name]})) != code_hash(Net())


CHANGES = {
    "one weight": lambda m: m.first.weight[0, 0].add_(1e-6),
    "a buffer": lambda m: m.offset[0].add_(1.0),
    "a buffer that is not saved": lambda m: m.hidden[0].add_(1.0),
    "precision": lambda m: m.half(),
    "weights exchanged": lambda m: (m.first, m.second) and setattr(m, "first", m.second),
    "a layer more": lambda m: m.add_module("third", torch.nn.Identity()),
    "a layer's kind": lambda m: m.add_module("second", torch.nn.Identity()),
}


@pytest.mark.parametrize("what", CHANGES)
def test_given_a_change_when_identified_then_the_key_is_another(what):
    assert key_of(changed(CHANGES[what])) != key_of(Net())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.complex64])
def test_given_buffers_of_any_type_and_layout_when_hashed_then_their_values_count(dtype):
    def model(values):
        made = torch.nn.Module()
        made.register_buffer("b", torch.tensor(values).to(dtype).T)
        made.register_buffer("scalar", torch.tensor(1).to(dtype))
        made.register_buffer("empty", torch.zeros(0, 3, dtype=dtype))
        return made

    assert weights_hash(model([[0, 1], [0, 0]])) != weights_hash(model([[0, 0], [1, 0]]))
    assert weights_hash(model([[0, 1], [0, 0]])) == weights_hash(model([[0, 1], [0, 0]]))


@pytest.mark.parametrize(
    "other",
    [
        {"options": BuildOptions("aoti", precision="bf16")},
        {"example": (torch.zeros(2, 2),)},
        {"dims": {0: {0: (1, 8)}}},
    ],
)
def test_given_other_options_inputs_or_ranges_when_identified_then_the_key_is_another(other):
    assert key_of(Net(), **other) != key_of(Net())
    assert key_of(
        Net(),
        dataclasses.replace(OPTIONS, **{"mode": "max-autotune", "cuda_graphs": True, "dynamic": "never"}),
    ) == key_of(Net())


def test_given_a_cpu_with_other_instructions_when_asked_then_its_capability_is_another(monkeypatch):
    before = machine_facts(CPU)
    monkeypatch.setattr("torchperf_ros.engines.fingerprint.cpu_flags", lambda: frozenset({"avx2"}))
    assert machine_facts(CPU)[0] == before[0] == "cpu"
    assert machine_facts(CPU)[1] != before[1]


OPERATIONS = """
def shifted(x):
    return x + 10
"""
BASE = """
import torch
class Base(torch.nn.Module):
    FACTOR = 31
"""
SEGMENTER = """
def lazily(x):
    from fingerprinted.operations import shifted
    return shifted(x)
"""
NET = """
from . import segmenter
from .base import Base
class Net(Base):
    def forward(self, x):
        return segmenter.lazily(x) * self.FACTOR
"""
FILES = {
    "__init__": "",
    "operations": OPERATIONS,
    "base": BASE,
    "segmenter": SEGMENTER,
    "net": NET,
    "unused": "A = 12\n",
}


def code_of(folder, edited=""):
    """The hash of the model above, of a package with a comment more in one of its files."""
    package = folder / "fingerprinted"
    package.mkdir(exist_ok=True)
    for name, source in FILES.items():
        (package / f"{name}.py").write_text(
            source + ("# edited\n" if name == edited else ""), encoding="utf-8"
        )
    for name in [name for name in sys.modules if name.partition(".")[0] == "fingerprinted"]:
        del sys.modules[name]
    return code_hash(importlib.import_module("fingerprinted.net").Net())


@pytest.mark.parametrize("name", ["operations", "base", "segmenter", "net"])
def test_given_an_edit_in_a_file_that_the_model_comes_from_when_identified_then_the_key_is_another(
    tmp_path, name, monkeypatch
):
    monkeypatch.syspath_prepend(tmp_path)
    before = code_of(tmp_path)
    assert code_of(tmp_path) == code_of(tmp_path, "unused") == before
    assert code_of(tmp_path, name) != before


def test_given_files_that_are_imported_later_when_identified_then_they_count_and_nothing_is_imported(
    tmp_path, monkeypatch
):
    """What a module imports when it is asked to may be a large library, or fail."""
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / "lately"
    (package / "heavy").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "net.py").write_text(
        "import torch\n\nclass Net(torch.nn.Module):\n    def forward(self, x):\n"
        "        from lately.heavy import part\n        return part(x)\n"
    )
    (package / "heavy" / "__init__.py").write_text("raise RuntimeError('it was imported')\n")
    part = package / "heavy" / "part.py"
    part.write_text("A = 1\n")
    net, before = importlib.import_module("lately.net").Net(), set(sys.modules)
    first = code_hash(net)
    assert set(sys.modules) == before
    part.write_text("A = 2\n")
    assert code_hash(net) != first


@torch.jit.script
def scripted(x):
    return x * 1.5


OF_C = {
    "a method of C": str.join, "a slot of C": object.__init__, "a scripted function": scripted, "a ufunc": np.sin,
    "a lock": threading.Lock(), "an image": PIL.Image.new("L", (2, 2)),
    "a library's object": zstandard.ZstdDecompressor(),
    "a tree": scipy.spatial.cKDTree(np.zeros((3, 2))),
    "objects": np.array([object()]), "a slice": slice(1),
    "a sparse tensor": torch.eye(2).to_sparse(),
    "a nested one": lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
    "a class": zstandard.ZstdDecompressor,
}  # fmt: skip
"""What is held, but for the nested tensor, which is made when it is wanted: it imports torch's compiler."""


@pytest.mark.parametrize("what", OF_C)
def test_given_what_is_written_in_c_when_identified_then_it_counts_by_what_can_be_named(what):
    held = OF_C[what]() if what == "a nested one" else OF_C[what]
    assert key_of(Net(held=held)) == key_of(Net(held=held)) != key_of(Net())


class Refuses(torch.nn.Linear):
    def state_dict(self, *args, **kwargs):
        raise RuntimeError("no state for you")


MODULES = {
    "refuses its state": lambda scale: Refuses(2, scale),
    "scripted": lambda scale: torch.jit.script(torch.nn.Sequential(torch.nn.Linear(2, scale))),
    "quantised": lambda scale: torch.ao.nn.quantized.dynamic.Linear.from_float(quantisable(scale)),
    "not initialised": torch.nn.LazyLinear,
    "sparse": lambda scale: with_buffer(torch.eye(2).to_sparse() * scale),
    "compressed": lambda scale: with_buffer(torch.eye(2).to_sparse_csr() * scale),
    "quantised buffer": lambda scale: with_buffer(
        torch.quantize_per_tensor(torch.ones(2) * scale, 0.1, 0, torch.qint8)
    ),
}


def quantisable(scale):
    layer = torch.nn.Linear(2, 2)
    torch.nn.init.constant_(layer.weight, scale)
    torch.nn.init.zeros_(layer.bias)
    layer.qconfig = torch.ao.quantization.default_dynamic_qconfig
    return layer


def with_buffer(tensor):
    module = torch.nn.Module()
    module.register_buffer("held", tensor)
    return module


@pytest.mark.parametrize("kind", MODULES)
def test_given_modules_whose_weights_are_no_plain_tensors_when_identified_then_their_values_count(kind):
    def made(scale):
        torch.manual_seed(0)
        return MODULES[kind](scale)

    assert key_of(made(2)) == key_of(made(2)) != key_of(made(3))


def test_given_exported_programs_with_other_operations_when_identified_then_the_keys_differ():
    def exported(operation):
        return torch.export.export(torch.nn.Sequential(operation), (torch.zeros(2),)).module()

    assert key_of(exported(torch.nn.ReLU())) == key_of(exported(torch.nn.ReLU()))
    assert key_of(exported(torch.nn.ReLU())) != key_of(exported(torch.nn.GELU()))
