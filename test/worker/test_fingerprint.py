import dataclasses
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from torchperf_ros.core.build_options import BuildOptions
from torchperf_ros.worker.fingerprint import code_hash, identify, machine_facts, signature_of, weights_hash

CPU = torch.device("cpu")
OPTIONS = BuildOptions("aoti")


@dataclasses.dataclass
class Settings:
    scale: float = 1.0
    names: tuple = ("a",)


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
    return identify(model, options, example, dims or {}, CPU).key


def changed(change):
    model = Net()
    with torch.no_grad():
        change(model)
    return model


def test_given_the_same_model_twice_when_identified_then_the_key_is_the_same():
    assert key_of(Net()) == key_of(Net())
    assert key_of(Net().eval()) == key_of(Net().train())


def test_given_the_same_model_in_other_processes_when_identified_then_the_key_is_the_same():
    code = f"import sys; sys.path[:0] = [{str(Path(__file__).parent)!r}]; import {Path(__file__).stem} as t; "
    command = [sys.executable, "-c", f"{code}print(t.key_of(t.Net()))"]
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONHASHSEED": seed})
        for seed in "12"
    ]
    first, second = [process.communicate()[0] for process in started]
    assert len(first) == 33
    assert first == second


ATTRIBUTES = {
    "_factor": 2.5, "mode": "bilinear", "sizes": (1, [2, 4]), "by_name": {"a": 2}, "names": {"a", "b", "d"},
    "anchors": torch.arange(1.0, 4.0), "table": np.arange(1, 4), "dtype": torch.float16, "settings": Settings(1.5),
    "act": torch.sigmoid, "kind": torch.nn.GELU, "more": 0,
}  # fmt: skip


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_given_another_attribute_when_identified_then_the_key_is_another(name):
    assert code_hash(Net(**{name: ATTRIBUTES[name]})) != code_hash(Net())


CHANGES = {
    "one weight": lambda m: m.first.weight[0, 0].add_(1e-6),
    "a buffer": lambda m: m.offset[0].add_(1.0),
    "a buffer that is not saved": lambda m: m.hidden[0].add_(1.0),
    "the sign of a zero": lambda m: m.offset[0].copy_(torch.tensor(-0.0)),
    "precision": lambda m: m.half(),
    "weights exchanged": lambda m: (m.first, m.second) and setattr(m, "first", m.second),
    "a layer more": lambda m: m.add_module("third", torch.nn.Identity()),
    "a layer's kind": lambda m: m.add_module("second", torch.nn.Identity()),
}


@pytest.mark.parametrize("what", CHANGES)
def test_given_a_change_when_identified_then_the_key_is_another(what):
    assert key_of(changed(CHANGES[what])) != key_of(Net())


def test_given_weights_of_one_shape_for_another_when_hashed_then_the_hash_is_another():
    one, other = torch.nn.Linear(2, 3, bias=False), torch.nn.Linear(3, 2, bias=False)
    other.weight.data = one.weight.data.reshape(2, 3)
    assert weights_hash(one) != weights_hash(other)


def tied(first, second):
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList([torch.nn.Linear(2, 2, bias=False) for _ in range(3)])
    with torch.no_grad():
        for layer in model.layers:
            layer.weight.fill_(1.0)
    model.layers[second].weight = model.layers[first].weight
    model.register_buffer("one", torch.ones(1))
    model.register_buffer("same", model.one)
    return model


def test_given_tied_parameters_and_buffers_when_hashed_then_it_works_and_the_same_ties_give_the_same():
    assert weights_hash(tied(0, 1)) == weights_hash(tied(0, 1))
    assert code_hash(tied(0, 1)) == code_hash(tied(0, 1))


def test_given_one_module_in_two_places_when_hashed_then_both_places_count():
    shared, alone = torch.nn.Sequential(torch.nn.ReLU()), torch.nn.Sequential(torch.nn.ReLU())
    shared.append(shared[0])
    assert code_hash(shared) != code_hash(alone)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float64])
def test_given_buffers_of_any_type_and_layout_when_hashed_then_their_values_count(dtype):
    def model(values):
        made = torch.nn.Module()
        made.register_buffer("b", torch.tensor(values).to(dtype).T)
        made.register_buffer("scalar", torch.tensor(1).to(dtype))
        made.register_buffer("empty", torch.zeros(0, 3, dtype=dtype))
        return made

    assert weights_hash(model([[0, 1], [0, 0]])) != weights_hash(model([[0, 0], [1, 0]]))
    assert weights_hash(model([[0, 1], [0, 0]])) == weights_hash(model([[0, 1], [0, 0]]))


def test_given_weights_made_in_inference_mode_when_hashed_then_it_is_the_same_as_without():
    with torch.inference_mode():
        model = Net()
    assert key_of(model) == key_of(Net())


@pytest.mark.parametrize(
    "other",
    [
        {"options": BuildOptions("aoti", precision="bf16")},
        {"options": BuildOptions("aoti", fold_batch_norm=True)},
        {"example": (torch.zeros(2, 2),)},
        {"example": (torch.zeros(1, 2, dtype=torch.float16),)},
        {"example": (torch.zeros(1, 2), torch.zeros(1))},
        {"dims": {0: {0: (1, 8)}}},
    ],
)
def test_given_other_options_inputs_or_ranges_when_identified_then_the_key_is_another(other):
    assert key_of(Net(), **other) != key_of(Net())


@pytest.mark.parametrize("more", [{"mode": "max-autotune"}, {"cuda_graphs": True}, {"dynamic": "always"}])
def test_given_options_that_a_package_does_not_depend_on_when_identified_then_the_key_is_the_same(more):
    assert key_of(Net(), dataclasses.replace(OPTIONS, **more)) == key_of(Net())


@pytest.mark.parametrize("what", ["device", "capability"])
def test_given_another_machine_when_identified_then_the_key_is_another(monkeypatch, what):
    before, facts = key_of(Net()), dict(zip(("device", "capability"), machine_facts(CPU), strict=True))
    monkeypatch.setattr(
        "torchperf_ros.worker.fingerprint.machine_facts", lambda device: tuple({**facts, what: "x"}.values())
    )
    assert key_of(Net()) != before


def test_given_another_torch_when_identified_then_the_key_is_another(monkeypatch):
    before = key_of(Net())
    monkeypatch.setattr(torch, "__version__", "9.9")
    assert key_of(Net()) != before


def test_given_a_cpu_with_other_instructions_when_asked_then_its_capability_is_another(monkeypatch):
    before = machine_facts(CPU)
    monkeypatch.setattr("torchperf_ros.worker.fingerprint.cpu_flags", lambda: frozenset({"avx2"}))
    assert machine_facts(CPU)[0] == before[0] == "cpu"
    assert machine_facts(CPU)[1] != before[1]


MODULE = """
import torch
{above}
class Base(torch.nn.Module):
    def forward(self, x):
        return x * {factor}
"""


def load(folder, name, source):
    path = folder / f"{name}.py"
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("inherited", [False, True])
def test_given_other_code_in_a_class_or_its_base_when_identified_then_the_key_is_another(
    tmp_path, monkeypatch, inherited
):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    hashes = []
    for factor in (2, 2, 3):
        cls = load(tmp_path, "fingerprinted_base", MODULE.format(above="", factor=factor)).Base
        if inherited:
            source = "from fingerprinted_base import Base\nclass Net(Base):\n    pass\n"
            cls = load(tmp_path, "fingerprinted_net", source).Net
        hashes.append(code_hash(torch.nn.Sequential(cls())))
        sys.modules.pop("fingerprinted_base")
    assert hashes[0] == hashes[1] != hashes[2]


def test_given_exported_programs_with_other_operations_when_identified_then_the_keys_differ():
    def exported(operation):
        return torch.export.export(torch.nn.Sequential(operation), (torch.zeros(2),)).module()

    assert key_of(exported(torch.nn.ReLU())) == key_of(exported(torch.nn.ReLU()))
    assert key_of(exported(torch.nn.ReLU())) != key_of(exported(torch.nn.GELU()))


def test_given_a_class_without_a_file_when_identified_then_it_is_by_its_structure():
    made = type("Made", (torch.nn.Module,), {"__module__": "nowhere"})
    assert code_hash(made()) == code_hash(made())


def test_given_tensors_when_described_then_type_and_shape_are_said():
    assert signature_of(torch.zeros(1, 3, 8)) == "float32 1x3x8"
    assert signature_of(torch.tensor(1)) == "int64 scalar"
