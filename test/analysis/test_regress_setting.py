import pytest

from torchperf_ros.analysis.regress_effect import Margin, MinEffects
from torchperf_ros.analysis.regress_limit import Limits
from torchperf_ros.analysis.regress_metric import COMPILE, MISS, P50, P99
from torchperf_ros.core.errors import ConfigError


def test_given_a_yaml_file_when_read_then_its_settings_are_as_from_options_which_win(tmp_path):
    path = tmp_path / "effects.yaml"
    path.write_text("p99: 4%\nperception: {miss: 1pp, p50: '2%,0.2ms'}\n", encoding="utf-8")
    effects = MinEffects(["perception.p50=1ms"], path)

    assert effects.margin("planning", P99) == Margin(0.04, 0.0)
    assert effects.margin("perception", MISS).of(0.0) == 1.0
    assert effects.margin("perception", P50) == Margin(0.0, 1.0)
    assert MinEffects([], path).margin("perception", P50) == Margin(0.02, 0.2)
    assert effects.margin("planning", MISS).of(0.0) == 0.1


@pytest.mark.parametrize("text", ["- p99", "{p99: ", "p99: 2024-13-45", "p99: !!int abc", None])
def test_given_a_file_that_is_none_when_read_then_the_message_names_it(tmp_path, text):
    path = tmp_path / "effects.yaml"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"--min-effects .*effects\.yaml.*'p99: 3%'"):
        MinEffects([], path)
    with pytest.raises(ConfigError, match=r"--limits .*effects\.yaml.*'miss: 1%'"):
        Limits([], path)


@pytest.mark.parametrize("text", ["p98: 3%", "perception: {p99: 3}", "p99: null", "p99: [1ms]", "p99: {p99: {}}"])
def test_given_a_file_with_a_setting_that_is_none_when_read_then_the_message_names_file_and_setting(tmp_path, text):
    path = tmp_path / "gate.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"^--limits .*gate\.yaml: .*(p98|p99)"):
        Limits([], path)


def test_given_a_stage_for_a_metric_of_the_whole_run_when_read_then_it_is_refused():
    with pytest.raises(
        ConfigError, match=r"'perception.compile=2s': compile is of the whole run.*has to be compile=2s"
    ):
        Limits(["perception.compile=2s"])


def test_given_settings_when_asked_for_their_places_then_each_stage_has_its_metrics_and_the_run_its_own():
    limits = Limits(["miss=1%", "perception.p99=40ms", "compile=60s"])

    assert limits.places(["perception", "lanes"]) == {
        ("perception", MISS), ("lanes", MISS), ("perception", P99), ("", COMPILE)
    }  # fmt: skip
