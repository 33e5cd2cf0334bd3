import re
from pathlib import Path

import pytest

from torchperf_ros.config.config import node_config
from torchperf_ros.config.params_file import parse_value, read_params_file
from torchperf_ros.frame.errors import ConfigError

SHIPPED = Path(__file__).resolve().parents[2] / "config" / "perception.yaml"


@pytest.fixture
def read(tmp_path):
    def reader(text):
        path = tmp_path / "params.yaml"
        path.write_text(text, encoding="utf-8")
        return read_params_file(path)

    return reader


def test_given_the_shipped_file_when_read_then_it_is_the_defaults():
    assert read_params_file(SHIPPED) == node_config({}, {})


@pytest.mark.parametrize("name", ["perf", "/perf", "/**", "/**/perf", "/robot/perf", '"**"', "robot: {perf"])
def test_given_a_name_that_stands_for_the_node_when_read_then_its_values_count(read, name):
    nested = "}" if "{" in name else ""
    assert read(f"{name}: {{ros__parameters: {{metrics_port: 7}}}}{nested}").metrics_port == 7


def test_given_several_entries_when_read_then_the_later_wins_and_other_nodes_do_not_count(read):
    text = """
/**: {ros__parameters: {metrics_port: 1, worker_threads: 3}}
/perf: {ros__parameters: {metrics_port: 2}}
/camera: {ros__parameters: {metrics_port: 9}}
"""
    config = read(text)
    assert (config.metrics_port, config.worker_threads) == (2, 3)


def test_given_stages_nested_and_dotted_when_read_then_both_are(read):
    text = """
/**/perf:
  ros__parameters:
    perception: {engine: eager, channels_last: yes}
    planning.precision: [bf16, fp32, fp32]
"""
    perception, planning = read(text).stages
    assert (perception.engine, perception.channels_last) == ("eager", True)
    assert planning.precision == ("bf16", "fp32", "fp32")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n- b\n", "has no entry for the node 'perf'; it has to be like"),
        ("", "has no entry for the node 'perf'"),
        ("/camera: {ros__parameters: {a: 1}}", "has no entry for the node 'perf'"),
        ("a: [", "is not YAML"),
        ("perf: {ros__parameters: {stages: 3}}", "parameter stages: 3 is an integer; it has to be a list"),
        ("perf: {ros__parameters: {perception: {engine: fast}}}", "perception.engine: 'fast' is not allowed"),
    ],
)
def test_given_a_file_that_is_wrong_when_read_then_the_error_says_what(read, text, message):
    with pytest.raises(ConfigError, match=message):
        read(text)


def test_given_no_file_when_read_then_the_error_names_it(tmp_path):
    with pytest.raises(ConfigError, match=r"parameter file .*absent\.yaml: cannot be read"):
        read_params_file(tmp_path / "absent.yaml")


@pytest.mark.parametrize("text", ["2024-13-45", "!!int abc", "!!float x", "!!timestamp x", "[1,"])
def test_given_a_value_that_does_not_fit_its_tag_when_read_then_the_error_names_the_parameter(read, text):
    with pytest.raises(ConfigError, match=r"parameter perception\.engine: .* is not YAML"):
        parse_value("perception.engine", text)
    with pytest.raises(ConfigError, match="is not YAML"):
        read(f"perf: {{ros__parameters: {{metrics_port: {text}}}}}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{buget_ms: 20.0}", "parameter buget_ms: is unknown; the closest names are perception.budget_ms"),
        ("{metrics_prt: 0}", "parameter metrics_prt: is unknown; the closest names are metrics_port"),
        (
            "{stages: [perception], percetion: {budget_ms: 20.0}}",
            "parameter percetion.budget_ms: stage percetion is none of the stages that run, perception",
        ),
        ("{perception: {buget_ms: 20.0}}", "the closest names are perception.budget_ms"),
    ],
)
def test_given_a_misspelt_name_when_read_then_it_is_refused_with_the_nearest(read, text, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        read(f"perf: {{ros__parameters: {text}}}")


@pytest.mark.parametrize("text", ["{perception: {worker: own}}", "{stages: [planning], perception.worker: shared}"])
def test_given_where_workers_run_when_read_then_it_is_refused_with_what_replaces_it(read, text):
    with pytest.raises(ConfigError, match="parameter perception.worker: is gone, as each worker is a process of its"):
        read(f"perf: {{ros__parameters: {text}}}")


def test_given_parameters_of_a_stage_that_does_not_run_when_read_then_they_do_not_matter(read):
    text = "perf: {ros__parameters: {stages: [perception], use_sim_time: true, planning: {budget_ms: 20.0}}}"
    assert [stage.name for stage in read(text).stages] == ["perception"]
