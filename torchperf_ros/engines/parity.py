"""Whether two ways to run a model give the same answer.

By relative L2 and largest error, or by the task.

Checks, warm-up and calibration leave nothing behind: what a model keeps between calls is put back as its
build gave it.
"""

import copy
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

from torchperf_ros.api.errors import TorchperfError
from torchperf_ros.engines.outputs import (
    flat_numbers,
    in_new_memory,
    layout_of,
    numbers_of,
    shapes_of,
    tensors_in,
)
from torchperf_ros.settings.build_options import INT8_PRECISIONS, INT8_STATIC, MOST_LOSS

NEVER_CHANGES: Final = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_ABSENT: Final = object()
OF_EVERY_MODULE: Final = frozenset(vars(torch.nn.Module()))


class KeptState:
    """Copies of a model's buffers and of its modules' own attributes.

    Weights are not copied, they would take as much memory again: what changes them is named, not put back.

    What Python cannot copy, as an object of a library in C, stays as it is. So does all of a model that has
    other modules or weights since, as one that fuses its layers at the first call: the state that is kept
    here fits it no more.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model, self._weights, self._structure = model, _versions_of(model), _structure_of(model)
        self._buffers = [
            (module, name, buffer, None if buffer is None else buffer.detach().clone())
            for module in model.modules()
            for name, buffer in _buffers_of(module)
        ]
        self._own = {id(each): each for each in (*model.modules(), *model.parameters(), *model.buffers())}
        memo = dict(self._own)
        # A script keeps its attributes in C++, where only buffers can be reached; a lazy module becomes
        # another one.
        self._attributes = [
            (
                module,
                {name: _copied(value, memo) for name, value in _attributes_of(module)},
                set(module._buffers),
            )
            for module in model.modules()
            if not isinstance(module, (torch.jit.ScriptModule, LazyModuleMixin))
        ]

    def restore(self) -> list[str]:
        """Put back what has changed; the names of those buffers and attributes.

        A buffer keeps its memory, which compiled code and captured graphs know.
        """
        changed, memo = list(self._changed()), dict(self._own)
        with torch.no_grad():
            for module, name, original, saved in changed:
                if saved is _ABSENT:
                    delattr(module, name)
                elif original is not None and original.shape == saved.shape:
                    setattr(module, name, original.copy_(saved))
                else:
                    setattr(module, name, _copied(saved, memo))
        return list(dict.fromkeys(name for _, name, _, _ in changed))

    @property
    def fits(self) -> bool:
        return self._structure == _structure_of(self._model)

    @property
    def has_changed(self) -> bool:
        return any(True for _ in self._changed())

    def changed_weights(self) -> list[str]:
        """Weights that were written to, or that others have taken the place of, by name."""
        if not self.fits:
            return []
        now = _versions_of(self._model)
        return [name for name, known in self._weights.items() if now[name] != known]

    def changed_numbers(self) -> list[str]:
        """Buffers of one element, and attributes that are a number, that have changed, by name."""
        return [
            name
            for _, name, original, saved in self._changed()
            if (isinstance(saved, (int, float)) if original is None else saved.numel() == 1)
        ]

    def _changed(self) -> Iterator[tuple[torch.nn.Module, str, torch.Tensor | None, Any]]:
        if not self.fits:
            return
        for module, name, original, saved in self._buffers:
            if not _same(getattr(module, name, None), saved):
                yield module, name, original, saved
        for module, attributes, buffers in self._attributes:
            new = sorted({*dict(_attributes_of(module)), *module._buffers} - attributes.keys() - buffers)
            for name, saved in [*attributes.items(), *((name, _ABSENT) for name in new)]:
                if saved is _ABSENT or not _same(vars(module).get(name, _ABSENT), saved):
                    yield module, name, None, saved


def _structure_of(model: torch.nn.Module) -> list[tuple[str, int]]:
    """Which modules a model has, and the names of its weights."""
    modules = [(name, id(module)) for name, module in model.named_modules()]
    return modules + [(name, 0) for name, _ in model.named_parameters()]


def _versions_of(model: torch.nn.Module) -> dict[str, tuple[int, int]]:
    """Which weights a model has by name, and how often each was written to, as torch counts it."""
    return {
        name: (id(weight), 0 if weight.is_inference() else weight._version)
        for name, weight in model.named_parameters()
        if not is_lazy(weight)
    }


def _buffers_of(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor | None]]:
    # With those that are None, which `named_buffers` leaves out.
    return ((name, each) for name, each in module._buffers.items() if each is None or not is_lazy(each))


def _attributes_of(module: torch.nn.Module) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in vars(module).items() if name not in OF_EVERY_MODULE]


def _copied(value: Any, memo: dict[int, Any]) -> Any:  # noqa: ANN401 - an attribute may be anything
    if isinstance(value, torch.Tensor):  # one that a gradient leads to cannot be deep-copied
        return memo.setdefault(id(value), value.detach().clone())
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # a library's object may refuse in any way
        return value


# one a kind, PLR0911 - one a kind
def _same(now: Any, saved: Any, seen: frozenset[int] = frozenset()) -> bool:  # noqa: ANN401, PLR0911
    """Whether a value is as its copy; of an object that hides what it holds, that is taken for granted."""
    if now is saved or id(saved) in seen:
        return True
    if type(now) is not type(saved):
        return False
    if isinstance(now, NEVER_CHANGES):
        return bool(now == saved)
    seen |= {id(saved)}
    if isinstance(now, torch.Tensor):
        kinds = {
            (each.dtype, each.layout, each.is_meta, each.is_nested or each.shape) for each in (now, saved)
        }
        # A tensor without values, as on the device `meta`, is as it was.
        parts = [[] if len(kinds) > 1 or each.is_meta else [*numbers_of(each)] for each in (now, saved)]
        return (
            len(kinds) == 1 and shapes_of(parts[0]) == shapes_of(parts[1]) and all(map(torch.equal, *parts))
        )
    if isinstance(now, np.ndarray) and not now.dtype.hasobject:
        return now.dtype == saved.dtype and np.array_equal(now, saved)
    if isinstance(now, (list, tuple, deque)):
        return len(now) == len(saved) and all(_same(a, b, seen) for a, b in zip(now, saved, strict=True))
    if isinstance(now, dict):
        return list(now) == list(saved) and all(_same(now[key], saved[key], seen) for key in now)
    try:
        return _same(_parts_of(now), _parts_of(saved), seen)
    except Exception:  # it hides its content
        return True


def _parts_of(value: Any) -> list[Any]:  # noqa: ANN401
    """What an object would be made of again, as `copy` and `pickle` ask for it; of a global one its name."""
    return [list(part) if isinstance(part, Iterator) else part for part in value.__reduce_ex__(4)]


Call = Callable[..., Any]
Inputs = tuple[torch.Tensor, ...]
DynamicDims = Mapping[int, Mapping[int, tuple[int, int]]]

_LEAST_SAME_CHOICES = 0.99
# Of a hundred choices one may be another. A classifier gives one for each input.
_ENOUGH_CHOICES = 100
_FEWEST_DRAWN, _MOST_DRAWN, _MOST_DRAWN_S = 4, 100, 5.0
# An answer that is off by less than half of the way to eager's answer to another input is nearest to the right one.
_MOST_OF_STEP = 0.5
# Answers that differ by a smaller share differ by fp32's own rounding.
_SAME_SHARE = 1e-6


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
    return limit if known is None else limit.worse(Parity(2 * known.relative_l2, 2 * known.max_error))


def _differ(parity: Parity, precision: str, limit: Parity) -> str:
    return f"outputs differ from eager's: {parity}; allowed for {precision}: {limit}"


def check_engine(  # noqa: PLR0913 - what is compared, and how
    reference: Call,
    candidate: Call,
    example: Inputs,
    dynamic_dims: DynamicDims,
    precision: str,
    *,
    briefly: bool = False,
    is_judged_later: bool = False,
    scoring: Scoring | None = None,
    known: Parity | None = None,
) -> Parity:
    """Compare a way to run a model with eager; returns the worst figures on random inputs like the example.

    Numbers have to be within the precision's limits on these and on the scoring's held-out inputs. What is
    quantised to int8 is compared on the latter alone, if there are any: random inputs may lie outside the
    ranges that it was made for. Another input has to give another output, where eager's does.

    Numbers beyond a limit are good enough if the adapter's `scoring` finds the same answers: random inputs
    hold nothing of what the task is about. Numbers within it are not enough for a precision other than
    fp32: answers in int8 count by their score, and all others, and int8 without a score, by
    `_Answers.check`. Where the scoring `judges`, the task's accuracy decides for every precision but fp32.
    Of a package whose parity is `known`, figures have to be as they were.

    A worker that starts compares `briefly`: fewer inputs, and answers in int8 alone. What builds or tunes
    has compared more. What an adapter's task judges later, on its own examples, is compared by numbers
    here: on drawn inputs, which show nothing that the task is about, single choices mean little.

    Raises:
        ParityError: beyond a limit, nothing to compare, or the same outputs for every input.
    """
    drawn = [random_inputs(example, seed, dynamic_dims) for seed in range(1, 3 if briefly else 5)]
    on_drawn, last = _on_drawn(reference, candidate, drawn)
    held_out = scoring.held_out if scoring else ()
    quantised, limit, nearest = precision in INT8_PRECISIONS, _limit(precision, known), on_drawn
    answers = _Answers(reference, candidate)
    for inputs in held_out:
        answers.compare(inputs)
    if held_out:
        nearest = answers.parity if quantised else answers.parity.worse(on_drawn)
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
    if (
        scoring is not None
        and loss is None
        and (quantised or not near or (briefly and precision != "fp32"))
    ):
        score = scoring.of(reference, candidate, last)
    if score is not None and not score >= 1.0 - MOST_LOSS:
        least = f"at least {1.0 - MOST_LOSS:g} is needed"
        raise ParityError(f"{text}; the answers' score is {score:.3f}, {least}")
    if score is None and loss is None:  # numbers alone decide
        if not near:
            raise ParityError(text)
        if not is_judged_later and (quantised or (precision != "fp32" and not briefly)):
            if not held_out:
                answers.compare_drawn(example, briefly=briefly)
            answers.check()
    return replace(on_drawn, score=score, loss=loss)


class _Answers:
    """What a candidate answers beside eager, input by input, where numbers that are near say too little.

    Attributes:
        parity: the worst of all inputs.
    """

    def __init__(self, reference: Call, candidate: Call) -> None:
        self.parity = Parity(0.0, 0.0)
        self._reference, self._candidate, self._hint = reference, candidate, ""
        self._before: tuple[str, list[torch.Tensor]] = "", []
        self._choices: list[tuple[int, int]] = []  # of each output: the same ones, and all
        self._apart: list[
            tuple[float, float, float]
        ] = []  # squares: of errors, steps between inputs, values

    def compare(self, inputs: Inputs) -> None:
        expected = self._reference(*(t.clone() for t in inputs))
        layout, numbers, choices = layout_of(expected), flat_numbers(expected), _choices(expected)
        numbers = [t.clone() for t in numbers]  # an engine may write to the outputs of the call before
        found = self._candidate(*inputs)
        self.parity = self.parity.worse(_measured(layout, numbers, found))
        counts = [
            (int((eager == own).sum()), len(eager))
            for eager, own in zip(choices, _choices(found), strict=True)
        ]
        self._choices = _added(self._choices, counts)
        if self._before[0] == layout:
            squares = [
                (_square(own - now), _square(before - now), _square(now))
                for own, now, before in zip(flat_numbers(found), numbers, self._before[1], strict=True)
            ]
            self._apart = _added(self._apart, squares)
        self._before = layout, numbers

    def compare_drawn(self, example: Inputs, *, briefly: bool) -> None:
        """Compare on inputs drawn like the example, until there are enough of the largest values to count."""
        self._hint = "; inputs were drawn: frames of --log LOG say more"
        until_s, most = time.monotonic() + _MOST_DRAWN_S, 2 if briefly else _MOST_DRAWN
        for seed in range(1, most + 1):
            self.compare(_in_other_light(random_inputs(example, seed), seed))
            few = any(0 < count < _ENOUGH_CHOICES for _, count in self._choices)
            if seed >= _FEWEST_DRAWN and (not few or time.monotonic() > until_s):
                return

    def check(self) -> None:
        """See that a candidate chooses as eager does, and answers other inputs otherwise by more than it is off.

        The class of a pixel or of a frame is the largest along dimension 1, or an integer.

        Raises:
            ParityError: more than 1 % of an output's choices are others, an output is off by more than half
                of what eager's answers to different inputs differ by, or these are all the same.
        """
        for output, (same_choices, count) in enumerate(self._choices):
            if same_choices < _LEAST_SAME_CHOICES * count:
                raise ParityError(
                    f"answers differ from eager's: of output {output}, {same_choices / count:.1%} of the"
                    " largest along dimension 1, or of integers, are the same; at least"
                    f" {_LEAST_SAME_CHOICES:.0%} are needed{self._hint}"
                )
        differing = [step > _SAME_SHARE**2 * values for _, step, values in self._apart]
        if self._apart and not any(differing):
            raise ParityError(
                "eager's answers to all inputs that were compared are the same, so that nothing shows"
                " whether others are right: --log LOG, or Adapter.score_inputs with inputs that differ"
            )
        for output, (error, step, _) in enumerate(self._apart):
            if differing[output] and math.sqrt(error) > _MOST_OF_STEP * math.sqrt(step):
                raise ParityError(
                    f"output {output} is off by {math.sqrt(error / step):.0%} of what eager's answers to"
                    f" different inputs differ by; at most {_MOST_OF_STEP:.0%} is allowed{self._hint}"
                )


def _added(sums: list[Any], more: list[Any]) -> list[Any]:
    return (
        [tuple(map(sum, zip(*pair, strict=True))) for pair in zip(sums, more, strict=True)]
        if sums
        else more
    )


def _square(numbers: torch.Tensor) -> float:
    return float(torch.nan_to_num(numbers, posinf=0.0, neginf=0.0).square().sum())


def _in_other_light(inputs: Inputs, seed: int) -> Inputs:
    """Numbers in other contrasts, and each row of dimension 1 brighter or darker.

    A mean over noise hardly differs from that over other noise, so a classifier would give one class for all.
    """
    generator, found = torch.Generator().manual_seed(seed), list[torch.Tensor]()
    for tensor in inputs:
        if tensor.is_floating_point() and tensor.numel():
            contrast = 0.5 + torch.rand(1, generator=generator).item()
            rows = (*tensor.shape[:2], *[1] * (tensor.dim() - 2))
            light = torch.randn(rows, generator=generator).to(tensor.device, tensor.dtype)
            tensor = tensor * contrast + light * tensor.std(correction=0)  # noqa: PLW2901
        found.append(tensor)
    return tuple(found)


def _on_drawn(reference: Call, candidate: Call, drawn: Sequence[Inputs]) -> tuple[Parity, Any]:
    """The worst figures on drawn inputs, and the reference's answer to the last of them."""
    kept = KeptState(reference) if isinstance(reference, torch.nn.Module) else None
    # a model may write to its inputs, and to what it gave at the call before, as may an engine
    expected = [in_new_memory(reference(*(t.clone() for t in inputs))) for inputs in drawn]
    numbers = [flat_numbers(outputs) for outputs in expected]
    layouts = [layout_of(outputs) for outputs in expected]
    if kept is not None and (names := _kept_by(reference, kept, drawn[-1], expected[-1])):
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


def _kept_by(model: Any, kept: KeptState, inputs: Inputs, outputs: Any) -> list[str]:  # noqa: ANN401
    """What a model keeps between calls that an engine would have a copy of, by name.

    Weights that calls change, and what changes its answer. Also numbers that each call changes: those of a
    count show in the answer to every tenth frame, say, which no comparison comes to.
    """
    has_changed = kept.has_changed
    names = kept.changed_weights() or depends_on_state(model, kept, inputs, outputs)
    if names or not has_changed:
        return names
    once = KeptState(model)
    model(*(t.clone() for t in inputs))
    names = once.changed_numbers()
    once.restore()
    return names


def depends_on_state(model: Any, kept: KeptState, inputs: Inputs, outputs: Any) -> list[str]:  # noqa: ANN401
    """What a model keeps of earlier calls that changes its answer, by name.

    It is then back in its `kept` state.

    `outputs` are its answer to the inputs after other ones. What changes no answer, as a table made once,
    stays, but what each call changes, as a number of calls, does not.
    """
    layout, before = layout_of(outputs), [t.clone() for t in flat_numbers(outputs)]
    names = kept.restore()
    again = model(*(t.clone() for t in inputs)) if names else outputs
    if layout == layout_of(again) and same(before, flat_numbers(again)):
        once = KeptState(model)
        if names:
            model(*(t.flip(tuple(range(t.dim()))) for t in inputs))
        if once.has_changed:
            kept.restore()
        return []
    kept.restore()
    return names


def _choices(outputs: Any) -> list[torch.Tensor]:  # noqa: ANN401 - a model may return anything
    """Of each tensor what it chooses: integers, or the place of the largest along dimension 1; empty: nothing."""
    found = []
    for tensor in tensors_in(outputs):
        chosen = tensor.new_empty(0) if tensor.layout is not torch.strided or tensor.is_nested else tensor
        if tensor.is_quantized or tensor.is_complex() or hasattr(tensor, "__tensor_flatten__"):
            chosen = torch.empty(0)
        elif chosen.is_floating_point() and chosen.numel():
            chosen = chosen.argmax(1) if chosen.dim() > 1 and chosen.shape[1] > 1 else torch.empty(0)
        found.append(chosen.flatten().cpu())
    return found


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
        finite = values.isfinite()
        # To pick them takes five times as long as to draw.
        values = values if bool(finite.all()) else values[finite]
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
