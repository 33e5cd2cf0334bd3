import dataclasses
import functools
import importlib.util
import linecache
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from torchperf_ros.config.build_options import BuildOptions
from torchperf_ros.engines.built_tier import BuiltTier
from torchperf_ros.engines.fingerprint import code_hash, identify, machine_facts, weights_hash

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
            "_factor": 2.0, "mode": "nearest", "sizes": (1, [2, 3]), "by_name": {"a": 1}, "names": {"a", "b", "c"},
            "anchors": torch.arange(3.0), "table": np.arange(3), "dtype": torch.float32, "settings": Settings(),
            "act": torch.relu, "kind": torch.nn.ReLU, "empty": torch.zeros(0), "other": object(), **attributes,
        }  # fmt: skip
        for name, value in values.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.second(self.act(self.first(x))) + self.offset


def key_of(model, options=OPTIONS, example=(torch.zeros(1, 2),), dims=None):  # noqa: B008 - never written to
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


def test_given_the_same_model_in_another_process_when_identified_then_the_key_is_the_same():
    code = f"""
import importlib.util, sys, torch
torch.set_num_threads({torch.get_num_threads()})
spec = importlib.util.spec_from_file_location({__name__!r}, {__file__!r})
sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(module.key_of(module.Net()))
"""
    environment = {**os.environ, "PYTHONHASHSEED": "1"}  # here it is another
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == key_of(Net())


ATTRIBUTES = {
    "_factor": 2.5, "mode": "bilinear", "sizes": (1, [2, 4]), "by_name": {"a": 2}, "names": {"a", "b", "d"},
    "anchors": torch.arange(1.0, 4.0), "table": np.arange(1, 4), "dtype": torch.float16, "settings": Settings(1.5),
    "act": torch.sigmoid, "kind": torch.nn.GELU, "more": 0,
}  # fmt: skip


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
    unimportant = {"mode": "max-autotune", "cuda_graphs": True, "dynamic": "always"}
    assert key_of(Net(), dataclasses.replace(OPTIONS, **unimportant)) == key_of(Net())


def test_given_a_cpu_with_other_instructions_when_asked_then_its_capability_is_another(monkeypatch):
    before = machine_facts(CPU)
    monkeypatch.setattr("torchperf_ros.engines.fingerprint.cpu_flags", lambda: frozenset({"avx2"}))
    assert machine_facts(CPU)[0] == before[0] == "cpu"
    assert machine_facts(CPU)[1] != before[1]


def load(folder, name, source):
    path = folder / f"{name}.py"
    path.write_text(source, encoding="utf-8")
    linecache.clearcache()  # it takes a file of the same size and age for the same
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    exec(compile(source, path, "exec"), module.__dict__)  # the loader, too: it has compiled that one already
    return module


OPERATIONS = """
def imported(x):
    return x + 10
def through_the_module(x):
    return x + 11
def unused(x):
    return x + 12
"""
SEGMENTER = """
import functools
import torch
import fingerprinted_operations as operations
from fingerprinted_operations import imported
OFFSET, TABLE, KINDS, cache = 20, [1, {"b": 21}], {"a": lambda x: x + 22}, {}
def twice(function):
    @functools.wraps(function)
    def inner(x):
        return function(x) + 23
    return inner
@twice
def wrapped(x):
    return x + 24
@functools.lru_cache
def remembered(x):
    return x + 25
def default(x, by=26):
    return [x + 27 for _ in range(by)]
def hook(module, inputs):
    return inputs[0] + 28
def not_called(x):
    return x + 29
class Scale:
    def __init__(self):
        self.by = 30
    def __call__(self, x):
        return x * self.by
class Base(torch.nn.Module):
    FACTOR = 31
class Net(Base):
    def __init__(self):
        super().__init__()
        self.size = 1 + len("a comment: 40")
        self.scale, self.part = Scale(), functools.partial(default, by=32)
        self.register_forward_pre_hook(hook)
    @property
    def shift(self):
        return 33
    @staticmethod
    def still(x):
        return x + 34
    def forward(self, x):
        cache[tuple(x.shape)] = x
        x = self.scale(self.still(imported(operations.through_the_module(x)))) + self.shift + self.FACTOR
        return KINDS["a"](wrapped(remembered(x))) + OFFSET + TABLE[0] + 35
class Adapter:
    def postprocess(self, outputs):
        return outputs + 43
"""
SEEN = {"10": OPERATIONS, "11": OPERATIONS, **{str(number): SEGMENTER for number in range(20, 36) if number != 29}}


def code_of(folder, number=None):
    """The hash of the model above with this number in its files exchanged for another one."""
    sources = [text.replace(number, "99") if number else text for text in (OPERATIONS, SEGMENTER)]
    load(folder, "fingerprinted_operations", sources[0])
    module = load(folder, "fingerprinted_segmenter", sources[1])
    return module, module.Net()


@pytest.mark.parametrize("number", SEEN)
def test_given_other_code_that_the_model_reaches_when_identified_then_the_key_is_another(tmp_path, number):
    assert number in SEEN[number]
    assert code_hash(code_of(tmp_path, number)[1]) != code_hash(code_of(tmp_path)[1])


@pytest.mark.parametrize("number", ["12", "29", "40", "43"])
def test_given_an_edit_beside_the_model_as_in_postprocess_when_identified_then_the_key_is_the_same(tmp_path, number):
    assert number in OPERATIONS + SEGMENTER
    assert code_hash(code_of(tmp_path, number)[1]) == code_hash(code_of(tmp_path)[1])


def test_given_a_cache_that_fills_as_the_model_runs_when_identified_then_the_key_is_the_same(tmp_path):
    module, model = code_of(tmp_path)
    before = code_hash(model)
    model(torch.zeros(2))
    assert module.cache
    assert code_hash(model) == before


def test_given_exported_programs_with_other_operations_when_identified_then_the_keys_differ():
    def exported(operation):
        return torch.export.export(torch.nn.Sequential(operation), (torch.zeros(2),)).module()

    assert key_of(exported(torch.nn.ReLU())) == key_of(exported(torch.nn.ReLU()))
    assert key_of(exported(torch.nn.ReLU())) != key_of(exported(torch.nn.GELU()))


def test_given_code_without_a_file_when_identified_then_it_counts_all_the_same():
    def made(constant):
        exec(f"def forward(self, x): return [x + {constant} for _ in range(2)]", names := {"__name__": "nowhere"})
        return type("Made", (torch.nn.Module,), {"__module__": "nowhere", "forward": names["forward"]})()

    assert code_hash(made(1)) == code_hash(made(1)) != code_hash(made(2))
