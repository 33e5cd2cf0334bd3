from types import SimpleNamespace

import pytest

from torchperf_ros.core.clock import NS_PER_S
from torchperf_ros.supervise.renewal import Renewal


def worker(generation, *, usable=True):
    return SimpleNamespace(generation=generation, usable=usable, ready_at_ns=0)


@pytest.fixture
def renewal():
    found = Renewal({"packages": ["old"]})
    found.ask(tries=1, packages=["new"])
    return found


def test_given_a_renewal_when_asked_for_then_older_workers_are_to_be_replaced_the_last_one_first(renewal):
    workers = [worker(0), worker(0)]
    assert renewal.outdated(workers) is workers[1]
    assert renewal.wants_candidate(workers, 0)
    assert renewal.setup["packages"] == ["new"]


@pytest.mark.parametrize("regular", [[worker(0), None], [worker(0), worker(0, usable=False)]])
def test_given_a_crew_that_is_not_up_when_asked_then_no_new_worker_comes_on_top(renewal, regular):
    assert not renewal.wants_candidate(regular, 0)


def test_given_a_first_new_worker_that_dies_when_tries_are_used_up_then_nothing_has_changed(renewal):
    assert renewal.failed(worker(1), "it crashed", 0)
    assert (renewal.setup["packages"], renewal.generation, renewal.outcome) == (["old"], 0, "it crashed")
    assert not renewal.wants_candidate([worker(0)], 60 * NS_PER_S)


def test_given_a_new_worker_that_took_a_place_when_the_next_one_dies_then_it_is_tried_again_after_a_pause(renewal):
    renewal.took_a_place()
    workers = [worker(0), worker(1)]
    assert not renewal.failed(worker(1), "it crashed", 0)
    assert renewal.setup["packages"] == ["new"]
    assert not renewal.wants_candidate(workers, NS_PER_S)
    assert renewal.wants_candidate(workers, 6 * NS_PER_S)


def test_given_a_renewal_that_is_done_when_given_up_by_an_error_then_what_was_swapped_in_stays(renewal):
    renewal.settled([worker(1), worker(1)])
    renewal.give_up("an error in the node")
    assert (renewal.setup["packages"], renewal.outcome) == (["new"], "done")


def test_given_workers_still_to_be_replaced_when_looked_at_then_the_renewal_goes_on(renewal):
    renewal.settled([worker(1), worker(0)])
    assert renewal.outcome == ""
