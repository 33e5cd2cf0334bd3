"""Whether two ways to run a model give the same answer.

By relative L2, cosine and largest error, or by the task.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from torchperf_ros.api.errors import TorchperfError
from torchperf_ros.engines.kept_state import KeptState
from torchperf_ros.engines.outputs import flat_numbers, layout_of, tensors_in
from torchperf_ros.settings.build_options import INT8_PRECISIONS, INT8_STATIC, MOST_LOSS

Call = Callable[..., Any]
Inputs = tuple[torch.Tensor, ...]
DynamicDims = Mapping[int, Mapping[int, tuple[int, int]]]


# held-out inputs by which other precisions than int8_static are compared beside drawn ones
_FRAMES_COMPARED = 2
_LEAST_SAME_CHOICES = 0.99


class ParityError(TorchperfError):
    """An engine's outputs are not those of the eager model; the message holds the figures."""


@dataclass(frozen=True)
class Parity:
    """How far outputs are from the reference, over all output tensors.

    Attributes:
        relative_l2: ||found - expected|| / ||expected||.
        cosine: of the angle between the two, 1 where they agree.
        max_error: largest absolute difference over the largest absolute expected value of that tensor.
        score: of the answers, by the adapter, where they are why these figures are good enough; None
            elsewhere.
        loss: of the task's accuracy against eager's, where its examples were judged.
    """

    relative_l2: float
    cosine: float
    max_error: float
    score: float | None = None
    loss: float | None = None

    def within(self, limit: "Parity") -> bool:
        """Whether no figure is beyond the limit's."""
        near = self.relative_l2 <= limit.relative_l2 and self.max_error <= limit.max_error
        return near and self.cosine >= limit.cosine

    def worse(self, other: "Parity") -> "Parity":
        """The worse of the two in each figure."""
        return Parity(
            max(self.relative_l2, other.relative_l2),
            min(self.cosine, other.cosine),
            max(self.max_error, other.max_error),
        )

    def __str__(self) -> str:
        return (
            f"relative L2 {self.relative_l2:.2g}, cosine {self.cosine:.6f}, max error {self.max_error:.2g}"
        )


LIMITS = {
    "fp32": Parity(1e-3, 0.9999, 1e-2),
    "tf32": Parity(1e-2, 0.999, 5e-2),
    "fp16": Parity(2e-2, 0.999, 1e-1),
    "bf16": Parity(5e-2, 0.995, 2e-1),
    "int8_weight": Parity(5e-2, 0.995, 2e-1),
    "int8_dynamic": Parity(1e-1, 0.99, 3e-1),
    INT8_STATIC: Parity(1e-1, 0.99, 3e-1),
}
"""By precision: the most that relative L2 and max error, and the least that cosine, may be."""


@dataclass(frozen=True)
class Scoring:
    """An adapter's judgement of a tier's answers.

    Attributes:
        score: `Adapter.score`.
        inputs: gives those of `Adapter.score_inputs`, on the device.
        accuracy: name and value of a call's accuracy on held-out examples, by the adapter's training task;
            None where there is none, or one whose smaller figures are better.
        judges: whether that is asked for; it takes seconds.
        held_out: inputs as frames have them, from which nothing was calibrated.
    """

    score: Callable[[Any, Any], float | None]
    inputs: Callable[[], Sequence[Inputs]]
    accuracy: Callable[[Call], tuple[str, float] | None] = lambda _: None
    judges: bool = False
    held_out: Sequence[Inputs] = ()
    _best: list[Any] = field(default_factory=list)  # the reference's, which is asked once for all engines

    def loss(self, reference: Call, candidate: Call) -> float | None:
        """How much of the task's accuracy the candidate loses, None where nothing judges it.

        Raises:
            ParityError: it is more than `MOST_LOSS`.
        """
        if (found := self.accuracy(candidate)) is None:
            return None
        (name, value), best = found, self._best or self.accuracy(reference) or found
        self._best[:] = best
        if not math.isfinite(best[1]):  # no example can tell it
            return None
        loss = float(best[1]) - value
        if not loss <= MOST_LOSS:
            text = f"{name} on held-out examples is {value:.4f}, eager's {best[1]:.4f}"
            raise ParityError(f"accuracy: {text}; at most {MOST_LOSS:g} less is allowed")
        return loss

    def of(self, reference: Call, candidate: Call, other: Any) -> float | None:  # noqa: ANN401
        """The candidate's mean score, on held-out inputs or, without any, on those of the adapter.

        It is 0 where the candidate gives NaN or Inf that the reference does not.

        None where the adapter has no score, or one by which the reference's answers to different inputs are
        the same: it could not fail. `other` is such an answer to some input that is not among these.
        """
        scores, differs = [], False
        for inputs in self.held_out or self.inputs():
            expected = reference(*(t.clone() for t in inputs))
            found = candidate(*inputs)
            if not math.isfinite(measure(expected, found).relative_l2):
                return 0.0
            score, against = self.score(found, expected), self.score(other, expected)
            if score is None or against is None:
                return None
            scores.append(score)
            differs |= against < 1.0 - MOST_LOSS
            other = expected
        return sum(scores) / len(scores) if differs else None


def measure(expected: Any, found: Any) -> Parity:  # noqa: ANN401 - whatever a model returns
    """Compare two nests of tensors, in float64 on the CPU.

    Integer and boolean outputs count like numbers; NaN and Inf count as wrong unless both have the same one
    there.

    Raises:
        ParityError: another nesting, number of tensors, type, shape, or value that is no tensor.
    """
    return _measured(layout_of(expected), flat_numbers(expected), found)


def _measured(layout: str, expected: Sequence[torch.Tensor], found: Any) -> Parity:  # noqa: ANN401
    if (found_layout := layout_of(found)) != layout:
        raise ParityError(f"outputs are {found_layout}; eager gives {layout}")
    square_error = square_expected = square_found = dot = worst = 0.0
    for reference, other in zip(expected, flat_numbers(found), strict=True):
        if not reference.numel():
            continue
        wild = ~torch.isfinite(reference)
        if not torch.equal(wild, ~torch.isfinite(other)) or _as_text(reference[wild]) != _as_text(
            other[wild]
        ):
            return Parity(math.inf, 0.0, math.inf)
        a, b = (torch.nan_to_num(t, posinf=0.0, neginf=0.0) for t in (reference, other))
        error = (a - b).abs()
        square_error += float((error * error).sum())
        square_expected += float((a * a).sum())
        square_found += float((b * b).sum())
        dot += float((a * b).sum())
        worst = max(worst, float(error.max()) / (float(a.abs().max()) or 1.0))
    if square_error == 0.0:
        return Parity(0.0, 1.0, 0.0)
    norms = math.sqrt(square_expected) * math.sqrt(square_found)
    cosine = dot / norms if norms else float(not square_expected)  # zeros have no angle; the errors decide
    return Parity(math.sqrt(square_error / (square_expected or 1.0)), cosine, worst)


def check(expected: Any, found: Any, precision: str, known: Parity | None = None) -> Parity:  # noqa: ANN401
    """Measure, and compare with the limits of a precision; a `ParityError` has the figures that are beyond.

    Of an engine that is `known` to be good by its answers, figures may be twice as far off as they were
    there.
    """
    parity, limit = measure(expected, found), _limit(precision, known)
    if not parity.within(limit):
        raise ParityError(_differ(parity, precision, limit))
    return parity


def _limit(precision: str, known: Parity | None) -> Parity:
    limit = LIMITS[precision]
    if known is None or (known.score is None and known.loss is None and precision != INT8_STATIC):
        return limit
    return limit.worse(Parity(2 * known.relative_l2, 2 * known.cosine - 1, 2 * known.max_error))


def _differ(parity: Parity, precision: str, limit: Parity) -> str:
    return f"outputs differ from eager's: {parity}; allowed for {precision}: {limit}"


def check_engine(
    reference: Call,
    candidate: Call,
    example: Inputs,
    dynamic_dims: DynamicDims,
    precision: str,
    seeds: int = 3,
    scoring: Scoring | None = None,
    known: Parity | None = None,
) -> Parity:
    """Compare a way to run a model with eager on random inputs like the example; returns the worst figures.

    The scoring's held-out inputs are compared, too.

    There are at least 2 inputs (`seeds`), as another input has to give another output, where eager's does.
    Figures beyond a limit are good enough if the answers are eager's by the adapter's `scoring`: to random
    inputs, which hold nothing of what the task is about, numbers may differ much where answers do not.
    int8_static was made for inputs as frames have them: by the numbers of those it is as good as others are
    by all. Where the scoring `judges`, answers count in every precision but fp32 by `Scoring.loss`. Answers
    in int8 always count: by their score, and where there is none by which of the values along dimension 1
    is the largest. Of a package that is `known`, figures have to be as they were.

    Raises:
        ParityError: beyond a limit, nothing to compare, or the same outputs whatever the inputs.
    """
    worst = Parity(0.0, 1.0, 0.0)
    drawn_inputs = [random_inputs(example, seed, dynamic_dims) for seed in range(1, max(seeds, 2) + 1)]
    held_out = scoring.held_out if scoring else ()
    seen = held_out if precision == INT8_STATIC and known is None else held_out[:_FRAMES_COMPARED]
    kept = KeptState(reference) if isinstance(reference, torch.nn.Module) else None
    # a model may write to its inputs
    expected = [reference(*(t.clone() for t in inputs)) for inputs in drawn_inputs]
    flat = [[t.clone() for t in flat_numbers(outputs)] for outputs in expected]
    layouts = [layout_of(outputs) for outputs in expected]
    if kept is not None and (names := depends_on_state(reference, kept, drawn_inputs[-1], expected[-1])):
        msg = (
            f"the model keeps state between calls ({', '.join(names)}); an engine would keep one of its own"
        )
        raise ParityError(msg)
    if not any(True for _ in tensors_in(expected[0])):
        msg = f"outputs cannot be compared: eager gives {layouts[0]}, in which there are no tensors"
        raise ParityError(msg)
    found = []
    for inputs, first_flat, layout in zip(drawn_inputs, flat, layouts, strict=True):
        outputs = candidate(*inputs)
        worst = worst.worse(_measured(layout, first_flat, outputs))
        found.append((first_flat, [t.clone() for t in flat_numbers(outputs)]))
    limit, nearest = _limit(precision, known), worst
    if precision == INT8_STATIC and known is None and held_out:
        nearest = Parity(0.0, 1.0, 0.0)
    for inputs in seen:
        nearest = nearest.worse(measure(reference(*(t.clone() for t in inputs)), candidate(*inputs)))
    near, text = nearest.within(limit), _differ(nearest, precision, limit)
    if scoring is not None and math.isfinite(worst.relative_l2) and known is None:
        if scoring.judges and (precision != "fp32" or not near):
            worst = replace(worst, loss=scoring.loss(reference, candidate))
        if worst.loss is None and (not near or precision in INT8_PRECISIONS):
            worst = replace(worst, score=scoring.of(reference, candidate, expected[-1]))
    if worst.score is not None and not worst.score >= 1.0 - MOST_LOSS:
        raise ParityError(
            f"{text}; the answers' score is {worst.score:.3f}, at least {1.0 - MOST_LOSS:g} is needed"
        )
    by_answers = worst.score is not None or worst.loss is not None
    if not near and not by_answers:
        raise ParityError(text)
    if precision in INT8_PRECISIONS and known is None and not by_answers:
        _check_choices(reference, candidate, seen or drawn_inputs)
    (first, first_found), (second, second_found) = found[:2]
    if same(first_found, second_found) and not same(first, second):
        raise ParityError("outputs do not depend on the inputs; eager's do")
    return worst if known is None else replace(worst, score=known.score, loss=known.loss)


def depends_on_state(model: Call, kept: KeptState, inputs: Inputs, outputs: Any) -> list[str]:  # noqa: ANN401
    """What a model keeps of earlier calls that changes its answer, by name.

    It is then back in its `kept` state.

    `outputs` are its answer to the inputs after other ones. What changes no answer, as a table made once,
    stays.
    """
    before = [t.clone() for t in flat_numbers(outputs)]
    if not (names := kept.restore()):
        return []
    if same(before, flat_numbers(model(*(t.clone() for t in inputs)))):
        return []
    kept.restore()
    return names


def _check_choices(reference: Call, candidate: Call, compared: Sequence[Inputs]) -> None:
    """See that a candidate chooses as eager does.

    The class of a pixel or of a frame is the largest along dimension 1.

    Raises:
        ParityError: more than 1 % of an output's choices are others.
    """
    places, same_there = Counter[int](), Counter[int]()
    for inputs in compared:
        expected = _choices(reference(*(t.clone() for t in inputs)))
        for output, (eager, own) in enumerate(zip(expected, _choices(candidate(*inputs)), strict=True)):
            places[output] += eager.numel()
            same_there[output] += int((eager == own).sum())
    for output, count in places.items():
        share = same_there[output] / count
        if share < _LEAST_SAME_CHOICES:
            raise ParityError(
                f"answers differ from eager's: of output {output}, {share:.1%} of the largest along"
                f" dimension 1 are the same; at least {_LEAST_SAME_CHOICES:.0%} are needed"
            )


def _choices(outputs: Any) -> list[torch.Tensor]:  # noqa: ANN401 - whatever a model returns
    """Of each output that may be one of classes, where the largest stands along dimension 1, as one row."""
    tensors = [tensor for tensor in tensors_in(outputs) if tensor.is_floating_point()]
    return [t.argmax(1).flatten().cpu() for t in tensors if t.dim() > 1 and t.shape[1] > 1 and t.numel()]


def says_something(inputs: Inputs) -> bool:
    """Whether a tensor of numbers among them has more than one value.

    Constant ones show nothing of a model.
    """
    return any(tensor.numel() > 1 and bool((tensor != tensor.flatten()[0]).any()) for tensor in inputs)


def same(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    """Whether they hold the same values."""
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def random_inputs(example: Inputs, seed: int, dynamic_dims: DynamicDims | None = None) -> Inputs:
    """Inputs like the example.

    Floats normal around its mean, integers within its values, all values for blank uint8.

    The sizes of `dynamic_dims` are drawn, too, within their ranges.
    """
    generator = torch.Generator().manual_seed(seed)
    sizes: dict[tuple[int, int, int], int] = {}
    drawn = []
    for index, tensor in enumerate(example):
        shape = list(tensor.shape)
        for dim, (low, high) in (dynamic_dims or {}).get(index, {}).items():
            # the same dimension with the same range is one size in every input, as for batches
            drawn_size = int(torch.randint(low, high + 1, (1,), generator=generator))
            shape[dim] = sizes.setdefault((dim % len(shape), low, high), drawn_size)
        drawn.append(random_like(tensor, tuple(shape), generator))
    return tuple(drawn)


def random_like(tensor: torch.Tensor, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Values like a tensor's, see `random_inputs`, in any shape."""
    if tensor.dtype is torch.bool:
        # mostly set, as masks are
        return (torch.rand(shape, generator=generator) < 0.75).to(tensor.device)  # noqa: PLR2004
    if tensor.is_complex():
        return torch.complex(*(random_like(part, shape, generator) for part in (tensor.real, tensor.imag)))
    if tensor.is_floating_point():
        values = tensor.detach().float().cpu()
        values = values[values.isfinite()]
        mean, spread = (
            (float(values.mean()), float(values.std(correction=0))) if values.numel() else (0.0, 1.0)
        )
        return (torch.randn(shape, generator=generator) * (spread or 1.0) + mean).to(
            tensor.device, tensor.dtype
        )
    low, high = (int(tensor.min()), int(tensor.max())) if tensor.numel() else (0, 1)
    if (
        low == high and tensor.dtype is torch.uint8
    ):  # pixels; other integers may be indices, which have to stay valid
        low, high = 0, 255
    return torch.randint(low, high + 1, shape, generator=generator).to(tensor.device, tensor.dtype)


def memory_format(like: torch.Tensor) -> torch.memory_format:
    """How a tensor lies in memory, of the two that compiled code is given.

    Contiguous, or with channels last.
    """
    layouts = {4: torch.channels_last, 5: torch.channels_last_3d}
    layout = layouts.get(like.dim(), torch.contiguous_format)
    return (
        layout
        if like.is_contiguous(memory_format=layout) and not like.is_contiguous()
        else torch.contiguous_format
    )


def _as_text(values: torch.Tensor) -> list[str]:
    return [str(value) for value in values.tolist()]  # as text, NaN is NaN
