import pytest
from ruamel.yaml import YAML

from torchperf_ros.analysis.parameter_snippet import parameter_snippet, yaml_value
from torchperf_ros.core.config import stage_config
from torchperf_ros.core.params_file import read_params_file

CHANGES = {"engine": "compile", "precision": "bf16", "channels_last": True, "worker_threads": 3}
OWN = {"adapter": "my_robot.segmenter:Segmenter", "output": "labels", "tiers": ["on", "b-c"],
       "options": '{"note": "it\'s: [x]"}'}  # fmt: skip


def read(tmp_path, text):
    path = tmp_path / "params.yaml"
    path.write_text(text, encoding="utf-8")
    return read_params_file(path)


def test_given_a_stage_that_the_node_knows_when_written_then_the_node_takes_it_and_other_tiers_stay(tmp_path):
    text = parameter_snippet(stage_config("planning", {}), 1, CHANGES, complete=True)
    node = read(tmp_path, text)
    planning = node.stages[1]
    assert node.worker_threads == 3
    assert (planning.engine, planning.channels_last, planning.precision) == ("compile", True, ("fp32", "bf16", "fp32"))
    assert "adapter" not in text


def test_given_a_stage_of_ones_own_when_written_then_the_node_takes_it_without_another_file(tmp_path):
    stage = stage_config("model", OWN)
    node = read(tmp_path, parameter_snippet(stage, 1, CHANGES, complete=True))
    (found,) = node.stages
    assert (found.adapter, found.options, found.tiers) == (stage.adapter, stage.options, stage.tiers)
    assert found.build_options(1).precision == "bf16"


def test_given_a_file_of_ones_own_when_written_then_only_what_changes_is():
    text = parameter_snippet(stage_config("model", OWN), 0, {"engine": "eager"}, complete=False)
    assert text == "/**/perf:\n  ros__parameters:\n    model:\n      engine: eager\n"


@pytest.mark.parametrize(
    "value",
    [True, False, 3, 0.5, "aoti", "yes", "1.5", "", "a b", "it's", "# no", "{}", ["a", "on"], [1, 2], "null", "1e3"],
)
def test_given_any_value_when_written_then_yaml_reads_the_same(value):
    reader = YAML(typ="safe", pure=True)
    reader.version = (1, 1)
    assert reader.load(f"key: {yaml_value(value)}\n")["key"] == value
