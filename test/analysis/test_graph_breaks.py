"""The nine kinds of code that break graphs: what is found in them, and nothing in what they should be."""

import math
import sys
from pathlib import Path

import pytest
import torch

from torchperf_ros.analysis.break_category import Category
from torchperf_ros.analysis.compiler_trace import TraceEvent
from torchperf_ros.analysis.graph_breaks import innermost_users, parse_break, read_frames
from torchperf_ros.analysis.graph_capture import GraphCapture
from torchperf_ros.analysis.inspected_model import InspectError

from .conftest import SAMPLES, breaking_line

BAD = {
    "value_if_bad": Category.BRANCH,
    "ItemBad": Category.SCALAR,
    "element_loop_bad": Category.LOOP,
    "report_bad": Category.PRINT,
    "logging_bad": Category.PRINT,
    "numpy_bad": Category.FOREIGN,
    "count_bad": Category.LOOP_COUNT,
    "count_while_bad": Category.LOOP_COUNT,
    "NormBad": Category.BRANCH,
    "dynamic_shape_bad": Category.DYNAMIC_SHAPE,
    "print_in_loop_bad": Category.PRINT,
    "open_bad": Category.UNSUPPORTED,
    "sleep_bad": Category.UNSUPPORTED,
}
GOOD = [
    "value_if_good", "ItemGood", "element_loop_good", "report_good", "numpy_good", "count_good", "NormGood",
    "shape_if_bad", "shape_if_good", "subsample_bad", "subsample_good", "numpy_traced", "element_loop_unrolled",
]  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_given_code_that_breaks_when_inspected_then_line_and_category_are_right(inspect_sample, name):
    inspection = inspect_sample(name)
    assert [(item.line.line, item.category) for item in inspection.breaks] == [(breaking_line(name), BAD[name])]
    found = inspection.breaks[0]
    assert found.line.file == str(SAMPLES)
    assert "# breaks" in found.line.text
    assert found.underline.strip("^~ ") == ""
    assert found.underline.strip()
    assert len(found.underline) <= len(found.line.text.partition("  #")[0])
    assert found.reasons[0].startswith(found.title)
    assert inspection.failure == ""
    assert inspection.exit_status(0) == 1
    assert inspection.exit_status(1) == 0


@pytest.mark.parametrize("name", GOOD)
def test_given_code_without_a_break_when_inspected_then_it_is_one_graph(inspect_sample, name):
    inspection = inspect_sample(name)
    assert inspection.breaks == []
    assert len(inspection.graphs) == 1
    assert inspection.exit_status(0) == 0


def test_given_a_break_in_a_called_function_when_inspected_then_it_is_one_break_that_splits_both(inspect_sample):
    inspection = inspect_sample("NormBad")
    assert inspection.breaks[0].function == "pick"
    assert inspection.breaks[0].splits == ["forward", "pick"]
    assert len(inspection.graphs) == 3


def test_given_a_break_in_a_loop_when_inspected_then_the_whole_function_is_left_uncompiled(inspect_sample):
    inspection = inspect_sample("print_in_loop_bad")
    assert inspection.breaks[0].whole_function
    assert inspection.graphs == []


def test_given_a_break_in_the_standard_library_when_inspected_then_the_users_line_that_led_there_is_named(
    inspect_sample,
):
    found = inspect_sample("logging_bad").breaks[0]
    assert "LOG.warning" in found.line.text
    assert found.splits == ["logging_bad"]


def test_given_a_split_model_when_measured_then_times_of_graphs_and_gaps_are_parts_of_the_whole(inspect_sample):
    inspection = inspect_sample("value_if_bad")
    timing = inspection.timings[0]
    assert set(timing.graph_ms) == {0, 1}
    assert set(timing.gap_ms) == {-1, 0, 1}
    assert 0 < timing.between_ms < timing.compiled_ms
    assert inspection.breaks[0].gap_ms == timing.gap_ms[0] > 0
    assert all(graph.ms == timing.graph_ms[graph.index] > 0 for graph in inspection.graphs)
    assert timing.eager_ms > 0


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python says the columns from 3.11 on")
def test_given_a_part_of_a_line_that_breaks_when_shown_then_only_it_is_underlined(inspect_sample):
    found = inspect_sample("ItemBad").breaks[0]
    marked = "".join(c for c, mark in zip(found.line.text, found.underline, strict=False) if mark in "^~")
    assert marked == "y.max().item()"


def test_given_ops_when_counted_then_each_graph_has_its_own(inspect_sample):
    first, second = inspect_sample("value_if_bad").graphs
    assert first.op_counts() == {"relu": 1, "sum": 1, "gt": 1}
    assert second.op_counts() == {"mul": 1}


def test_given_breaks_in_turn_when_placed_then_each_stands_after_the_graph_that_ran_before_it(inspect_sample):
    inspection = inspect_sample("breaks_in_turn")
    places = {item.line.text.partition("  #")[0]: item.gaps for item in inspection.breaks}
    assert places == {"print(x.max().item())": [0], "scale = y.max().item()": [1]}


def test_given_a_model_that_raises_only_when_compiled_when_inspected_then_that_is_a_failure(inspect_sample):
    inspection = inspect_sample("raises_when_compiled")
    if not inspection.failure:
        pytest.skip(f"torch {torch.__version__} compiles this")
    assert "raises TypeError" in inspection.failure
    assert math.isnan(inspection.timings[0].compiled_ms)
    assert inspection.timings[0].eager_ms > 0
    assert inspection.exit_status(None) == 1


def test_given_a_model_that_raises_when_compiled_again_when_inspected_then_that_is_a_failure(
    inspect_sample, monkeypatch
):
    measure = GraphCapture.measure

    def fail_compiled(self, eager, compiled, inputs):
        if compiled is not None:
            raise RuntimeError("compiled too often")
        return measure(self, eager, compiled, inputs)

    monkeypatch.setattr(GraphCapture, "measure", fail_compiled)
    inspection = inspect_sample("value_if_good")
    assert "run again" in inspection.failure
    assert "compiled too often" in inspection.failure
    assert inspection.timings[0].eager_ms > 0


def test_given_a_model_that_runs_only_once_when_inspected_then_it_is_said_that_it_cannot_be(inspect_sample):
    with pytest.raises(InspectError, match="already used"):
        inspect_sample("runs_once")


TEXT = f"""Graph break in user code at /usr/lib/python3/json.py:9
Graph Break Reason: Failed to handle graph break gracefully. Skipping it. Graph break encountered:

Data dependent operator
  Explanation: Its value depends on data.
  Hint: Do not.

Stack variable source attribution:
    more

User code traceback:
  File "{SAMPLES}", line 17, in value_if_bad
    if y.sum() > 0:  # breaks
       ^^^^^^^^^^^
  File "{torch.__file__}", line 9, in sum
    return 1

Traceback (most recent call last):
  File "/elsewhere.py", line 1, in not_this
"""


def test_given_the_compilers_text_when_read_then_introduction_attribution_and_its_own_stack_are_left_out():
    raw = parse_break(TraceEvent("dynamo_graph_break_reason", "3/1", {}, TEXT), after_graph=2, input_set=1)
    assert raw.reason == "Data dependent operator\n  Explanation: Its value depends on data.\n  Hint: Do not."
    assert raw.whole_function
    assert (raw.compile_id, raw.after_graph, raw.input_set) == ("3/1", 2, 1)
    assert [frame.line for frame in raw.stack] == [17, 9]
    users = innermost_users(raw.stack)
    assert (users.line, users.function, users.underline) == (17, "value_if_bad", "   ^^^^^^^^^^^")


def test_given_text_without_a_stack_when_read_then_the_place_in_its_first_line_is_used():
    text = "Graph break in user code at /robot/net.py:31\nGraph Break Reason: call_method item\n"
    raw = parse_break(TraceEvent("dynamo_graph_break_reason", "0/0", {}, text), 0, 0)
    assert (raw.stack[0].file, raw.stack[0].line, raw.reason) == ("/robot/net.py", 31, "call_method item")
    assert not raw.whole_function


def test_given_the_text_of_an_older_torch_when_read_then_the_reason_is_found():
    text = "Graph break in user code at /robot/net.py:31\nReason: Unsupported: call_method item\n"
    raw = parse_break(TraceEvent("dynamo_graph_break_reason", "0/0", {}, text), 0, 0)
    assert raw.reason == "Unsupported: call_method item"


def test_given_a_model_kept_from_the_compiler_when_inspected_then_that_is_the_break_and_not_what_calls_it(
    inspect_sample,
):
    (found,) = inspect_sample("disabled").breaks
    assert "torch.compiler.disable" in found.title
    assert found.line.file.startswith(str(Path(torch.__file__).parent))


def test_given_a_model_without_any_operation_when_gated_then_no_breaks_are_no_pass(inspect_sample):
    inspection = inspect_sample("idle")
    assert (inspection.breaks, inspection.graphs) == ([], [])
    assert "no graph" in inspection.doubt
    assert inspection.exit_status(0) == 1
    assert inspection.exit_status(None) == 0


def test_given_no_traceback_when_read_then_there_are_no_frames():
    assert read_frames("") == []
    assert innermost_users([]) is None
