"""Whether two ways to run a model give the same answer.

By relative L2 and largest error, or by the task.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch

from torchperf_ros.api.errors import TorchperfError
from torchperf_ros.engines.kept_state import KeptState
from torchperf_ros.engines.outputs import flat_numbers, layout_of, tensors_in
from torchperf_ros.settings.build_options import INT8_PRECISIONS, INT8_STATIC, MOST_LOSS

Call = Callable[..., Any]
Inputs = tuple[torch.Tensor, ...]
DynamicDims = Mapping[int, Mapping[int, tuple[int, int]]]

_LEAST_SAME_CHOICES = 0.99


class ParityError(TorchperfError):
    """An engine's outputs are not those of the eager model; the message holds the figures."""


@dataclass(frozen=True)
class Parity:
    """How far outputs are from the reference, over all output tensors.

    Attributes:
        relative_l2: ||found - expected|| / ||expected||.
        max_error: largest absolute difference over the largest absolute expected value of that tensor.
        score: of the answers, by the adapter, where they are why these figures are good enough; None
            elsewhere.
        loss: of the task's accuracy against eager's, where its examples were judged.
    """

    relative_l2: float
    max_error: float
    score: float | None = None
    loss: float | None = None

    def within(self, limit: "Parity") -> bool:
        return self.relative_l2 <= limit.relative_l2 and self.max_error <= limit.max_error

    def worse(self, other: "Parity") -> "Parity":
        return Parity(max(self.relative_l2, other.relative_l2), max(self.max_error, other.max_error))

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> "Parity":
        """The parity in a manifest; further figures of earlier versions do not count."""
        return cls(**{name: value for name, value in values.items() if name in cls.__dataclass_fields__})

    def __str__(self) -> str:
        return f"relative L2 {self.relative_l2:.2g}, max error {self.max_error:.2g}"


# By precision: the most that relative L2 and max error may be.
LIMITS = {
    "fp32": Parity(1e-3, 1e-2),
    "tf32": Parity(1e-2, 5e-2),
    "fp16": Parity(2e-2, 1e-1),
    "bf16": Parity(5e-2, 2e-1),
    "int8_weight": Parity(5e-2, 2e-1),
    "int8_dynamic": Parity(1e-1, 3e-1),
    INT8_STATIC: Parity(1e-1, 3e-1),
}


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

    def loss(self, reference: Call, candidate: Call) -> float | None:
        """How much of the task's accuracy the candidate loses, None where nothing judges it.

        Raises:
            ParityError: it is more than `MOST_LOSS`.
        """
        best, found = self.accuracy(reference), self.accuracy(candidate)
        # eager without a figure leaves nothing to lose
        if best is None or found is None or not math.isfinite(best[1]):
            return None
        loss = best[1] - found[1]
        if not loss <= MOST_LOSS:
            text = f"{found[0]} on held-out examples is {found[1]:.4f}, eager's {best[1]:.4f}"
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
            expected, found = reference(*(t.clone() for t in inputs)), candidate(*inputs)
            if not math.isfinite(measure(expected, found).relative_l2):
                return 0.0
            score, against = self.score(found, expected), self.score(other, expected)
            if score is None or against is None:
                return None
            scores.append(score)
            differs |= against < 1.0 - MOST_LOSS
            other = expected
        return sum(scores) / len(scores) if differs else None


def measure(expected: Any, found: Any) -> Parity:  # noqa: ANN401 - a model may return anything
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
    square_error = square_expected = worst = 0.0
    for reference, other in zip(expected, flat_numbers(found), strict=True):
        if not reference.numel():
            continue
        wild = ~torch.isfinite(reference)
        same_wild = torch.equal(wild, ~torch.isfinite(other)) and torch.allclose(
            reference[wild], other[wild], equal_nan=True
        )
        if not same_wild:
            return Parity(math.inf, math.inf)
        a, b = (torch.nan_to_num(t, posinf=0.0, neginf=0.0) for t in (reference, other))
        error = (a - b).abs()
        square_error += float((error * error).sum())
        square_expected += float((a * a).sum())
        worst = max(worst, float(error.max()) / (float(a.abs().max()) or 1.0))
    return Parity(math.sqrt(square_error / (square_expected or 1.0)), worst)


def check(expected: Any, found: Any, precision: str, known: Parity | None = None) -> Parity:  # noqa: ANN401
    """Measure, and compare with the limits of a precision; a `ParityError` has the figures that are beyond.

    Of an engine whose parity is `known`, figures may be twice as far off as they were there.
    """
    parity, limit = measure(expected, found), _limit(precision, known)
    if not parity.within(limit):
        raise ParityError(_differ(parity, precision, limit))
    return parity


def _limit(precision: str, known: Parity | None) -> Parity:
    limit = LIMITS[precision]
    if known is None:
        return limit
    return limit.worse(Parity(2 * known.relative_l2, 2 * known.max_error))


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
    """Compare a way to run a model with eager; returns the worst figures on random inputs like the example.

    Numbers have to be within the precision's limits on these and on the scoring's held-out inputs. What is
    quantised to int8 is compared on the latter alone, if there are any: random inputs may lie outside the
    ranges that it was made for. Another input has to give another output, where eager's does.

    Numbers beyond a limit are good enough if the adapter's `scoring` finds the same answers: random inputs
    hold nothing of what the task is about. Answers in int8 always count, by their score, and without one
    by which of the values along dimension 1 is the largest. Where the scoring `judges`, the task's accuracy
    decides for every precision but fp32. Of a package whose parity is `known`, figures have to be as they
    were.

    Raises:
        ParityError: beyond a limit, nothing to compare, or the same outputs for every input.
    """
    drawn = [random_inputs(example, seed, dynamic_dims) for seed in range(1, max(seeds, 2) + 1)]
    on_drawn, last = _on_drawn(reference, candidate, drawn)
    held_out = scoring.held_out if scoring else ()
    quantised, limit, nearest = precision in INT8_PRECISIONS, _limit(precision, known), on_drawn
    if held_out:
        pairs = ((reference(*(t.clone() for t in inputs)), candidate(*inputs)) for inputs in held_out)
        on_held_out = reduce(Parity.worse, (measure(*pair) for pair in pairs))
        nearest = on_held_out if quantised else on_held_out.worse(on_drawn)
    if not math.isfinite(on_drawn.relative_l2):  # NaN or Inf where eager gives none, which no score excuses
        raise ParityError(_differ(on_drawn, precision, limit))
    near, text = nearest.within(limit), _differ(nearest, precision, limit)
    if known is not None:
        if not near:
            raise ParityError(text)
        return replace(on_drawn, score=known.score, loss=known.loss)
    loss = score = None
    if scoring is not None and scoring.judges and (precision != "fp32" or not near):
        loss = scoring.loss(reference, candidate)
    if scoring is not None and loss is None and (quantised or not near):
        score = scoring.of(reference, candidate, last)
    if score is not None and not score >= 1.0 - MOST_LOSS:
        least = f"at least {1.0 - MOST_LOSS:g} is needed"
        raise ParityError(f"{text}; the answers' score is {score:.3f}, {least}")
    if score is None and loss is None:  # numbers alone decide
        if not near:
            raise ParityError(text)
        if quantised:
            _check_choices(reference, candidate, held_out or drawn)
    return replace(on_drawn, score=score, loss=loss)


def _on_drawn(reference: Call, candidate: Call, drawn: Sequence[Inputs]) -> tuple[Parity, Any]:
    """The worst figures on drawn inputs, and the reference's answer to the last of them."""
    kept = KeptState(reference) if isinstance(reference, torch.nn.Module) else None
    # a model may write to its inputs, and an engine to the outputs of the call before
    expected = [reference(*(t.clone() for t in inputs)) for inputs in drawn]
    numbers = [[t.clone() for t in flat_numbers(outputs)] for outputs in expected]
    layouts = [layout_of(outputs) for outputs in expected]
    if kept is not None and (names := depends_on_state(reference, kept, drawn[-1], expected[-1])):
        raise ParityError(
            f"the model keeps state between calls ({', '.join(names)}); an engine would keep one of its own"
        )
    if not any(True for _ in tensors_in(expected[0])):
        raise ParityError(
            f"outputs cannot be compared: eager gives {layouts[0]}, in which there are no tensors"
        )
    worst, found = Parity(0.0, 0.0), []
    for inputs, wanted, layout in zip(drawn, numbers, layouts, strict=True):
        outputs = candidate(*inputs)
        worst = worst.worse(_measured(layout, wanted, outputs))
        found.append([t.clone() for t in flat_numbers(outputs)])
    if same(*found[:2]) and not same(*numbers[:2]):
        raise ParityError("outputs do not depend on the inputs; eager's do")
    return worst, expected[-1]


def depends_on_state(model: Call, kept: KeptState, inputs: Inputs, outputs: Any) -> list[str]:  # noqa: ANN401
    """What a model keeps of earlier calls that changes its answer, by name.

    It is then back in its `kept` state.

    `outputs` are its answer to the inputs after other ones. What changes no answer, as a table made once,
    stays.
    """
    before = [t.clone() for t in flat_numbers(outputs)]
    names = kept.restore()
    if not names or same(before, flat_numbers(model(*(t.clone() for t in inputs)))):
        return []
    kept.restore()
    return names


def _check_choices(reference: Call, candidate: Call, compared: Sequence[Inputs]) -> None:
    """See that a candidate chooses as eager does: a pixel's or frame's class, the largest in dimension 1.

    Raises:
        ParityError: more than 1 % of an output's choices are others.
    """
    chosen = [
        zip(_choices(reference(*(t.clone() for t in inputs))), _choices(candidate(*inputs)), strict=True)
        for inputs in compared
    ]
    for output, pairs in enumerate(zip(*chosen, strict=True)):
        share = float(torch.cat([eager == own for eager, own in pairs]).double().mean())
        if share < _LEAST_SAME_CHOICES:
            raise ParityError(
                f"answers differ from eager's: of output {output}, {share:.1%} of the largest along"
                f" dimension 1 are the same; at least {_LEAST_SAME_CHOICES:.0%} are needed"
            )


def _choices(outputs: Any) -> list[torch.Tensor]:  # noqa: ANN401 - a model may return anything
    tensors = [tensor for tensor in tensors_in(outputs) if tensor.is_floating_point()]
    return [t.argmax(1).flatten().cpu() for t in tensors if t.dim() > 1 and t.shape[1] > 1 and t.numel()]


def says_something(inputs: Inputs) -> bool:
    """Whether a tensor of numbers among them has more than one value.

    Constant ones show nothing of a model.
    """
    return any(tensor.numel() > 1 and bool((tensor != tensor.flatten()[0]).any()) for tensor in inputs)


def same(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
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
        drawn = torch.randn(shape, generator=generator) * (spread or 1.0) + mean
    else:
        low, high = (int(tensor.min()), int(tensor.max())) if tensor.numel() else (0, 1)
        # Blank pixels get all values. Other integers may be indices, which have to stay valid.
        if low == high and tensor.dtype is torch.uint8:
            low, high = 0, 255
        drawn = torch.randint(low, high + 1, shape, generator=generator)
    return drawn.to(tensor.device, tensor.dtype)


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
