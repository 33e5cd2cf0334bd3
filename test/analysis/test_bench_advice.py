import pytest

from torchperf_ros.analysis.bench_advice import advise
from torchperf_ros.analysis.bench_case import Case, Result


@pytest.fixture
def advice(make_figures):
    def of(*rows):
        """Advice for (batch, engine, arguments of the figures) of one tier."""
        return advise([
            Result(Case("full", batch, engine), None, rest) if isinstance(rest, str)
            else Result(Case("full", batch, engine), make_figures(**rest))
            for batch, engine, rest in rows
        ])  # fmt: skip

    return of


def test_given_engines_when_one_is_clearly_faster_then_it_is_named_with_its_figures(advice):
    said = advice((1, "eager", {}), (1, "compile", {"p50_ms": 8.0}), (1, "aoti", {"p50_ms": 5.0}))
    assert said == ["full, batch 1: engine aoti: p50 5 ms against 10 in eager, 2.00 times eager; compile 1.25"]


def test_given_engines_when_none_is_clearly_faster_then_eager_stays_and_it_says_why(advice):
    slow_tail = {"p50_ms": 6.0, "usual_p99_ms": 24.0}
    said = advice((1, "eager", {}), (1, "compile", {"p50_ms": 9.8}), (1, "aoti", slow_tail))
    assert said == [
        "full, batch 1: stay with eager (p50 10 ms): compile is 1.02 times eager",
        "full, batch 1: stay with eager (p50 10 ms): aoti is 1.67 times eager, with a p99 2.00 times as long",
    ]


def test_given_another_mood_of_the_machine_when_eager_was_measured_alone_then_each_process_own_eager_decides(advice):
    said = advice((1, "eager", {"p50_ms": 5.0, "eager_p50_ms": 5.0}), (1, "aoti", {"p50_ms": 8.0, "eager_p50_ms": 16}))
    assert "engine aoti: p50 8 ms against 16 in eager, 2.00 times eager" in said[0]


def test_given_a_long_compilation_when_advised_then_it_is_said_how_long_and_what_to_do(advice):
    aoti = {"p50_ms": 5.0, "compile_s": 14.0, "cold_start_s": 17.0}
    assert advice((1, "eager", {}), (1, "aoti", aoti))[1] == (
        "full, batch 1: 14 s of the 17 s cold start go into compiling: compile ahead with `torchperf compile`"
    )
    assert "aoti can be compiled ahead" in advice((1, "eager", {}), (1, "compile", aoti))[1]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"warm_up_ms": (90.0, 80.0, 70.0, 10.0)}, "3 calls until it is warm, the first 90 ms against a p50 of 10"),
        ({"usual_p99_ms": 25.0}, "p99 25 ms is 2.5 times p50"),
    ],
)
def test_given_eager_with_a_flaw_when_advised_then_it_is_named_with_its_figures(advice, changes, words):
    (said,) = advice((1, "eager", changes))
    assert words in said


def test_given_more_memory_than_eager_when_advised_then_both_figures_are_named(advice):
    said = advice((1, "eager", {}), (1, "aoti", {"p50_ms": 5.0, "peak_mib": 361.0}))
    assert "aoti needs 361 MiB at its peak, compiling included, eager 300" in said[1]
    assert len(advice((1, "eager", {}), (1, "aoti", {"p50_ms": 5.0, "peak_mib": 359.0}))) == 1


def test_given_batches_when_a_larger_one_gives_more_then_gain_and_price_are_named(advice):
    said = advice((1, "eager", {}), (4, "eager", {"p50_ms": 20.0, "eager_p50_ms": 20.0, "reference_p50_ms": 10.0}))
    assert said == [
        "full: batch 4 pays for inputs that come together, an answer takes 2.0 times as long: items/s, as multiples of"
        " eager's with the adapter's own example: 1.00 at batch 1, 2.00 at batch 4"
    ]


def test_given_batches_when_none_gives_much_more_then_it_says_so(advice):
    said = advice((1, "eager", {}), (2, "eager", {"p50_ms": 18.0, "eager_p50_ms": 18.0, "reference_p50_ms": 10.0}))
    assert said == [
        "full: larger batches do not pay: items/s, as multiples of eager's with the adapter's own example:"
        " 1.00 at batch 1, 1.11 at batch 2"
    ]


def test_given_a_slow_mood_of_the_machine_in_one_process_when_advised_then_it_makes_no_batch_pay(advice):
    slow = {"p50_ms": 40.0, "eager_p50_ms": 40.0, "reference_p50_ms": 40.0}
    said = advice((1, "eager", slow), (2, "eager", {"p50_ms": 20.0, "eager_p50_ms": 20.0, "reference_p50_ms": 10.0}))
    assert said[0].startswith("full: larger batches do not pay")


def test_given_a_case_without_figures_when_advised_then_its_reason_is_named_and_the_rest_still_counts(advice):
    said = advice((1, "eager", {}), (1, "compile", "no C++ compiler"), (1, "aoti", {"p50_ms": 5.0}))
    assert said[0] == "full, batch 1: compile was left out: no C++ compiler"
    assert said[1].startswith("full, batch 1: engine aoti")
    assert advice((1, "eager", "no")) == ["full, batch 1: eager was left out: no"]


def test_given_no_eager_when_advised_then_the_measurement_of_it_beside_the_engine_stands_in(advice):
    assert "2.00 times eager" in advice((1, "aoti", {"p50_ms": 5.0}))[0]
    assert len(advice((1, "aoti", {"p50_ms": 10.0}))) == 1
