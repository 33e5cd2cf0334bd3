"""Models that keep something between calls are as their build gave them, after any number of runs."""

import collections
import contextlib
import dataclasses
import random
import threading

import numpy as np
import pytest
import torch

from torchperf_ros.engines.outputs import flat_numbers
from torchperf_ros.engines.parity import KeptState, ParityError, check_engine, depends_on_state


class Keeping(torch.nn.Module):
    """A layer with whatever a kind keeps; `step` changes it and gives what the answer depends on."""

    def __init__(self, kept, step):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.lock, self._step = torch.nn.Linear(4, 4), threading.Lock(), step
        if isinstance(kept, torch.Tensor) and kept.dim() == 1:
            self.register_buffer("kept", kept)
        else:
            self.kept = kept

    def forward(self, x):
        return self.layer(x) + self._step(self, x)


@dataclasses.dataclass(slots=True)
class Track:
    age: int = 0


class Tracker:
    def __init__(self):
        self.tracks, self.itself = [Track()], self


def counted(held):
    held.age += 1
    return held.age


def rebound(module, x):
    module.kept = module.kept + x.mean()
    return module.kept


def smoothed(module, x):
    """The first call begins with its own input, so that one input again and again shows nothing."""
    module.kept = x if module.kept is None else 0.9 * module.kept + 0.1 * x
    return module.kept


def grown(module, x):
    module.grown = getattr(module, "grown", 0) + 1
    return module.grown


def registered(module, x):
    if not hasattr(module, "more"):
        module.register_buffer("more", torch.zeros(4))
    return module.more.add_(x.mean()).clone()


KINDS = {
    "a buffer in place": (lambda: torch.zeros(4), lambda m, x: m.kept.add_(x.mean()).clone()),
    "a buffer anew": (lambda: torch.zeros(4), rebound),
    "a tensor": (lambda: torch.zeros(1, 4), rebound),
    "a list": (list, lambda m, x: m.kept.append(x.mean()) or sum(m.kept)),
    "a deque": (lambda: collections.deque(maxlen=3), lambda m, x: m.kept.append(x.mean()) or sum(m.kept)),
    "a dict": (dict, lambda m, x: m.kept.update(n=m.kept.get("n", 0) + 1) or m.kept["n"]),
    "an array": (lambda: np.zeros(1), lambda m, x: m.kept.__iadd__(1)[0]),
    "a number": (lambda: 0, lambda m, x: setattr(m, "kept", m.kept + 1) or m.kept),
    "nothing yet": (lambda: None, smoothed),
    "an attribute more": (lambda: None, grown),
    "a buffer more": (lambda: None, registered),
    "slots": (Track, lambda m, x: counted(m.kept)),
    "an object that holds itself": (Tracker, lambda m, x: counted(m.kept.tracks[0])),
    "a generator of torch": (
        lambda: torch.Generator().manual_seed(1),
        lambda m, x: torch.rand(1, generator=m.kept),
    ),
    "a generator of Python": (lambda: random.Random(1), lambda m, x: m.kept.random()),
    "a generator of numpy": (lambda: np.random.default_rng(1), lambda m, x: m.kept.random()),
}
FIRST, SECOND = torch.linspace(-1.0, 2.0, 4)[None], torch.linspace(0.0, 3.0, 4)[None]


@pytest.mark.parametrize("kind", KINDS)
def test_given_a_model_that_keeps_something_when_restored_then_it_answers_as_at_first(kind):
    make, step = KINDS[kind]
    model = Keeping(make(), step).eval()
    kept = KeptState(model)
    assert not kept.has_changed
    answers = []
    for _ in range(2):
        with torch.inference_mode():
            answers.append(model(FIRST).clone())
            model(FIRST)
            outputs = model(SECOND)
            assert kept.has_changed
            name = {"an attribute more": "grown", "a buffer more": "more"}.get(kind, "kept")
            assert depends_on_state(model, kept, (SECOND,), outputs) == [name]
        assert not kept.has_changed
    assert torch.equal(*answers)


def test_given_a_buffer_when_restored_then_it_is_the_same_memory():
    make, step = KINDS["a buffer anew"]
    model = Keeping(make(), step)
    memory, kept = model.kept, KeptState(model)
    model(FIRST)
    kept.restore()
    assert model.kept is memory
    assert memory.tolist() == [0.0] * 4


def test_given_a_table_that_changes_no_answer_when_asked_then_it_stays_and_is_no_state():
    def remembered(module, x):
        if module.kept is None:
            module.kept = torch.arange(4.0)
        return module.kept

    model = Keeping(None, remembered)
    assert depends_on_state(model, KeptState(model), (FIRST,), model(FIRST)) == []
    assert model.kept is not None


def test_given_what_each_call_changes_when_no_answer_happens_to_show_it_then_it_is_as_the_build_gave_it():
    model = Keeping(False, lambda m, x: setattr(m, "kept", not m.kept) or 1.0 + m.kept)
    kept = KeptState(model)
    for _ in range(2):
        model(FIRST)
    assert depends_on_state(model, kept, (FIRST,), model(FIRST)) == []
    assert not kept.has_changed


def test_given_a_count_that_is_an_output_by_itself_when_asked_then_the_answer_depends_on_it():
    model = Keeping(0, lambda m, x: setattr(m, "kept", m.kept + 1) or 0.0)
    kept, counting = KeptState(model), lambda x: (model(x), model.kept)
    counting(FIRST)
    assert depends_on_state(counting, kept, (FIRST,), counting(FIRST)) == ["kept"]


TABLES = {
    "sparse": lambda: torch.eye(4).to_sparse(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
    "meta": lambda: torch.empty(4, device="meta"),
}


@pytest.mark.parametrize("kind", ["script", "lazy", *TABLES])
def test_given_a_module_of_another_kind_when_kept_then_its_buffers_are_restored_and_nothing_is_broken(kind):
    if kind == "lazy":
        model = torch.nn.LazyLinear(4)
    else:
        model = torch.nn.BatchNorm1d(4)
        if kind in TABLES:
            model.register_buffer("table", TABLES[kind]())
        model = torch.jit.script(model) if kind == "script" else model
    kept = KeptState(model)
    model(torch.randn(3, 4))
    assert kept.changed_weights() == []
    assert kept.restore() == (
        [] if kind == "lazy" else ["running_mean", "running_var", "num_batches_tracked"]
    )
    assert torch.isfinite(model.eval()(torch.ones(2, 4))).all()


def decayed(module, x):
    """As an average over time; four calls stay within every limit."""
    module.layer.weight.mul_(1 - 1e-5)
    return 0.0


def replaced(module, x):
    module.layer.weight = torch.nn.Parameter(module.layer.weight * (1 - 1e-5))
    return 0.0


def tenth(module, x):
    module.kept += 1
    return module.kept % 10 == 0


@pytest.mark.parametrize(
    ("kept", "step", "names"),
    [
        (None, decayed, ["layer.weight"]),
        (None, replaced, ["layer.weight"]),
        (0, tenth, ["kept"]),
        (torch.zeros(1), tenth, ["kept"]),
        (None, lambda m, x: setattr(m, "kept", x.clone()) or 0.0, []),  # for who looks at the model
    ],
)
def test_given_state_that_no_compared_answer_shows_when_an_engine_is_compared_then_it_is_refused_by_name(
    kept, step, names
):
    model = Keeping(kept, step).eval()
    reason = rf"keeps state between calls \({', '.join(names)}\)"
    refused = pytest.raises(ParityError, match=reason) if names else contextlib.nullcontext()
    with torch.inference_mode(), refused:
        check_engine(model, model, (FIRST,), {}, "fp32", briefly=True)


def test_given_a_model_with_state_when_an_engine_is_compared_then_it_is_refused_by_name_and_leaves_no_state():
    make, step = KINDS["a buffer in place"]
    model = Keeping(make(), step).eval()
    first = flat_numbers(Keeping(make(), step)(FIRST))
    with torch.inference_mode(), pytest.raises(ParityError, match=r"keeps state between calls \(kept\)"):
        check_engine(model, model, (FIRST,), {}, "fp32")
    assert torch.equal(flat_numbers(model(FIRST))[0], first[0])
