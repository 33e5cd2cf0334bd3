from torchperf_ros.api.outcome import Fallback, Health, Outcome


def test_given_the_words_of_the_topics_when_indexed_then_their_order_is_the_published_one():
    assert [outcome.word for outcome in Outcome] == [
        "on_time",
        "late",
        "error",
        "invalid",
        "crashed",
        "hung",
        "bad_input",
        "starting",
        "partial",
    ]
    assert [fallback.word for fallback in Fallback] == ["backup", "hold_last", "stop", "none"]
    assert [health.name for health in Health] == ["STARTING", "WAITING", "NOMINAL", "DEGRADED", "SAFE_STOP"]
    for words in (Outcome, Fallback, Health):
        assert [member.value for member in words] == list(range(len(words)))
