from torchperf_ros.core.anomaly.season import Season


def test_given_three_visits_when_the_slot_comes_round_then_their_median_is_usual():
    season = Season(period_s=10.0, slots=5)
    for cycle, level in enumerate([1.0, 500.0, 2.0]):
        assert season.usual(cycle * 10.0) is None
        for step in range(10):
            season.learn(cycle * 10.0 + step, level + step // 2)

    assert [season.usual(30.0 + step) for step in (0, 1, 2, 5)] == [2.0, 2.0, 3.0, 4.0]


def test_given_a_visit_that_goes_on_when_asked_then_it_is_not_part_of_what_is_usual():
    season = Season(10.0, 2)
    for cycle in range(3):
        season.learn(cycle * 10.0, 1.0)
        season.learn(cycle * 10.0 + 5.0, 9.0)
    for step in range(5):
        season.learn(30.0 + 0.1 * step, 77.0)

    assert season.usual(31.0) == 1.0


def test_given_more_than_seven_visits_when_the_usual_changes_then_it_is_followed():
    season = Season(10.0, 2)
    for level in [1.0] * 20 + [3.0] * 5:
        season.learn(0.0, level)
        season.learn(5.0, 0.0)

    assert season.usual(0.0) == 3.0


def test_given_any_time_when_asked_then_there_is_a_slot():
    season = Season(86_400.0, 96)
    for time_s in (-1e-12, -5e18, 1e300, 86_399.999_999_999_99, 0.0):
        season.learn(time_s, 1.0)
        assert season.usual(time_s) is None
