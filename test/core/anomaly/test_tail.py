import random

from torchperf_ros.core.anomaly.tail import MOST_SURPRISING, Tail


def trained(departures):
    tail = Tail()
    for departure in departures:
        tail.judge(departure)
    return tail


def test_given_few_samples_when_judged_then_nothing_surprises():
    tail = Tail()
    assert [tail.judge(10.0**power) for power in range(48)] == [0.0] * 48


def test_given_only_zeros_when_something_departs_then_it_is_as_surprising_as_can_be():
    assert trained([0.0] * 100).judge(1e-300) == MOST_SURPRISING


def test_given_rare_events_when_another_comes_then_it_is_rare_and_no_more():
    tail = trained(([0.0] * 199 + [1.0]) * 10)
    assert 1.5 < tail.judge(1.0) < 3.0


def test_given_noise_when_judged_then_surprises_are_as_frequent_as_they_say():
    draw = random.Random(1)
    tail = trained([abs(draw.gauss(0, 1)) for _ in range(4096)])
    surprises = [tail.judge(abs(draw.gauss(0, 1))) for _ in range(20_000)]

    assert 1500 < sum(surprise >= 1 for surprise in surprises) < 2500
    assert 100 < sum(surprise >= 2 for surprise in surprises) < 400
    assert sum(surprise >= 4 for surprise in surprises) < 12


def test_given_heavy_tails_when_judged_then_the_same_holds():
    draw = random.Random(2)
    tail = trained([draw.paretovariate(2) - 1 for _ in range(4096)])
    surprises = [tail.judge(draw.paretovariate(2) - 1) for _ in range(20_000)]

    assert 100 < sum(surprise >= 2 for surprise in surprises) < 400
    assert sum(surprise >= 4 for surprise in surprises) < 30


def test_given_larger_departures_when_judged_then_they_surprise_more():
    judged = [trained([i / 100 for i in range(1000)]).judge(size) for size in (1.0, 5.0, 9.9, 12.0, 50.0, 1e6)]
    assert judged == sorted(judged)
    assert len(set(judged)) == len(judged)


def test_given_one_extreme_when_it_is_learnt_then_the_next_surprises_nearly_as_much():
    tail = trained([abs(random.Random(3).gauss(0, 1)) for _ in range(2000)])
    first, second = tail.judge(60.0), tail.judge(60.0)

    assert first > 4
    assert second > 0.8 * first


def test_given_extremes_that_go_on_when_they_are_learnt_then_they_become_usual():
    tail = trained([abs(random.Random(3).gauss(0, 1)) for _ in range(2000)])
    assert [tail.judge(60.0) for _ in range(300)][-1] < 1.5
