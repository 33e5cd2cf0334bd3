import gc
import random
import weakref

import pytest
import torch
from torch.testing import assert_close

from torchperf_ros.engines.shape_runner import PaddedBuffers, ShapeRunner
from torchperf_ros.settings.build_options import ShapeOptions, parse_shapes

IMAGE = (torch.zeros(1, 3, 128, 128),)
HEIGHT_AND_WIDTH = {0: {2: (100, 200), 3: (100, 200)}}


class PerPixel(torch.nn.Module):
    """Padding stays where it is.

    Each pixel for itself, and one strided output whose cells do not overlap.
    """

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.mix = torch.nn.Conv2d(3, 4, 1)
        self.cells = torch.nn.Conv2d(3, 2, 16, stride=16)

    def forward(self, x):
        return {"pixels": torch.relu(self.mix(x)), "cells": (self.cells(x),)}


def unpad_pixels(outputs, shapes):
    ((_, _, height, width),) = shapes
    cells = outputs["cells"][0][..., : height // 16, : width // 16]
    return {"pixels": outputs["pixels"][..., :height, :width], "cells": (cells,)}


PerPixel.cut = staticmethod(unpad_pixels)


def unpad_image(outputs, shapes):
    ((_, _, height, width),) = shapes
    return outputs[..., :height, :width]


def blurred():
    """The second convolution sees the first one's bias where padding is, and zeros where the image ends."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.Conv2d(4, 4, 3, padding=1))


class MaskedMean(torch.nn.Module):
    """Written for padding: a mask says which tokens count."""

    def forward(self, tokens, mask, kinds):
        weights = mask.unsqueeze(-1).to(tokens.dtype)
        mean = (tokens * weights).sum(1, keepdim=True) / weights.sum(1, keepdim=True).clamp(min=1.0)
        return tokens * mean, mean[:, 0], kinds + 1

    @staticmethod
    def cut(outputs, shapes):
        tokens, mean, kinds = outputs
        count = shapes[0][1]
        return tokens[:, :count], mean, kinds[:, :count]


TOKENS = (torch.randn(2, 12, 8), torch.ones(2, 12, dtype=torch.bool), torch.arange(24).view(2, 12))


class AsTheyAre(torch.nn.ReLU):
    """Its adapter does not cut its outputs."""

    cut = staticmethod(lambda outputs, _: outputs)


class Spy:
    """A model that remembers the shapes that it was run on since it was last asked."""

    def __init__(self, model):
        self.model, self.seen = model, []

    def __call__(self, *inputs):
        self.seen.append(tuple(tuple(t.shape) for t in inputs))
        return self.model(*inputs)

    def asked(self):
        seen, self.seen = self.seen, []
        return seen


@pytest.fixture(autouse=True)
def _as_in_a_worker():
    torch._dynamo.reset()
    torch.set_num_threads(1)  # others use this machine, too
    with torch.inference_mode():
        yield


def make(model, options, dims=None, example=IMAGE, *, run=None, dynamic_engine=False):
    """A warm runner, and spies on its engine and on eager."""
    engine, eager = Spy(run or model), Spy(model)
    unpad = getattr(model, "cut", unpad_image)
    runner = ShapeRunner(
        engine, eager, options, dims or {}, example, "fp32", unpad=unpad, dynamic_engine=dynamic_engine
    )
    runner.warm_up()
    engine.asked(), eager.asked()
    return runner, engine, eager


# --- exact


def test_given_exact_with_a_common_shape_when_frames_come_then_only_unknown_shapes_are_answered_by_eager():
    options = ShapeOptions(common=(parse_shapes("1x3x64x96"),))
    runner, engine, eager = make(PerPixel(), options)
    for size in ((64, 96), (96, 64), (128, 128)):
        frame = torch.rand(1, 3, *size)
        assert_close(runner(frame), eager.model(frame))
    assert (runner.hits, runner.misses) == (2, 1)
    assert engine.asked() == [((1, 3, 64, 96),), ((1, 3, 128, 128),)]
    assert eager.asked() == [((1, 3, 96, 64),)]
    assert runner.shapes == (((1, 3, 128, 128),), ((1, 3, 64, 96),))
    assert runner.call_for((torch.rand(1, 3, 128, 128),)) is engine  # which gets the very tensor


def test_given_an_engine_that_runs_one_size_when_warmed_up_then_the_common_shape_is_left_to_eager_and_noted():
    model = PerPixel()

    def engine(x):
        if x.shape[2] != 128:
            raise ValueError("made for 128")
        return model(x)

    runner, _, eager = make(model, ShapeOptions(common=(parse_shapes("1x3x64x96"),)), run=engine)
    runner(torch.rand(1, 3, 64, 96))
    assert eager.asked() == [((1, 3, 64, 96),)]
    (note,) = runner.notes
    assert note.startswith(
        "common_shapes: '1x3x64x96' is left to eager: ValueError: made for 128 (test_shape_runner.py:"
    )


@pytest.mark.parametrize(
    "frame",
    [
        torch.rand(1, 128, 128, 3).permute(0, 3, 1, 2),
        torch.rand(1, 3, 128, 256)[..., ::2],
        torch.rand(1, 3, 128, 128),
    ],
    ids=["channels last", "every other", "made outside of inference mode"],
)
def test_given_another_layout_of_a_prepared_shape_when_run_then_the_engine_gets_it_in_the_usual_one(frame):
    runner, engine, eager = make(PerPixel(), ShapeOptions())
    got = []
    engine.model = lambda x: (got.append((x.stride(), x.is_inference())), eager.model(x))[1]
    assert_close(runner(frame), eager.model(frame))
    assert got == [(torch.zeros(1, 3, 128, 128).stride(), True)]
    assert runner.hits == 1


# --- bucket


def test_given_buckets_when_sizes_vary_then_the_valid_part_is_as_from_eager_and_only_buckets_are_run():
    runner, engine, eager = make(PerPixel(), ShapeOptions("bucket"), HEIGHT_AND_WIDTH)
    assert (runner.policy, runner.notes) == ("bucket", [])
    drawn = random.Random(1)
    for _ in range(30):  # growing and shrinking: what an earlier frame left in a buffer must not be seen
        frame = torch.rand(1, 3, drawn.randint(100, 200), drawn.randint(100, 200)) + 1.0
        assert_close(runner(frame), eager.model(frame))
    assert runner.hits == 30
    widths = {128, 160, 192, 200}
    assert {shape[dim] for (shape,) in engine.asked() for dim in (2, 3)} <= widths
    assert eager.asked() == []


@pytest.mark.parametrize("policy", ["bucket", "dynamic"])
def test_given_a_size_beyond_the_declared_range_when_run_then_eager_answers_and_the_engine_never_sees_it(
    policy,
):
    runner, engine, eager = make(
        torch.nn.ReLU(), ShapeOptions(policy), HEIGHT_AND_WIDTH, dynamic_engine=policy == "dynamic"
    )
    for shape in ((1, 3, 201, 128), (1, 3, 99, 128), (2, 3, 128, 128), (3, 128, 128)):
        assert runner(torch.rand(shape)).shape == shape
    assert engine.asked() == []
    assert (len(eager.asked()), runner.misses) == (4, 4)
    runner(torch.rand(1, 3, 200, 200))
    assert (engine.asked(), runner.hits) == ([((1, 3, 200, 200),)], 1)


def test_given_a_model_with_a_mask_when_tokens_masks_and_indices_are_padded_then_the_result_is_eagers():
    dims = {number: {1: (4, 40)} for number in range(3)}
    runner, engine, eager = make(MaskedMean(), ShapeOptions("bucket", 16), dims, TOKENS)
    assert (runner.policy, runner.notes) == ("bucket", [])
    for count in (40, 17, 5, 33, 12):
        frame = (torch.randn(2, count, 8), torch.rand(2, count) < 0.5, torch.randint(0, 9, (2, count)))
        assert_close(runner(*frame), eager.model(*frame))
    assert {shapes[0][1] for shapes in engine.asked()} <= {12, 16, 32, 40}
    assert (runner.hits, eager.asked()) == (5, [])


def test_given_a_convolution_when_warmed_up_then_buckets_are_refused_and_exact_or_dynamic_is_in_force():
    runner, engine, eager = make(blurred(), ShapeOptions("bucket"), HEIGHT_AND_WIDTH)
    why = (
        "cannot be used: padding 1x3x100x100 to 1x3x128x128 changes the result: outputs differ from eager's"
    )
    assert f"policy bucket {why}" in runner.notes[0]
    assert "policy dynamic cannot be used: the engine was made for fixed sizes" in runner.notes[1]
    frame = torch.rand(1, 3, 150, 150)
    assert_close(runner(frame), eager.model(frame))
    assert (runner.policy, runner.misses, engine.asked()) == ("exact", 1, [])
    runner, engine, _ = make(blurred(), ShapeOptions("bucket"), HEIGHT_AND_WIDTH, dynamic_engine=True)
    runner(frame)
    assert (runner.policy, len(runner.notes), len(engine.asked())) == ("dynamic", 1, 1)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (torch.nn.ReLU(), "declares no dynamic_dims"),
        (AsTheyAre(), "the adapter's `unpad` has to cut the outputs"),
        (lambda x: x.flatten(2), "outputs are float32 1x3x100; eager gives float32 1x3x10000"),
        (lambda x: x.mean((2, 3)), "padding 1x3x100x100 to 1x3x128x128 changes the result"),
        (lambda x: x.view(1, 3, 16, 8, 128), "RuntimeError: shape '[1, 3, 16, 8, 128]' is invalid"),
    ],
    ids=["nothing varies", "not cut", "cut wrongly", "pooled", "fixed sizes"],
)
def test_given_a_model_that_cannot_be_padded_when_warmed_up_then_buckets_are_refused_with_the_reason(
    model, why
):
    runner, _, _ = make(model, ShapeOptions("bucket"), {} if "declares" in why else HEIGHT_AND_WIDTH)
    assert runner.policy == "exact"
    assert why in runner.notes[0]


@pytest.mark.parametrize(
    "wrong",
    [lambda x: x.shape[2] == 200, lambda x: not x[..., -1].any()],
    ids=["on one bucket", "on zeros"],
)
def test_given_an_engine_that_is_wrong_on_padded_inputs_only_when_warmed_up_then_buckets_are_refused(wrong):
    model = PerPixel()

    def engine(x):
        return model(x + 0.5 if wrong(x) else x)

    runner, _, _ = make(model, ShapeOptions("bucket"), HEIGHT_AND_WIDTH, run=engine)
    assert runner.policy == "exact"
    assert "outputs differ from eager's" in runner.notes[0]


def test_given_little_memory_for_buffers_when_sizes_vary_then_old_ones_are_given_up_and_results_stay_right(
    monkeypatch,
):
    monkeypatch.setattr("torchperf_ros.engines.shape_runner._MOST_BUFFER_BYTES", 150)
    buffers = PaddedBuffers((torch.zeros(4, 4),))
    for height, width in ((5, 5), (3, 4), (5, 1), (1, 5), (2, 2), (4, 5), (5, 5)):
        frame = torch.rand(height, width)
        for size in (5, 6):  # growing and shrinking: what an earlier frame left must not be seen
            (held,) = buffers.hold(((size, size),), (frame,))
            assert_close(held, torch.nn.functional.pad(frame, (0, size - width, 0, size - height)))
            assert buffers.size_bytes <= 150


def test_given_more_sizes_than_are_remembered_when_they_come_again_then_few_are_kept_and_all_are_hits(
    monkeypatch,
):
    monkeypatch.setattr("torchperf_ros.engines.shape_runner._MOST_PLANS", 3)
    runner, _, _ = make(torch.nn.ReLU(), ShapeOptions("bucket"), {0: {2: (100, 130)}})
    kept = weakref.WeakSet()  # what runs a frame of a size, one for each that is remembered
    for height in (*range(101, 109), *range(101, 109)):
        kept.add(runner.call_for((torch.rand(1, 3, height, 128),)))
        gc.collect()
        assert len(kept) <= 3
    assert (runner.hits, runner.misses) == (16, 0)


# --- the requirement: sizes from [100, 200] in both dimensions


@pytest.mark.parametrize("policy", ["bucket", "dynamic"])
def test_given_a_compiled_engine_when_100_sizes_are_drawn_then_95_percent_hit_and_nothing_is_compiled(
    policy,
):
    model = PerPixel()
    compiled = torch.compile(model, backend="eager", dynamic=policy == "dynamic", recompile_limit=64)
    example = tuple(tensor.clone() for tensor in IMAGE)
    options = ShapeOptions(policy)
    runner = ShapeRunner(
        compiled,
        model,
        options,
        HEIGHT_AND_WIDTH,
        example,
        "fp32",
        unpad=unpad_pixels,
        dynamic_engine=policy == "dynamic",
    )
    runner.warm_up()
    assert (runner.policy, runner.notes) == (policy, [])
    from torch._dynamo.utils import counters  # here: at the top it costs each process of the tests a second

    before = dict(counters["stats"])
    assert before["unique_graphs"] >= 1
    drawn = random.Random(2024)
    with torch.compiler.set_stance("fail_on_recompile"):
        for _ in range(100):
            frame = torch.rand(1, 3, drawn.randint(100, 200), drawn.randint(100, 200))
            assert runner(frame)["pixels"].shape == (1, 4, *frame.shape[2:])
    assert runner.hits > 95
    assert dict(counters["stats"]) == before
    assert runner.waste == 0.0 if policy == "dynamic" else 0.05 < runner.waste < 0.35
