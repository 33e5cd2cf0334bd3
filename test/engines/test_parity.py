import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from torchperf_ros.api.errors import AdapterError
from torchperf_ros.engines.built_tier import drawing_task, judged, scoring_of
from torchperf_ros.engines.parity import (
    LIMITS,
    Parity,
    ParityError,
    Scoring,
    check,
    check_engine,
    measure,
    random_inputs,
)

X = torch.tensor([3.0, 4.0])


def test_given_known_outputs_when_measured_then_the_figures_are_those_of_the_formulas():
    parity = measure(
        {"a": X, "b": (torch.tensor([0.0]),)}, {"a": torch.tensor([3.0, 3.0]), "b": (torch.tensor([0.5]),)}
    )
    assert parity.relative_l2 == pytest.approx(math.sqrt(1.0 + 0.25) / 5.0)
    assert parity.max_error == pytest.approx(
        0.5
    )  # of the second: its expected values are 0, so it counts as it is
    assert str(parity) == "relative L2 0.22, max error 0.5"


@pytest.mark.parametrize(
    ("expected", "found"),
    [
        (X, (X,)),
        ({"a": X, "b": X}, {"b": X, "a": X}),
        (X, X.reshape(1, 2)),
        (X, X.half()),
        ((X, 2), (X, 3)),
        (X[:0], X[:1]),
    ],
)
def test_given_another_structure_type_shape_or_constant_when_measured_then_it_is_refused_with_both(
    expected, found
):
    with pytest.raises(ParityError, match=r"outputs are .*; eager gives "):
        measure(expected, found)


@pytest.mark.parametrize(
    ("expected", "found", "same"),
    [
        (math.nan, math.nan, True),
        (math.inf, math.inf, True),
        (math.inf, -math.inf, False),
        (math.nan, math.inf, False),
        (1.0, math.nan, False),
        (1.0, math.inf, False),
    ],
)
def test_given_values_that_are_not_finite_then_only_the_same_at_the_same_place_are_right(
    expected, found, same
):
    parity = measure(torch.tensor([1.0, expected]), torch.tensor([1.0, found]))
    assert (parity == Parity(0.0, 0.0)) is same
    if not same:
        assert parity == Parity(math.inf, math.inf)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool]
)
def test_given_outputs_of_any_type_when_one_value_differs_then_it_counts(dtype):
    expected, found = torch.ones(4).to(dtype), torch.tensor([1, 1, 1, 0]).to(dtype)
    assert measure(expected, expected).relative_l2 == 0.0
    assert measure(expected, found).relative_l2 == pytest.approx(0.5)


def test_given_a_small_output_beside_a_large_one_when_it_is_wrong_then_it_is_refused():
    large = torch.full((1000,), 1000.0)
    with pytest.raises(ParityError, match="max error 1"):
        check((large, X), (large, torch.zeros(2)), "int8_dynamic")


@pytest.mark.parametrize("precision", LIMITS)
def test_given_a_precision_when_checked_then_its_own_limit_holds(precision):
    limit = LIMITS[precision].relative_l2
    expected = torch.ones(10_000, dtype=torch.float64)
    noise = torch.where(torch.arange(10_000) % 2 == 0, 1.0, -1.0)
    check(expected, expected + 0.9 * limit * noise, precision)
    with pytest.raises(ParityError, match=f"allowed for {precision}: relative L2 {limit:.2g}"):
        check(expected, expected + 1.1 * limit * noise, precision)


def test_given_the_parity_of_an_earlier_version_when_read_then_its_further_figures_do_not_count():
    assert Parity.read({"relative_l2": 0.1, "cosine": 0.9, "max_error": 0.2}) == Parity(0.1, 0.2)


def engine_check(candidate, reference=lambda x: x, **more):
    return check_engine(reference, candidate, (torch.ones(1, 3),), {}, "fp32", **more)


def test_given_engines_when_checked_then_the_worst_of_all_inputs_counts():
    for last, good in ((1e-4, True), (1.0, False)):
        off = iter([0.0, 0.0, 0.0, last])
        if good:
            assert 0 < engine_check(lambda x, off=off: x + next(off)).max_error < 1e-2
        else:
            with pytest.raises(ParityError, match="outputs differ from eager's: relative L2"):
                engine_check(lambda x, off=off: x + next(off))


BASE = torch.full((1, 3), 1e6)


@pytest.mark.parametrize(
    ("candidate", "reference", "words"),
    [
        (lambda x: BASE, lambda x: BASE + x, "do not depend on the inputs"),
        (lambda x: 3, lambda x: 3, "cannot be compared: eager gives 3"),
    ],
    ids=["ignores its inputs", "no tensors"],
)
def test_given_outputs_that_show_nothing_when_checked_then_they_are_refused_though_the_figures_are_good(
    candidate, reference, words
):
    with pytest.raises(ParityError, match=words):
        engine_check(candidate, reference)


@pytest.mark.parametrize(
    ("candidate", "reference"),
    [
        (lambda x: X.clone(), lambda x: X),
        (lambda x: x.add_(1.0).clone(), lambda x: x.add_(1.0).clone()),
        (torch.empty(1, 3).copy_, lambda x: x),
    ],
    ids=["ignores its inputs", "writes to its inputs", "reuses its memory"],
)
def test_given_a_model_or_an_engine_with_a_way_of_its_own_when_checked_then_it_is_compared_as_any_other(
    candidate, reference
):
    assert engine_check(candidate, reference) == Parity(0.0, 0.0)


def same_sign(outputs, reference):
    """The share of values that are on the same side of 0."""
    return float((outputs.sign() == reference.sign()).float().mean())


ANSWERED = (torch.tensor([[1.0, -1.0, 2.0]]),), (torch.tensor([[-1.0, 3.0, -2.0]]),)


def by_sign(candidate, score=same_sign, inputs=ANSWERED):
    return engine_check(candidate, scoring=Scoring(score, lambda: inputs))


def test_given_numbers_beyond_the_limit_when_the_answers_are_the_same_then_the_engine_passes_and_the_score_is_kept():
    parity = by_sign(lambda x: 1.08 * x)
    assert parity.relative_l2 == pytest.approx(0.08)
    assert parity.score == 1.0
    assert by_sign(lambda x: x.clone()).score is None  # numbers were enough
    # A worker that starts in a reduced precision compares less otherwise.
    scoring, again = Scoring(same_sign, lambda: ANSWERED), torch.clone
    assert check_engine(again, again, ANSWERED[0], {}, "fp16", briefly=True, scoring=scoring).score == 1.0


DECIDE = "outputs differ from eager's: relative L2 [^;]*; allowed for fp32: [^;]*$"


@pytest.mark.parametrize(
    ("candidate", "how", "words"),
    [
        (
            lambda x: torch.where(x == 3.0, -x, 1.08 * x),
            {},
            r"relative L2 .* allowed for fp32: .*; the answers' score is 0\.833, at least 0\.995 is needed",
        ),
        (lambda x: 1.08 * x, {"score": lambda outputs, reference: None}, DECIDE),
        (lambda x: 1.08 * x, {"score": lambda outputs, reference: 1.0}, DECIDE),  # it could not fail
        (lambda x: 1.08 * x, {"inputs": ()}, DECIDE),
        (
            lambda x: torch.where(x == 2.0, torch.nan, 1.08 * x),
            {"score": lambda outputs, reference: same_sign(outputs[:, :2], reference[:, :2])},
            r"score is 0\.000",
        ),
    ],
    ids=["one answer differs", "no score", "always 1", "no inputs", "NaN that no answer shows"],
)
def test_given_numbers_beyond_the_limit_when_answers_differ_or_say_nothing_then_the_engine_is_refused(
    candidate, how, words
):
    with pytest.raises(ParityError, match=words):
        by_sign(candidate, **how)


def test_given_an_engine_that_is_known_by_its_score_when_other_sizes_are_checked_then_twice_its_distance_is_allowed():
    known = Parity(0.08, 0.1, score=1.0)
    check(X, 1.15 * X, "fp32", known)
    with pytest.raises(ParityError, match="relative L2 0.17, .* allowed for fp32: relative L2 0.16"):
        check(X, 1.17 * X, "fp32", known)


def test_given_dynamic_dims_when_drawn_then_sizes_lie_in_the_ranges_and_are_shared_as_declared():
    example = (torch.zeros(2, 3, 16, 16), torch.zeros(2, 5), torch.zeros(7))
    dims = {0: {0: (1, 8), 2: (8, 64), -1: (8, 64)}, 1: {-2: (1, 8)}}
    seen = set()
    for seed in range(60):
        image, points, fixed = random_inputs(example, seed, dims)
        assert image.shape[0] == points.shape[0]
        assert 1 <= image.shape[0] <= 8
        assert all(8 <= size <= 64 for size in image.shape[2:])
        assert (image.shape[1], points.shape[1], fixed.shape) == (3, 5, (7,))
        seen.add(image.shape)
    assert len({shape[0] for shape in seen}) == 8
    assert any(shape[2] != shape[3] for shape in seen)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([[5, 9], [7, 7]]),
        torch.tensor([[5, 9]], dtype=torch.int8),
        torch.zeros(40),
        torch.full((40,), 3.0, dtype=torch.float16),
        torch.tensor([1.0, math.nan, math.inf] * 9),
        torch.zeros(0, 3),
        torch.zeros(4, 8, dtype=torch.uint8),
        torch.zeros(9, dtype=torch.bool),
        torch.tensor(2.0),
        torch.zeros(9, dtype=torch.complex64),
        torch.zeros(0, dtype=torch.int32),
        torch.arange(40.0).reshape(5, 8).T,
    ],
)
def test_given_an_input_of_any_type_when_drawn_then_it_is_like_it_and_follows_the_seed(tensor):
    first, again, other = (random_inputs((tensor,), seed)[0] for seed in (1, 1, 2))
    assert (first.dtype, first.shape, first.device) == (tensor.dtype, tensor.shape, tensor.device)
    assert torch.equal(first, again)
    assert tensor.numel() < 4 or not torch.equal(first, other)
    if first.is_floating_point():
        assert torch.isfinite(first).all()
    elif first.dtype in {torch.int64, torch.int8}:
        assert first.min() >= 5
        assert first.max() <= 9


def scoring(loss):
    """Of a task by which every candidate loses so much."""

    def accuracy(call):
        return "map", 0.9 if call is eager else 0.9 - loss

    return Scoring(lambda *_: None, lambda: [(torch.ones(1, 3),)], accuracy, judges=True)


def eager(x):
    return x


def test_given_engines_of_one_tier_when_its_task_judges_them_then_eager_is_asked_once():
    asked = []

    class Task:
        judged = 2

        def judge(self, call, *_):
            asked.append(call)
            return {"map": 0.9 if call is eager else 0.896}

    adapter = SimpleNamespace(training_task=lambda log: Task(), score=None)
    own = scoring_of(adapter, "full", torch.device("cpu"))
    assert [own.loss(eager, x) for x in (abs, min)] == [pytest.approx(0.004)] * 2
    assert asked == [eager, abs, min]


def test_given_numbers_within_the_limits_when_the_task_loses_then_only_fp32_is_not_asked():
    assert check_with(scoring(0.001), "bf16").loss == pytest.approx(0.001)
    with pytest.raises(
        ParityError, match=r"map on held-out examples is 0\.8500, eager's 0\.9000; at most 0\.005 less"
    ):
        check_with(scoring(0.05), "bf16")
    assert check_with(scoring(0.05), "fp32").loss is None


def test_given_figures_that_are_no_number_when_the_task_judges_then_only_where_eager_has_one_the_engine_is_refused():
    with pytest.raises(ParityError, match=r"map on held-out examples is nan, eager's 0\.9000"):
        check_with(scoring(math.nan), "bf16")
    of_none = Scoring(
        lambda *_: None, lambda: [(torch.ones(1, 3),)], lambda _: ("map", math.nan), judges=True
    )
    assert check_with(of_none, "bf16").loss is None


def test_given_a_task_that_raises_when_it_is_asked_then_the_error_says_that_it_is_the_task_and_what_to_do():
    def raises(*_):
        raise KeyError("log")

    cpu = torch.device("cpu")
    with pytest.raises(
        AdapterError, match=r"training_task\(None\) raises KeyError: 'log' .*; it has to give None where"
    ):
        drawing_task(SimpleNamespace(training_task=raises))
    with pytest.raises(AdapterError, match="accuracy: the training task's judge raises KeyError: 'log'"):
        judged(SimpleNamespace(judge=raises), eager, 1, cpu)
    with pytest.raises(AdapterError, match="accuracy: the training task's judge gives no figure"):
        judged(SimpleNamespace(judge=lambda *_: {}), eager, 1, cpu)


def check_with(own, precision, candidate=lambda x: x.clone(), known=None):
    return check_engine(eager, candidate, (torch.randn(1, 64),), {}, precision, scoring=own, known=known)


def test_given_static_int8_when_random_inputs_are_out_of_its_ranges_then_those_of_frames_decide():
    def clipped(x):
        return x.clamp(-0.1, 1.0)

    def scored(score):
        return Scoring(
            lambda outputs, _: score if outputs.equal(frame) else 0.0, lambda: [(frame,)], judges=True
        )

    frame = torch.ones(1, 64)
    with pytest.raises(ParityError, match="outputs differ"):
        check_with(None, "int8_dynamic", clipped)
    with pytest.raises(ParityError, match="outputs differ"):
        check_with(None, "int8_static", clipped)  # the example itself is what frames are like
    found = check_with(scored(0.999), "int8_static", clipped)
    assert (found.relative_l2 > 0.1, found.score) == (True, 0.999)
    check_with(None, "int8_static", clipped, known=found)  # as a worker compares it
    with pytest.raises(ParityError, match="outputs differ"):
        check_with(None, "int8_static", lambda x: -x, known=found)
    with pytest.raises(ParityError, match=r"the answers' score is 0\.980, at least 0\.995 is needed"):
        check_with(scored(0.98), "int8_static", clipped)


@given(
    st.integers(0, 2**31),
    st.integers(0, 100),
    st.booleans(),
    st.sampled_from(["int8_static", "int8_dynamic", "int8_weight"]),
)
@example(0, 1, False, "int8_dynamic")
@example(0, 2, False, "int8_dynamic")
@example(0, 100, True, "int8_static")
def test_given_quantised_classes_when_more_than_one_in_100_is_another_then_numbers_that_are_near_do_not_help(
    seed, swapped, one_class, precision
):
    frame = 5.0 + torch.rand(1, 4, 10, 10, generator=torch.Generator().manual_seed(seed))
    frame = frame.sort(1, descending=True)[0] if one_class else frame
    held_out = Scoring(lambda *_: None, list, held_out=[(frame,), (2.0 * frame,)])

    def near(x):
        """Nearly the same numbers; at so many places the two largest change places."""
        values, order = x.sort(1, descending=True)
        middle = values[:, :2].mean(1, keepdim=True)
        here = torch.arange(100).view(1, 1, 10, 10) < swapped
        values[:, :2] = torch.where(here, torch.cat([middle - 1e-4, middle + 1e-4], 1), values[:, :2])
        return torch.zeros_like(x).scatter(1, order, values)

    def check_near():
        return check_engine(eager, near, (frame,), {}, precision, scoring=held_out)

    if swapped <= 1:
        assert check_near().relative_l2 < LIMITS[precision].relative_l2
    else:
        words = f"answers differ from eager's: of output 0, {100 - swapped}\\.0% of the largest along dimension 1"
        with pytest.raises(ParityError, match=words):
            check_near()


class Classifier(torch.nn.Module):
    """A thousand classes whose scores are near each other; of a picture's means."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.body, self.head = torch.nn.Conv2d(3, 32, 5, 2), torch.nn.Linear(32, 1000)

    def forward(self, image):
        return 3.0 + self.head(torch.relu(self.body(image)).mean((2, 3)))


class NearlyConstant(torch.nn.Module):
    def forward(self, x):
        return 5.0 + 1e-4 * x[:, :1]


class Indices(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(500, 1, padding_idx=0)

    def forward(self, indices):
        return self.table(indices).mean(1)


IMAGES = torch.zeros(1, 3, 32, 32), torch.ones(1, 3, 32, 32), torch.rand(1, 3, 32, 32)
WEAK = {
    "a classifier whose scores are near": (Classifier, IMAGES, "of the largest along dimension 1"),
    "answers that nearly are one": (
        NearlyConstant,
        (torch.zeros(1, 4), X[None]),
        "do not depend|is off by",
    ),
    "indices that are all 0": (Indices, (torch.zeros(1, 12, dtype=torch.long),), "nothing shows"),
}


@pytest.mark.parametrize("case", WEAK)
def test_given_numbers_that_are_near_when_other_answers_come_in_a_reduced_precision_then_it_is_refused(
    case,
):
    kind, examples, words = WEAK[case]
    model = kind().eval()

    def rounded(x):  # as bf16 answers
        return model(x).bfloat16().float()

    for of in examples:
        with torch.inference_mode():
            assert measure(model(of), rounded(of)).within(LIMITS["bf16"])
            with pytest.raises(ParityError, match=words):
                check_engine(model, rounded, (of,), {}, "bf16")
            check_engine(model, lambda x: model(x).clone(), (of,), {}, "fp32")


def test_given_frames_when_answers_in_a_reduced_precision_are_those_of_eager_then_they_pass():
    frames = [(torch.randint(1, 500, (1, 12)),) for _ in range(4)]
    model, of_frames = Indices().eval(), Scoring(lambda *_: None, list, held_out=frames)
    example = (torch.zeros(1, 12, dtype=torch.long),)
    with torch.inference_mode():
        check_engine(model, lambda x: model(x).bfloat16().float(), example, {}, "bf16", scoring=of_frames)


def test_given_a_task_that_judges_later_when_single_choices_on_drawn_inputs_differ_then_numbers_decide():
    model = Classifier().eval()
    with torch.inference_mode():
        check_engine(
            model, lambda x: model(x).bfloat16().float(), IMAGES[2:], {}, "bf16", is_judged_later=True
        )
        with pytest.raises(ParityError, match="differ from eager"):
            check_engine(model, lambda x: model(x) * 0.9, IMAGES[2:], {}, "bf16", is_judged_later=True)
