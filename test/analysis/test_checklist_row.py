import pytest

from torchperf_ros.analysis.checklist_row import Advice, Row, changes, keep_one
from torchperf_ros.worker.parity import Parity
from torchperf_ros.worker.stopwatch import Timing


def timing(ms):
    return Timing((ms,) * 20)


def row(name="bf16", value="bf16", on=False, before=10.0, after=10.0, **more):
    return Row(name, "precision", value, "fp32", on, without=timing(before), with_=timing(after), **more)


@pytest.mark.parametrize(
    ("given", "advice", "verdict"),
    [
        (row(after=8.0), Advice.TURN_ON, "turn on: `precision: [bf16]`"),
        (row(after=8.0, on=True), Advice.KEEP, "keep on"),
        (row(after=11.0), Advice.LEAVE_OFF, "leave off: 10 % slower"),
        (row(after=11.0, on=True), Advice.TURN_OFF, "turn off: 10 % slower"),
        (row(after=9.9), Advice.NOISE, "within noise: 2.0 %"),
        (row(after=10.1, on=True), Advice.NOISE, "within noise: 2.0 %"),
        (row(after=8.0, noise=0.25), Advice.NOISE, "within noise: 25.0 %"),
        (row(after=5.0, refused="parity: far"), Advice.REFUSED, "refused: parity: far"),
        (row(after=5.0, refused="parity: far", on=True), Advice.TURN_OFF, "turn off: parity: far"),
        (row(after=5.0, why_not="CUDA only"), Advice.NONE, ""),
        (row(after=5.0, why_not="CUDA only", on=True), Advice.TURN_OFF, "turn off: CUDA only"),
        (row(after=5.0, remark="fp16 gains more"), Advice.LEAVE_OFF, "leave off: fp16 gains more"),
        (row(after=5.0, remark="fp16 gains more", on=True), Advice.TURN_OFF, "turn off: fp16 gains more"),
        (row(after=11.0, remark="no core is left"), Advice.LEAVE_OFF, "leave off: 10 % slower"),
        (row(after=5.0, skipped="not with fp16"), Advice.NONE, "not with fp16"),
        (Row("aoti", "engine", "aoti", "eager", True, skipped="not measured"), Advice.NONE, "not measured"),
    ],
)
def test_given_figures_when_ruled_then_the_verdict_is(given, advice, verdict):
    assert (given.advice, given.verdict) == (advice, verdict)


def test_given_rows_when_asked_for_changes_then_only_what_is_turned_on_or_off_is_one():
    rows = [
        Row("channels_last", "channels_last", True, False, True, without=timing(10.0), with_=timing(12.0)),
        Row("fold", "fold_batch_norm", True, False, False, without=timing(10.0), with_=timing(10.0)),
        Row("pinned copies", "", True, False, True, without=timing(10.0), with_=timing(12.0)),
        row(after=5.0),
    ]
    assert changes(rows) == {"channels_last": False, "precision": "bf16"}


def test_given_a_value_to_turn_off_and_another_to_turn_on_when_asked_for_changes_then_the_parameter_is_turned_on():
    assert changes([row(after=5.0), row("fp16", "fp16", True, after=20.0)]) == {"precision": "bf16"}


def test_given_several_values_that_gain_when_one_is_kept_then_it_is_the_fastest_and_the_others_say_so():
    kept = keep_one([row(after=6.0), row("fp16", "fp16", after=5.0), row("int8", "int8", after=12.0)])
    assert [r.verdict for r in kept] == [
        "leave off: fp16 gains more",
        "turn on: `precision: [fp16]`",
        "leave off: 20 % slower",
    ]


@pytest.mark.parametrize(("other_ms", "kept"), [(5.95, "bf16"), (5.0, "fp16")])
def test_given_one_that_is_on_when_another_is_faster_then_it_goes_only_for_more_than_the_noise(other_ms, kept):
    rows = keep_one([row(on=True, after=6.0), row("fp16", "fp16", after=other_ms)])
    assert changes(rows).get("precision", "bf16") == kept


def test_given_none_that_gains_when_one_is_kept_then_the_rows_are_as_before():
    rows = [row(), row("fp16", "fp16", after=20.0)]
    assert keep_one(rows) == rows


def test_given_a_row_when_written_as_json_then_figures_and_verdict_are_there():
    found = row(after=8.0, parity=Parity(0.01, 0.999, 0.02), noise=0.01).as_dict()
    assert found["without"]["p50_ms"] == 10.0
    assert found["with"]["p99_ms"] == 8.0
    assert found["gain"] == pytest.approx({"saved": 0.2, "low": 0.2, "high": 0.2})
    assert found["parity"]["relative_l2"] == 0.01
    assert (found["advice"], found["applies"], found["on_now"]) == ("turn on", True, False)
