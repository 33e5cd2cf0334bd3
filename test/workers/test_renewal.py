from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from torchperf_ros.api.clock import NS_PER_S
from torchperf_ros.workers.rolling_update import Renewal
from torchperf_ros.workers.worker_setup import WorkerSetup

SETUP = WorkerSetup("tested", "a:B", {}, ("full",), (), ("old",), (0,), (-1,))


def worker(generation, *, usable=True, packages=None):
    return SimpleNamespace(generation=generation, usable=usable, ready_at_ns=0, packages=packages)


def started(kit):
    return worker(kit.number, packages=kit.setup.packages)


@pytest.fixture
def renewal():
    found = Renewal(SETUP)
    assert found.swap(replace(SETUP, packages=("new",), swapped=0))
    return found


def test_given_a_swap_when_asked_for_then_older_workers_are_to_be_replaced_the_last_one_first(renewal):
    workers = [worker(0), worker(0)]
    assert renewal.outdated(workers) is workers[1]
    assert renewal.wants_candidate(workers, 0)
    assert renewal.kit(candidate=True).setup.packages == ("new",)


@pytest.mark.parametrize("regular", [[worker(0), None], [worker(0), worker(0, usable=False)]])
def test_given_a_pool_that_is_not_up_then_no_new_worker_comes_on_top_and_nothing_is_called_done(
    renewal, regular
):
    assert not renewal.wants_candidate(regular, 0)
    renewal.settled([None, worker(0, usable=False)])
    assert (renewal.outcome, renewal.swap_outcome) == ("", "")


def test_given_a_first_new_worker_that_dies_when_tries_are_used_up_then_nothing_has_changed(renewal):
    assert renewal.failed("it crashed", 0)
    assert (renewal.kit(candidate=False).setup.packages, renewal.swap_outcome) == (("old",), "it crashed")
    assert not renewal.wants_candidate([worker(0)], 60 * NS_PER_S)


def test_given_a_new_worker_that_took_a_place_when_the_next_one_dies_then_it_is_tried_again_after_a_pause(
    renewal,
):
    renewal.took_a_place()
    workers = [worker(0), worker(1)]
    assert not renewal.failed("it crashed", 0)
    assert renewal.kit(candidate=True).setup.packages == ("new",)
    assert not renewal.wants_candidate(workers, NS_PER_S)
    assert renewal.wants_candidate(workers, 6 * NS_PER_S)


def test_given_a_renewal_that_is_done_when_given_up_by_an_error_then_what_was_swapped_in_stays(renewal):
    renewal.took_a_place()
    renewal.settled([worker(1), worker(1)])
    renewal.give_up("an error in the node")
    assert (renewal.proven.setup.packages, renewal.outcome, renewal.swap_outcome) == (
        ("new",),
        "done",
        "done",
    )


def test_given_a_package_built_during_a_swap_then_the_proven_one_is_kept_and_workers_are_renewed(renewal):
    renewal.ask()
    tried = started(renewal.kit(candidate=True))
    assert tried.packages == ("new",)
    assert renewal.failed("it crashed", 0)
    assert (renewal.outcome, renewal.swap_outcome) == ("", "it crashed")
    assert renewal.is_over(tried, [worker(0)])  # should the error have been one of ours, and it lives
    assert started(renewal.kit(candidate=True)).packages == ("old",)
    assert renewal.outdated([worker(0)])


def test_given_a_swap_that_is_done_when_a_background_renewal_fails_then_the_swap_is_still_done(renewal):
    renewal.took_a_place()
    renewal.settled([worker(1)])
    renewal.ask()
    assert (renewal.outcome, renewal.swap_outcome) == ("", "done")
    assert [renewal.failed("it crashed", 0) for _ in range(2)] == [False, True]
    assert (renewal.outcome, renewal.swap_outcome) == ("it crashed", "done")


def test_given_a_background_renewal_that_was_given_up_when_the_next_comes_then_it_replaces_every_worker():
    renewal = Renewal(SETUP)
    renewal.ask()
    replacement = started(renewal.kit(candidate=False))
    renewal.give_up("no memory")
    renewal.ask()
    assert renewal.outdated([replacement]) is replacement


def test_given_a_failed_capture_when_the_next_worker_starts_then_it_has_no_graphs_and_those_of_other_kits_have(
    renewal,
):
    renewal.without_graphs(renewal.kit(candidate=True).number)
    assert renewal.kit(candidate=True).setup.without_graphs
    assert not renewal.kit(candidate=False).setup.without_graphs
    renewal.give_up("it crashed")
    renewal.without_graphs(renewal.kit(candidate=False).number)
    renewal.ask()
    assert [renewal.kit(candidate=each).setup.without_graphs for each in (True, False)] == [True, True]


class Renewals(RuleBasedStateMachine):
    """A pool of two on paper.

    Workers die, candidates die or take a place, packages are built and swapped in.
    """

    def __init__(self):
        super().__init__()
        self.renewal = Renewal(replace(SETUP, packages=("0",)))
        # packages that were built in the background; a worker knows those from before its start
        self.built = 0
        self.workers = [self.start(candidate=False) for _ in range(2)]
        self.candidate = None
        self.now_ns = 0
        self.packages = 0
        self.proven = 0  # the package that served last as a candidate's
        self.swapping = False

    def start(self, *, candidate):
        found = started(self.renewal.kit(candidate=candidate))
        found.knows = self.built
        return found

    @rule(number=st.integers(0, 1))
    def a_worker_dies_and_is_replaced_later(self, number):
        self.workers[number] = None

    @rule()
    def dead_workers_are_replaced(self):
        self.workers = [each or self.start(candidate=False) for each in self.workers]

    @rule()
    def a_package_is_built_in_the_background(self):
        self.built += 1
        self.renewal.ask()

    @rule()
    def a_swap_is_asked_for(self):
        self.packages += 1
        busy = not self.renewal.outcome
        assert self.renewal.swap(replace(SETUP, packages=(str(self.packages),), swapped=0)) is not busy
        if busy:
            self.packages -= 1
        else:
            self.swapping = True

    @rule(seconds=st.integers(1, 10))
    def the_crew_takes_a_step(self, seconds):
        self.now_ns += seconds * NS_PER_S
        if self.candidate is not None and self.renewal.is_over(self.candidate, self.workers):
            self.candidate = None
        elif self.candidate is None:
            if self.renewal.wants_candidate(self.workers, self.now_ns):
                self.candidate = self.start(candidate=True)
            else:
                self.renewal.settled(self.workers)

    @precondition(lambda self: self.candidate is not None)
    @rule()
    def the_candidate_takes_a_place(self):
        outdated = self.renewal.outdated(self.workers)
        if outdated is None or self.renewal.is_over(self.candidate, self.workers):
            return
        assert self.candidate.generation > outdated.generation
        self.workers[self.workers.index(outdated)] = self.candidate
        self.proven = int(self.candidate.packages[0])
        self.candidate = None
        self.renewal.took_a_place()

    @precondition(lambda self: self.candidate is not None)
    @rule()
    def the_candidate_dies(self):
        self.candidate = None
        self.renewal.failed("it crashed", self.now_ns)

    @precondition(lambda self: self.candidate is not None)
    @rule()
    def an_error_of_ours_ends_it(self):
        self.renewal.give_up("an error in the node")

    @invariant()
    def no_worker_is_started_with_an_unproven_package_but_a_candidate(self):
        assert self.renewal.kit(candidate=False).setup.packages == (str(self.proven),)
        assert self.renewal.proven.setup.packages == (str(self.proven),)

    @invariant()
    def a_swap_is_done_only_if_its_package_is_proven_and_refused_only_with_a_reason(self):
        said = self.renewal.swap_outcome
        if said == "done" and self.swapping:
            assert self.proven == self.packages
        if said:
            self.swapping = False
        assert said or not self.renewal.outcome

    @invariant()
    def a_renewal_that_is_done_leaves_no_worker_with_an_older_package(self):
        if self.renewal.outcome == "done":
            there = [each for each in self.workers if each is not None]
            assert {(int(each.packages[0]), each.knows) for each in there} <= {(self.proven, self.built)}


TestRenewals = Renewals.TestCase
TestRenewals.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
