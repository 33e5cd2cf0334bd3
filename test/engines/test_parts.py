"""What a model is made of: blocks that are alike, how modules are called, what can be exported. Nothing is compiled."""

import copy

import pytest
import torch
from torch import nn

from torchperf_ros.engines import parts as parts_module
from torchperf_ros.engines.parts import Anatomy, PartsError, export_part, exported_parts

from .compiled_adapters import Block, Blocks, Counting, Split

X, MASK = torch.randn(2, 4), torch.tensor([[0, 1], [1, 1]])


@pytest.fixture(autouse=True)
def any_share(monkeypatch):
    """Blocks as small as these take their time in Python, as does what is around them."""
    monkeypatch.setattr(parts_module, "_LEAST_COVERED", 0.0)
    monkeypatch.setattr(parts_module, "_LEAST_SHARE", 0.0)


def plain(*modules):
    """A model of blocks of one input and one output."""
    return nn.Sequential(*modules).eval()


def block(width=4, **more):
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 4), *more.values())


def blocks_of(model, *runs):
    return [part.paths for part in Anatomy(model, runs or [(X,)]).blocks()]


def test_given_equal_blocks_with_keywords_and_tuples_when_looked_for_then_they_are_one_part_that_knows_its_arguments():
    model, runs = Blocks(5).eval(), [(torch.randn(n, 4), MASK[:1].expand(n, 2)) for n in (3, 1, 8, 2)]
    (part,) = Anatomy(model, runs).blocks()
    assert part.paths == tuple(f"blocks.{n}" for n in range(5))
    assert (part.dims, part.constants) == ({0: {0: (1, 8)}}, {1: 0.5})
    assert part.example[0].shape == (8, 4)
    assert torch.equal(part.run(model.blocks[1], [X])[0], model.blocks[1](X, scale=0.5)[0])


def tied():
    one = block()
    return plain(one, one, one, one, block())


def sharing():
    modules = [block() for _ in range(4)]
    modules[1][0].weight = modules[0][0].weight
    return plain(*modules)


class TwoSizes(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([block() for _ in range(5)])

    def forward(self, x):
        for one in self.blocks:
            x = one(x)
        return self.blocks[0](x[:1]) + x


@pytest.mark.parametrize(
    ("model", "found"),
    [
        (plain(*(block() for _ in range(4)), nn.Linear(4, 2)), [("0", "1", "2", "3")]),
        (sharing(), [("0", "1", "2", "3")]),
        (TwoSizes().eval(), [tuple(f"blocks.{n}" for n in range(1, 5))]),  # the first is called with two sizes
        (plain(*(block(4 + 4 * (n // 4)) for n in range(8))), [("4", "5", "6", "7"), ("0", "1", "2", "3")]),
        (plain(plain(block(), block()), plain(block(), block())), [("0.0", "0.1", "1.0", "1.1")]),
    ],
)  # fmt: skip
def test_given_blocks_in_any_arrangement_when_looked_for_then_those_that_are_alike_are_found(model, found):
    assert blocks_of(model) == found


@pytest.mark.parametrize(
    "model",
    [plain(block(), block(), block()), plain(*(block(4 + n) for n in range(4))), tied(), plain(*[nn.Tanh()] * 8)],
)
def test_given_fewer_than_four_alike_when_looked_for_then_that_is_the_reason(model):
    with pytest.raises(PartsError, match="no 4 blocks that are alike"):
        blocks_of(model)


def test_given_blocks_that_are_little_of_the_time_when_looked_for_then_that_is_the_reason(monkeypatch):
    monkeypatch.setattr(parts_module, "_LEAST_COVERED", 0.8)
    large = nn.Sequential(nn.Linear(4, 4096), nn.Linear(4096, 4096), nn.Linear(4096, 4))
    with pytest.raises(PartsError, match=r"\(0 to 3\) take \d+% of eager's time, not most of it"):
        blocks_of(plain(*(block() for _ in range(4)), large))


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.idle, self.sized = nn.Linear(4, 4), nn.Linear(4, 4), Sized()

    def forward(self, x):
        return self.sized(self.used(x), x.shape[0])


class Sized(nn.Module):
    def forward(self, x, count):
        return x[:count]


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("neck", "no module 'neck'; at its top are used, idle, sized"),
        ("idle", "idle is not called on the example inputs"),
        ("sized", "sized is called with other arguments where sizes are others"),
        ("used", "used is named twice, or lies within another part"),
    ],
)
def test_given_a_path_that_is_no_part_when_asked_for_then_it_says_why(path, why):
    with pytest.raises(PartsError, match=f"^parts: .*{why}"):
        Anatomy(Odd().eval(), [(X,), (X[:1],)]).parts(["used", path])


class InPlace(nn.Module):
    def forward(self, x):
        return x.add_(1.0)


@pytest.mark.parametrize(("module", "what"), [(Counting(), "buffers"), (InPlace(), "inputs")])
def test_given_a_module_that_changes_what_eager_reads_then_it_is_no_part(module, what):
    anatomy = Anatomy(plain(nn.Tanh(), module), [(X,)])
    (part,) = anatomy.parts(["1"])
    with pytest.raises(PartsError, match=f"parts: 1 writes to its {what}"):
        export_part(module, part)


def test_given_a_model_when_looked_at_then_nothing_of_it_is_changed():
    model = Blocks(5).eval()
    before = copy.deepcopy(model.state_dict())
    anatomy = Anatomy(model, [(X, MASK)])
    assert 0.0 < anatomy.covered(["blocks.0"]) < 1.0
    assert anatomy.blocks()
    hooks = [one for module in model.modules() for one in (*module._forward_hooks, *module._forward_pre_hooks)]
    assert not hooks
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_given_a_model_that_cannot_be_exported_when_tried_then_its_largest_parts_that_can_are_named_with_their_share():
    assert exported_parts(plain(block()), [(X,)]) is None
    why, shares = exported_parts(Split(16).eval(), [(X, MASK)])
    assert "data-dependent" in why
    assert list(shares) == ["body"]
    assert 0.0 < shares["body"] < 1.0


def test_given_a_block_that_is_called_by_other_ways_than_its_call_then_it_is_no_block():
    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Block() for _ in range(4)])

        def forward(self, x):
            for one in self.blocks:
                x = one.forward(x)[0]
            return x

    with pytest.raises(PartsError, match="no 4 blocks"):
        blocks_of(Around().eval())
