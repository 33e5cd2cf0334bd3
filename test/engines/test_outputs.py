"""Whatever a model returns: NaN is found in it, or it is said that nothing can be found."""

import collections
import dataclasses
import types

import numpy as np
import pytest
import scipy.sparse
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from torchperf_ros.api.errors import TorchperfError
from torchperf_ros.engines.outputs import (
    Drawn,
    drawn,
    hidden_in,
    holds_lazy,
    layout_of,
    leaves_in,
    sizes_follow_values,
    split,
    tensors_in,
)
from torchperf_ros.worker.tier import InvalidOutput, OutputCheck


@dataclasses.dataclass
class Found:
    scores: torch.Tensor
    label: str = "car"


class Masked(torch.nn.Module):
    def forward(self, x):
        return x[x > 0]


class Slotted:
    __slots__ = ("__scores", "label")

    def __init__(self, scores):
        self.__scores, self.label = scores, "car"


class Holding:
    """An object with its results in a table of its own, and with itself in it."""

    def __init__(self, scores):
        self._fields, self.itself = {"scores": scores}, self


def generated(values):
    yield values
    yield 7


NAMED = collections.namedtuple("NAMED", "scores count")
KINDS = {
    "tensor": lambda t: t,
    "half": lambda t: t.half(),
    "complex": lambda t: torch.complex(torch.ones(3), t),
    "conjugate": lambda t: torch.complex(torch.ones(3), t).conj(),
    "sparse": lambda t: t.to_sparse(),
    "compressed": lambda t: t[None].to_sparse_csr(),
    "jagged": lambda t: torch.nested.nested_tensor([t, t[:1]], layout=torch.jagged),
    "nested": lambda t: torch.nested.nested_tensor([t, t[:1]]),
    "dataclass": Found,
    "slots": Slotted,
    "object": Holding,
    "namespace": lambda t: types.SimpleNamespace(scores=t),
    "mapping": lambda t: collections.UserDict(scores=t),
    "proxy": lambda t: types.MappingProxyType({"scores": t}),
    "named tuple": lambda t: NAMED(t, 2),
    "deque": lambda t: collections.deque([t]),
    "set": lambda t: {t},
    "generator": generated,
    "generator in a dict": lambda t: {"scores": generated(t), "size": 2},
    "zip": lambda t: zip([t], [1], strict=True),
    "array": lambda t: t.numpy(),
    "array of the other byte order": lambda t: t.numpy().astype(">f4"),
    "array backwards": lambda t: t.numpy()[::-1],
    "matrix of another library": lambda t: scipy.sparse.csr_matrix(t.numpy()),
    "float": lambda t: (float(t.sum()), "text", None, True),
    "number of numpy": lambda t: np.float32(t.sum()),
    "nest of all": lambda t: [{"a": (Found(t), 3)}, types.SimpleNamespace(b=[t])],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_given_any_kind_of_outputs_when_they_hold_nan_or_inf_then_they_are_invalid(kind, bad):
    check = OutputCheck(drawn(KINDS[kind](torch.ones(3))), fixed_sizes=True)
    check.check(drawn(KINDS[kind](torch.ones(3))))
    assert check.unchecked == ""
    with pytest.raises(InvalidOutput, match="NaN or Inf|plain number"):
        check.check(drawn(KINDS[kind](torch.tensor([1.0, bad, 1.0]))))


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"float", "number of numpy"}))
def test_given_any_kind_of_outputs_when_they_have_another_type_then_they_are_invalid(kind):
    check = OutputCheck(drawn(KINDS[kind](torch.ones(3))), fixed_sizes=True)
    with pytest.raises(InvalidOutput, match="outputs have the types and shapes .*on the example inputs"):
        check.check(KINDS["dataclass"](torch.ones(3, dtype=torch.float64)))


@pytest.mark.parametrize(
    ("outputs", "why"),
    [
        (zstandard.ZstdDecompressor(), "in a ZstdDecompressor no tensor"),
        ({"a": torch.ones(1), "b": object()}, "in an object no tensor"),
        (generated(torch.ones(1)), "in a generator no tensor"),
        (np.array([object()]), "in a ndarray no tensor"),
        ("text", "there is no tensor, array or number in a str"),
        (None, "there is no tensor, array or number in a NoneType"),
    ],
)
def test_given_outputs_in_which_nothing_can_be_found_then_they_are_called_unchecked(outputs, why):
    assert why in hidden_in(outputs)
    assert OutputCheck(outputs, fixed_sizes=True).unchecked == hidden_in(outputs)


def test_given_a_generator_when_drawn_then_it_runs_once_and_gives_the_same_to_whoever_iterates():
    runs = []

    def lazily():
        for number in range(3):
            runs.append(number)
            yield torch.tensor(float(number))

    outputs = {"steps": lazily(), "last": torch.ones(1)}
    assert holds_lazy(outputs)
    found = drawn(outputs)
    assert runs == [0, 1, 2]
    assert [float(t) for t in tensors_in(found)] == [0.0, 1.0, 2.0, 1.0]
    assert float(next(found["steps"])) == 0.0
    assert [float(t) for t in found["steps"]] == [1.0, 2.0]


def test_given_outputs_that_differ_in_a_name_type_or_plain_value_then_their_layouts_do():
    layouts = {
        layout_of(each)
        for each in (
            Found(torch.ones(1)),
            Found(torch.ones(1), "bus"),
            Found(torch.ones(2)),
            Slotted(torch.ones(1)),
        )
    }
    assert len(layouts) == 4
    assert layout_of(Found(torch.ones(1))) == layout_of(Found(torch.zeros(1)))


@dataclasses.dataclass(frozen=True)
class Frozen:
    a: object
    b: object


class SlottedPair:
    __slots__ = ("__weakref__", "a", "b")  # as attrs makes them

    def __init__(self, a, b):
        self.a, self.b = a, b


Pair = collections.namedtuple("Pair", ["a", "b"])
NESTS = {
    "list": lambda a, b: [a, b],
    "tuple": lambda a, b: (a, b),
    "named tuple": Pair,
    "dict": lambda a, b: {"a": a, "b": b},
    "ordered dict": lambda a, b: collections.OrderedDict(b=b, a=a),
    "frozen dataclass": Frozen,
    "object with slots": SlottedPair,
    "namespace": lambda a, b: types.SimpleNamespace(a=a, b=b),
    "deque": lambda a, b: collections.deque([a, b]),
    "generator": lambda a, b: Drawn(iter([a, b])),
}
plans = st.recursive(
    st.sampled_from(["tensor", "array", "integers", "text", "empty tuple"]),
    lambda inner: st.tuples(st.sampled_from(sorted(NESTS)), inner, inner),
    max_leaves=6,
)


def made(plan, rows, seeds):
    """Outputs as planned for so many rows, whose numbers follow from the leaf's place and the rows' own."""
    if isinstance(plan, tuple):
        kind, *inner = plan
        return NESTS[kind](*(made(each, rows, seeds) for each in inner))
    leaf = next(seeds)
    values = torch.tensor(rows, dtype=torch.float32).reshape(-1, 1, 1) * torch.ones(1, 2, 3) + leaf
    plain = {"text": "metres", "empty tuple": ()}
    return {"tensor": values, "array": values.numpy(), "integers": values.int(), **plain}[plan]


def numbers(outputs):
    return [np.asarray(leaf).tolist() for leaf in leaves_in(outputs)]


@given(plans, st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_given_any_outputs_of_a_batch_when_split_then_each_share_is_as_if_its_inputs_had_come_alone(
    plan, sizes
):
    rows = list(range(sum(sizes)))
    shares = split(made(plan, rows, iter(range(99))), sizes)
    begins = np.cumsum([0, *sizes])
    alone = [
        made(plan, rows[begin:end], iter(range(99))) for begin, end in zip(begins, begins[1:], strict=False)
    ]
    assert [layout_of(share) for share in shares] == [layout_of(each) for each in alone]
    assert [numbers(share) for share in shares] == [numbers(each) for each in alone]


@pytest.mark.parametrize(
    ("outputs", "why"),
    [
        ((torch.ones(3), torch.ones(2)), "a tensor float32 2; .* its dimension 0 has to be 3"),
        ({"a": torch.tensor(1.0)}, "a tensor float32 scalar; .* has to be 3"),
        ([np.ones((1, 3))], "ndarray.* its dimension 0 has to be 3"),
        (torch.ones(3).__add__, "cannot be divided"),
        (object(), "an object, which cannot be divided"),
    ],
)
def test_given_outputs_without_a_share_for_each_frame_when_split_then_the_error_says_which(outputs, why):
    with pytest.raises(TorchperfError, match=why):
        split(outputs, [1, 2])


@pytest.mark.parametrize(
    ("forward", "follows"),
    [
        (lambda x: x[x > 0], True),
        (lambda x: x[[int(i) for i in x.argsort() if x[i] > 0]], True),
        (lambda x: x[: int((x > 0).sum())], True),
        (lambda x: torch.from_numpy(x.numpy()[x.numpy() > 0]), True),
        (torch.jit.script(Masked()), True),
        (lambda x: x * 2 if x[0] > 0 else x[:1], False),  # a branch: sizes are as in the example, or wrong
        (lambda x: x.reshape(2, 2).softmax(1).topk(1).values, False),
    ],
    ids=["mask", "python nms", "count", "numpy", "script", "branch", "plain"],
)
def test_given_a_model_when_run_then_it_is_known_whether_sizes_follow_from_values(forward, follows):
    assert sizes_follow_values(lambda: forward(torch.tensor([1.0, -1.0, 2.0, 3.0]))) is follows


def test_given_sizes_that_follow_from_values_when_checked_then_sizes_and_number_may_differ_and_nan_may_not():
    check = OutputCheck([torch.zeros(3, 4)], fixed_sizes=True, of_values=True)
    for boxes in ([torch.zeros(0, 4)], [torch.zeros(9, 4)], [], [torch.zeros(1, 4), torch.zeros(1, 4)]):
        check.check(boxes)
    for wrong in ([torch.zeros(3)], [torch.zeros(3, 4).double()], [torch.full((1, 4), torch.nan)]):
        with pytest.raises(InvalidOutput):
            check.check(wrong)
    nothing_found = OutputCheck([], fixed_sizes=True, of_values=True)
    with pytest.raises(InvalidOutput, match="NaN"):
        nothing_found.check([torch.full((1,), torch.nan, dtype=torch.complex64)])


def test_given_a_model_when_looked_at_then_the_compiler_is_not_imported(python):
    """In a worker it would take 73 MiB, and a second of each start."""
    program = """
import sys, torch
from torchperf_ros.engines.outputs import sizes_follow_values
before = set(sys.modules)
assert sizes_follow_values(lambda: torch.ones(3)[torch.ones(3) > 0])
assert not {"torch._dynamo", "sympy"} & (set(sys.modules) - before), set(sys.modules) - before
"""
    python(program)
