"""Which optimisations a model bears, what each gained on this machine, and what to change: measured, then ruled.

What is not the model (decoding, preprocessing, postprocessing) is left out: it needs messages, and example inputs are
tensors. The node measures it for every frame, see `/perf/latency_stages`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from torchperf_ros.analysis.checklist_row import Advice, Row, changes, keep_one, timing_dict
from torchperf_ros.analysis.gain import Gain, gain
from torchperf_ros.analysis.model_variants import Measurement, ModelVariants, thread_counts
from torchperf_ros.core.build_options import PRECISIONS, BuildOptions
from torchperf_ros.worker.engine import varying_dims
from torchperf_ros.worker.model_transforms import applies
from torchperf_ros.worker.stopwatch import Timing

_PLAIN: Final = BuildOptions()


@dataclass(frozen=True)
class Checklist:
    """What was found.

    Attributes:
        rows: in the order to show.
        now: how the node is told to run the tier.
        running: as `now`, but eager where that cannot be used, or was not compiled here.
        base: how the model ran while changes to it were measured: as now, with the engine that the verdicts leave.
        changes: parameter -> value, for this tier; empty: nothing to change.
        before, after: as `running`, and with all changes but that of the CPU threads, measured in the same rounds; the
            second is None where nothing changes.
    """

    rows: tuple[Row, ...]
    now: BuildOptions
    running: BuildOptions
    base: BuildOptions
    changes: dict[str, Any]
    before: Timing
    after: Timing | None

    @property
    def gain(self) -> Gain | None:
        """Of all changes together."""
        return None if self.after is None else gain(self.before, self.after)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: times in ms, gains as shares of the time before."""
        return {
            "now": self.now.as_dict(),
            "running": self.running.as_dict(),
            "measured_in": self.base.as_dict(),
            "rows": [row.as_dict() for row in self.rows],
            "changes": self.changes,
            "before": timing_dict(self.before),
            "after": None if self.after is None else timing_dict(self.after),
            "gain": None if self.gain is None else vars(self.gain),
        }


class ModelCheck:
    """Goes through the optimisations of one model. Use it inside of `torch.inference_mode`."""

    def __init__(
        self,
        variants: ModelVariants,
        now: BuildOptions,
        *,
        seconds: float,
        compiled: bool,
        say: Callable[[str], None],
    ) -> None:
        """Take the model.

        Args:
            variants: builds and times it.
            now: how the node is told to run it.
            seconds: of measuring, for each candidate.
            compiled: whether to compile, which takes 10 to 40 s each; if not, everything is measured in eager.
            say: takes a line of progress.
        """
        self._variants, self._now, self._seconds, self._compiled, self._say = variants, now, seconds, compiled, say

    def run(self) -> Checklist:
        """Measure all that applies, and rule."""
        running = self._now if self._compiled else replace(self._now, engine="eager")
        if self._variants.get(running).refused:
            running = _PLAIN  # as the worker does
        engines = self._engines(running)
        base = replace(running, engine=changes(engines).get("engine", running.engine))
        self._say(f"changes to the model, in {base.engine}")
        rows, measured = self._transforms(base, running)
        if len(changes(rows)) > 1:
            rows, measured = self._together(rows, base, running)
        chosen = replace(base, **changes(rows))
        after = None if chosen == running else measured.timings[chosen]
        rest = self._copies(base) if self._variants.device.is_cuda else self._threads(running)
        rows = [*engines, *rows, *rest]
        return Checklist(tuple(rows), self._now, running, base, changes(rows), measured.timings[running], after)

    def _engines(self, running: BuildOptions) -> list[Row]:
        eager = replace(running, engine="eager")
        names = {name: replace(running, engine=name) for name in ("compile", "aoti")}
        if not self._compiled:
            skipped = "not measured (--no-compile)"
            return [Row(name, "engine", name, "eager", self._now.engine == name, skipped=skipped) for name in names]
        self._say("engines; each takes 10 to 40 s to compile")
        measured = self._variants.time([eager, *names.values()], self._seconds)
        rows = []
        for name, options in names.items():
            row = Row(name, "engine", name, "eager", self._now.engine == name)
            rows.append(self._filled(row, options, eager, measured))
        return keep_one(rows)

    def _transforms(self, base: BuildOptions, running: BuildOptions) -> tuple[list[Row], Measurement[BuildOptions]]:
        pairs: list[tuple[Row, BuildOptions, BuildOptions]] = []
        for parameter, value in self._transform_values():
            on = getattr(self._now, parameter) == value
            other = self._other(parameter, base, on=on)
            row = Row(str(value) if parameter == "precision" else parameter, parameter, value, other, on)
            row = replace(row, why_not=self._why_not(replace(_PLAIN, **{parameter: value}), base))
            pairs.append((row, replace(base, **{parameter: value}), replace(base, **{parameter: other})))
        wanted = [options for row, *both in pairs if not row.why_not for options in both]
        measured = self._variants.time([base, running, *wanted], self._seconds)
        rows = [self._filled(row, with_, without, measured) for row, with_, without in pairs]
        precisions = keep_one([row for row in rows if row.parameter == "precision"])
        return [row for row in rows if row.parameter != "precision"] + precisions, measured

    @staticmethod
    def _transform_values() -> list[tuple[str, Any]]:
        flags = [(name, True) for name in ("channels_last", "fold_batch_norm", "cuda_graphs")]
        return [*flags, *(("precision", precision) for precision in PRECISIONS if precision != _PLAIN.precision)]

    @staticmethod
    def _other(parameter: str, base: BuildOptions, *, on: bool) -> Any:  # noqa: ANN401 - the value of any parameter
        """What the parameter is without the optimisation: its plain value, or another one that is on now."""
        return getattr(_PLAIN if on else base, parameter)

    def _why_not(self, one: BuildOptions, base: BuildOptions) -> str:
        if one.cuda_graphs and varying_dims(base, self._variants.dims):
            return "the adapter's sizes vary"
        return applies(self._variants.model, one, self._variants.device.device)

    def _together(
        self, rows: list[Row], base: BuildOptions, running: BuildOptions
    ) -> tuple[list[Row], Measurement[BuildOptions]]:
        """All changes at once; where that is refused or no better, the best of them alone."""
        changed = [row for row in rows if row.parameter in changes(rows) and row.advice in _CHANGING]
        every = replace(base, **changes(rows))
        self._say(f"all changes together: {every.label}")
        alone = {row.name: replace(base, **changes([row])) for row in changed}
        measured = self._variants.time([base, running, *alone.values(), every], self._seconds)
        row = self._filled(Row("all of these", "", True, False, on=False), every, base, measured)
        best = min(changed, key=lambda one: measured.timings[alone[one.name]].median_ms)
        fastest = measured.timings[alone[best.name]]
        if row.advice is Advice.TURN_ON and row.with_ is not None and row.with_.median_ms <= fastest.median_ms:
            return [*rows, row], measured
        rows = [replace(r, skipped=f"not with {best.name}") if r in changed and r is not best else r for r in rows]
        return [*rows, replace(row, remark=f"{best.name} alone is better")], measured

    def _copies(self, base: BuildOptions) -> list[Row]:
        self._say("copies to and from the device")
        measured = self._variants.time_copies(base, self._seconds)
        return [Row("pinned copies", "", True, False, True, without=measured.timings[False],
                    with_=measured.timings[True], noise=measured.noise)]  # fmt: skip

    def _threads(self, running: BuildOptions) -> list[Row]:
        now, counts = torch.get_num_threads(), thread_counts()
        self._say(f"CPU threads, in eager: {', '.join(map(str, counts))}")
        eager = replace(running, engine="eager")
        others = [count for count in counts if count != now]
        measured = self._variants.time_threads([now, *others], eager, self._seconds)
        rows = []
        for count in sorted(measured.timings):
            row = Row(f"{count} CPU thread{'s' * (count > 1)}", "worker_threads", count, now, count == now,
                      without=measured.timings[now], with_=measured.timings[count], noise=measured.noise,
                      remark="no core is left to the node" if count == counts[-1] > 1 and count != now else "",
                      skipped="now" if count == now else "")  # fmt: skip
            rows.append(row)
        return keep_one(rows)

    def _filled(self, row: Row, with_: BuildOptions, without: BuildOptions, measured: Measurement[BuildOptions]) -> Row:
        if row.why_not:
            return row
        variant = self._variants.get(with_)
        return replace(row, without=measured.timings.get(without), with_=measured.timings.get(with_),
                       noise=measured.noise, parity=variant.parity, refused=variant.refused)  # fmt: skip


_CHANGING: Final = (Advice.TURN_ON, Advice.TURN_OFF)
