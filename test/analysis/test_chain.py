import math

import pytest
import torch

from torchperf_ros.analysis.chain import LENGTHS, OPERATIONS, chain_inputs, make_chain

CPU = torch.device("cpu")


def test_given_a_chain_of_three_when_run_then_it_is_the_sum_of_half_the_sine_of_one_more():
    x = torch.randn(4, 16)
    assert make_chain(3)(x).item() == pytest.approx((torch.sin(x + 1) * 0.5).sum().item())


@pytest.mark.parametrize("length", LENGTHS)
def test_given_any_length_when_run_on_every_batch_size_then_the_result_is_a_finite_number(length):
    chain = make_chain(length)
    for x in chain_inputs(CPU):
        assert chain(x).shape == ()
        assert math.isfinite(chain(x).item())


@pytest.mark.parametrize("length", [1, 9, 10, 30])
def test_given_a_length_when_written_out_then_it_has_that_many_operations_and_a_sum(length):
    calls = [node for node in make_chain(length).graph.nodes if node.op.startswith("call")]
    assert len(calls) == length + 1


def test_given_two_chains_when_made_then_each_has_code_of_its_own():
    assert make_chain(5).forward.__code__ is not make_chain(5).forward.__code__


def test_given_the_workload_when_made_then_it_is_one_input_of_each_size_from_4_to_13():
    assert [tuple(x.shape) for x in chain_inputs(CPU)] == [(size, 16) for size in range(4, 14)]
    assert len(OPERATIONS) == 9
