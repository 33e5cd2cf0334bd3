import copy
import os

import pytest
import torch
from torch import nn

from torchperf_ros.analysis import model_variants
from torchperf_ros.analysis.model_variants import ModelVariants, thread_counts
from torchperf_ros.core.build_options import BuildOptions
from torchperf_ros.core.errors import AdapterError
from torchperf_ros.worker import batch_norm_fold, engine
from torchperf_ros.worker.device import Device

EAGER = BuildOptions()
FOLDED = BuildOptions(fold_batch_norm=True)


@pytest.fixture
def device():
    before = torch.get_num_threads()
    yield Device(torch.device("cpu"), 1)
    torch.set_num_threads(before)


@pytest.fixture
def said():
    return []


@pytest.fixture
def variants(device, said):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    model[1].running_mean.fill_(0.5)
    with torch.inference_mode():
        yield ModelVariants(model, (torch.zeros(1, 3, 8, 8),), {}, device, said.append)


def test_given_a_way_when_asked_for_twice_then_it_is_made_once_checked_and_said(variants, said):
    first = variants.get(FOLDED)
    assert variants.get(FOLDED) is first
    assert first.refused == ""
    assert first.parity.relative_l2 < 1e-5
    assert len(said) == 1
    assert said[0].startswith("eager fold_batch_norm: relative L2")


def test_given_a_broken_transform_when_made_then_it_is_refused_with_its_figures(variants, monkeypatch):
    def forgets_the_mean(conv, norm, transpose):
        broken = copy.deepcopy(norm)
        broken.running_mean.zero_()
        return real(conv, broken, transpose)

    real = batch_norm_fold.fuse_conv_bn_eval
    monkeypatch.setattr(batch_norm_fold, "fuse_conv_bn_eval", forgets_the_mean)
    made = variants.get(FOLDED)
    assert made.refused.startswith("parity: outputs differ from eager's")
    assert made.parity.relative_l2 > 0.1


def test_given_a_transform_that_changes_the_shape_when_made_then_it_is_refused_without_figures(variants, monkeypatch):
    monkeypatch.setattr(engine, "transform", lambda model, options, device: nn.Flatten())
    made = variants.get(FOLDED)
    assert "outputs are float32 1x" in made.refused
    assert made.parity is None


def test_given_a_way_that_cannot_be_made_when_asked_for_then_it_is_refused_and_not_timed(variants, monkeypatch):
    def raises(model, options, device):
        if options == FOLDED:
            raise RuntimeError("the compiler gave up\nand said more")
        return model

    monkeypatch.setattr(engine, "transform", raises)
    assert variants.get(FOLDED).refused == "RuntimeError: the compiler gave up"
    assert set(variants.time([EAGER, FOLDED], 0.01).timings) == {EAGER}


def test_given_ways_when_timed_then_each_has_as_many_samples_and_the_noise_is_that_of_the_first_twice(variants):
    measured = variants.time([EAGER, FOLDED, EAGER], 0.02)
    assert list(measured.timings) == [EAGER, FOLDED]
    assert len({len(timing.times_ms) for timing in measured.timings.values()}) == 1
    assert 0.0 <= measured.noise < 10.0


def test_given_thread_counts_when_timed_then_each_has_as_many_samples_and_the_number_is_as_before(variants):
    measured = variants.time_threads([1, 2], EAGER, 0.02)
    assert set(measured.timings) == {1, 2}
    assert len(measured.timings[1].times_ms) == len(measured.timings[2].times_ms)
    assert torch.get_num_threads() == 1


def test_given_a_call_that_raises_with_more_threads_when_timed_then_the_number_is_as_before(variants, monkeypatch):
    def raises(*arguments, **more):
        if torch.get_num_threads() > 1:
            raise RuntimeError("no")
        return real(*arguments, **more)

    real = model_variants.time_interleaved
    monkeypatch.setattr(model_variants, "time_interleaved", raises)
    with pytest.raises(RuntimeError, match="no"):
        variants.time_threads([1, 2], EAGER, 0.02)
    assert torch.get_num_threads() == 1


def test_given_copies_when_timed_then_both_ways_are(variants):
    assert set(variants.time_copies(EAGER, 0.01).timings) == {False, True}


def test_given_a_model_that_raises_on_its_own_example_when_taken_then_the_error_says_so(device):
    with pytest.raises(AdapterError, match="the model raises on its own example inputs: RuntimeError"):
        ModelVariants(nn.Linear(3, 3), (torch.zeros(1, 4),), {}, device, print)


@pytest.mark.parametrize(("cores", "counts"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
def test_given_cores_when_asked_for_thread_counts_then_they_double_up_to_all_of_them(monkeypatch, cores, counts):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    assert thread_counts() == counts


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch.cuda is not available")
def test_given_cuda_when_each_precision_is_made_then_it_agrees_and_tf32_is_not_left_on():
    device = Device(torch.device("cuda", 0), 1)
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 16)).eval().cuda()
    with torch.inference_mode(), device.on_stream():
        variants = ModelVariants(model, (torch.zeros(4, 256, device="cuda"),), {}, device, print)
        for precision in ("tf32", "bf16", "fp16"):
            assert variants.get(BuildOptions(precision=precision)).refused == ""
        assert set(variants.time_copies(EAGER, 0.01).timings) == {False, True}
    assert not torch.backends.cuda.matmul.allow_tf32
