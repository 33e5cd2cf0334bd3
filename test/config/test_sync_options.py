"""Lines of synchronised inputs: what they mean, and what is refused."""

import pytest

from torchperf_ros.config.config import stage_config
from torchperf_ros.config.sync_options import SyncRule, check_sync
from torchperf_ros.frame.errors import ConfigError


def rules(*lines, **values):
    return stage_config("fusion", {"adapter": "a:B", "output": "o", "sync": list(lines), **values}).sync


def test_given_lines_when_read_then_each_is_a_rule_whatever_the_order_of_its_words_and_reads_as_such_a_line():
    found = rules("cloud offset 0 slop 40 wait 15", "", "/radar/points slop 2.5 offset -100")
    assert found == (SyncRule("cloud", 40.0, 0.0, 15.0), SyncRule("/radar/points", 2.5, -100.0))
    assert rules(*map(str, found)) == found


def test_given_nothing_when_read_then_no_input_is_synchronised():
    assert stage_config("fusion", {"adapter": "a:B", "output": "o"}).sync == ()


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("cloud", ["fusion.sync: 'cloud'", "INPUT slop MS"]),
        ("cloud slop", ["'cloud slop'", "INPUT slop MS"]),
        ("cloud wait 5", ["'cloud wait 5'", "INPUT slop MS"]),
        ("cloud slop -1", ["slop -1", "from 0 to 60000 ms"]),
        ("cloud slop 5 wait -1", ["wait -1", "from 0 to 60000 ms"]),
        ("cloud slop 5 offset -1e9", ["offset -1e9", "from -60000 to 60000 ms"]),
        ("cloud slop nan", ["slop nan", "from 0 to 60000 ms"]),
        ("cloud slop soon", ["slop soon", "from 0 to 60000 ms"]),
        ("cloud slop 5 slop 6", ["slop stands there twice"]),
        ("cloud slop 5 queue 3", ["'queue' is not allowed"]),
        ("cloud slop 5 wait 50", ["wait 50", "below the shortest budget, 50 ms"]),
    ],
)
def test_given_a_line_that_means_nothing_when_read_then_the_error_says_what_would(line, parts):
    with pytest.raises(ConfigError) as caught:
        rules(line)
    for part in parts:
        assert part in str(caught.value)


def test_given_a_scene_with_a_shorter_budget_when_a_rule_waits_as_long_then_it_is_refused():
    scenes = {"scenes": ["highway"], "scene.highway.tiers": ["fast"], "scene.highway.budget_ms": 20.0}
    assert rules("cloud slop 5 wait 19", **scenes)
    with pytest.raises(ConfigError, match="below the shortest budget, 20 ms"):
        rules("cloud slop 5 wait 20", **scenes)


def test_given_an_input_in_two_lines_when_read_then_it_is_refused():
    with pytest.raises(ConfigError, match="cloud stands in 2 lines"):
        rules("cloud slop 5", "cloud slop 6")


@pytest.mark.parametrize(
    ("topic", "inputs", "said"),
    [
        ("clout", [("image", True), ("cloud", True)], "the adapter has no input clout; it has: cloud"),
        ("cloud", [("image", True)], "it has: none beside its trigger"),
        ("image", [("image", True), ("cloud", True)], "image is the trigger"),
        ("cloud", [("image", True), ("cloud", False)], "the message type of cloud does not begin with a std_msgs/Hea"),
    ],
)
def test_given_an_adapters_inputs_when_a_rule_is_for_none_that_has_stamps_then_it_is_refused(topic, inputs, said):
    with pytest.raises(ConfigError, match=said):
        check_sync("fusion", rules(f"{topic} slop 5"), inputs)
