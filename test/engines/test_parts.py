"""Parts of a model by engine compile: modules that are compiled by themselves, and the rest in eager."""

import functools

import pytest
import torch

from torchperf_ros.engines import engine
from torchperf_ros.engines.built_tier import BuiltTier
from torchperf_ros.engines.engine import EngineUnavailable
from torchperf_ros.engines.package import make_runner
from torchperf_ros.engines.parity import random_inputs
from torchperf_ros.settings.build_options import BuildOptions

from .test_tier_loader import Loaded

CPU = torch.device("cpu")


@pytest.fixture
def captured(monkeypatch, fresh_compiler):
    """Graphs are captured as ever and run op by op.

    Inductor takes seconds, and does the same for a whole model.
    """
    monkeypatch.setattr(engine.torch, "compile", functools.partial(torch.compile, backend="eager"))


def tier_of(adapters, name, model=None):
    adapter = adapters.Compiled({"dynamic": True}, CPU)
    with torch.inference_mode():
        example = tuple(tensor.clone() for tensor in adapter.example_inputs(name))
    return BuiltTier(model or adapter.build(name).eval(), example, adapter.dynamic_dims(), CPU)


def runner_of(tier, parts):
    with torch.inference_mode():
        return make_runner(tier, BuildOptions("compile", parts=parts))


@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize("parts", ["body", "body.0, body.2"])
def test_given_parts_when_made_then_they_are_compiled_and_answers_are_the_models_own_at_every_size(
    adapters, parts
):
    tier = tier_of(adapters, "split")
    runner = runner_of(tier, parts)
    assert runner.breaks == 0
    assert runner.graphs >= len(parts.split(","))
    torch.compiler.set_stance("fail_on_recompile")
    with torch.inference_mode():
        for batch in range(1, 9):
            inputs = random_inputs(tier.example, batch, {0: {0: (batch, batch)}, 1: {0: (batch, batch)}})
            torch.testing.assert_close(runner.call(*inputs), tier.model(*inputs))


@pytest.mark.usefixtures("captured")
def test_given_parts_when_run_then_between_calls_the_model_is_as_before_also_after_an_error(adapters):
    tier = tier_of(adapters, "split")
    before, seen = dict(vars(tier.model.body)), []
    call = runner_of(tier, "body").call
    assert vars(tier.model.body) == before
    tier.model.body.register_forward_hook(lambda *_: seen.append("forward" in vars(tier.model.body)))
    with torch.inference_mode():
        call(*tier.example)
        assert seen == [True]  # a hook of the user's runs once, around what is compiled
        with pytest.raises(RuntimeError):
            call(torch.zeros(1, 5), tier.example[1])
        assert vars(tier.model.body) == before
        tier.model(*tier.example)
    assert seen == [True, False]


class Counts(torch.nn.Module):
    """Has a part that it knows by another name, one that it does not run, and a state that is no buffer."""

    def __init__(self):
        super().__init__()
        self.body, self.spare = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.other = torch.nn.Sequential(torch.nn.ReLU())
        self.run, self.calls = [self.body], 0

    def forward(self, x, mask):
        self.calls += 1
        return self.run[0](x) * mask.sum(1, keepdim=True)


@pytest.mark.usefixtures("captured")
def test_given_a_part_whose_forward_was_replaced_when_run_then_that_one_is_compiled_and_stays(adapters):
    tier = tier_of(adapters, "split")
    own = tier.model.body.forward = lambda x: x * 3
    call = runner_of(tier, "body").call
    with torch.inference_mode():
        torch.testing.assert_close(call(*tier.example), tier.model(*tier.example))
    assert tier.model.body.forward is own


@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ("blocks", "the model has no module 'blocks'; at its top are body, spare, other"),
        ("body,", "the model has no module ''"),
        ("body, body", "body is named twice, or lies within another part"),
        ("spare", "the model does not run spare on the example inputs"),
        ("other.0, other", "other.0 is named twice, or lies within another part"),
    ],
)
def test_given_parts_that_cannot_be_when_made_then_the_reason_names_them(adapters, parts, says):
    with pytest.raises(EngineUnavailable, match=f"parts: {says}"):
        runner_of(tier_of(adapters, "split", Counts().eval()), parts)


@pytest.mark.usefixtures("captured")
def test_given_parts_when_loaded_then_the_facts_say_which_and_eager_runs_with_the_reason_where_they_cannot_be(
    adapters, tmp_path
):
    adapter = adapters.Compiled({"dynamic": True}, CPU)
    good = Loaded(adapter, tmp_path, BuildOptions("compile", parts="body"), "split")
    assert (good.facts.engine, good.facts.parts, good.facts.why) == ("compile", "body", "")
    outputs, inputs = good.run(3)
    with torch.inference_mode():
        torch.testing.assert_close(outputs, adapter.build("split").eval()(*inputs))
    none = Loaded(adapter, tmp_path, BuildOptions("compile", parts="encoder"), "split")
    assert (none.facts.engine, none.facts.parts) == ("eager", "")
    assert none.facts.why == "parts: the model has no module 'encoder'; at its top are body, head"
    assert none.reported == [f"tier split runs in eager: {none.facts.why}"]
