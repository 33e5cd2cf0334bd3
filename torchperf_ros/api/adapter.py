"""How users bring their own models: one class that turns messages into tensors and outputs into a message.

And what `torchperf train` needs to know of a model: its tiers, its examples, its loss, and how it is
judged.
"""

import abc
import contextlib
import importlib
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from torchperf_ros.api.errors import AdapterError, ConfigError
from torchperf_ros.api.histories import clear_histories, skip_in_histories


@dataclass(frozen=True)
class Received:
    """One input message as the worker sees it.

    Attributes:
        message: decoded message; its arrays are numpy views on shared memory, valid during the call only.
        stamp_ns: its `header.stamp` in ns, 0 where the type has no header.
        age_ms: ROS time since the stamp when the frame was received, NaN where the stamp is 0.
    """

    message: Any
    stamp_ns: int
    age_ms: float


class Adapter(abc.ABC):
    """A stage's model. Runs in the worker process only.

    Attributes:
        inputs: topic -> message type; the first is the trigger, the others are the latest received, or
            absent. With the parameter `sync` they are those whose stamps fit the trigger's, or absent.
        output: message type of the stage's output.
        anytime: whether models give partial results: then `steps` is run for every frame, in eager.
    """

    inputs: dict[str, str]
    output: str
    anytime: bool = False

    @abc.abstractmethod
    def __init__(self, options: dict[str, Any], device: torch.device) -> None:
        """Read the stage's `options`; raise `ConfigError` on a value that is not allowed.

        Of a stage with streams each has an adapter of its own, whose options say which, as `stream`.
        """

    @abc.abstractmethod
    def build(self, tier: str) -> torch.nn.Module:
        """The model of a tier in eval mode; every tier takes the same inputs."""

    @abc.abstractmethod
    def example_inputs(self, tier: str) -> tuple[torch.Tensor, ...]:
        """Inputs of the usual shape, on the device, for warm-up and calibration."""

    def score(self, outputs: Any, reference: Any) -> float | None:  # noqa: ANN401 - what the model returns
        """How far outputs are the same answers as the reference's, by what the task is about.

        1 where they are.

        An engine whose numbers are too far from eager's still serves if its answers are eager's. Default:
        None, numbers alone decide.
        """
        return None

    # of type `self.output`
    def score_messages(self, output: Any, reference: Any) -> float | None:  # noqa: ANN401
        """The same of two published messages: how far a candidate's is the answer of the version beside it.

        Called in a process of its own, on an adapter made for the CPU, in idle time. Default: None, there
        is no score.
        """
        return None

    def score_inputs(self, tier: str) -> Sequence[tuple[torch.Tensor, ...]]:
        """Inputs as of `example_inputs` that hold what the task is about, to `score` the answers to them.

        Default: the example inputs alone. Where there are none, or eager's answers to them score as the
        same answers, a score would say nothing, and numbers decide.
        """
        return [self.example_inputs(tier)]

    def example_messages(self) -> Mapping[str, Received]:
        """Messages as they usually come, by topic, to warm a whole frame up with. Default: none.

        Not shown to `observe`. On a GPU what `preprocess` and `postprocess` run there is then loaded in
        time.
        """
        return {}

    def dynamic_dims(self) -> dict[int, dict[int, tuple[int, int]]]:
        """Input index -> {dimension: (min, max)} for the dimensions that vary; default: none."""
        return {}

    def unpad(self, outputs: Any, shapes: tuple[tuple[int, ...], ...]) -> Any:  # noqa: ANN401
        """Cut outputs to what belongs to inputs of these shapes, one for each tensor of `preprocess`.

        Called before `postprocess` where `shapes: bucket` has padded the inputs with zeros at the end of a
        dimension. Return views, for example `outputs[..., :height, :width]`. Default: the outputs as they
        are. Before the first frame the worker compares the result with eager's on the inputs as they were,
        and uses no padding where the two differ.
        """
        return outputs

    def observe(self, messages: Mapping[str, Received]) -> None:  # noqa: B027 - optional on purpose
        """Advance histories.

        Called once for every started frame in every worker of the stage. Default: nothing.

        The worker that runs the frame observes it first; the others follow when that one has come through
        it. A frame that ends its worker is observed by no other: see `missed`.
        """

    def missed(self, frames: int) -> None:
        """Before `observe`.

        So many started frames were not observed by this worker since the last one that was.

        Default: every `HistoryBuffer` that this adapter made gets as many rows without a sample, which its
            mask shows.
        """
        skip_in_histories(frames)

    def forget(self) -> None:
        """The last observed frame was overwritten meanwhile, so that what was learned from it may be wrong.

        Default: every `HistoryBuffer` that this adapter made is emptied.
        """
        clear_histories()

    @abc.abstractmethod
    def preprocess(self, messages: Mapping[str, Received]) -> tuple[torch.Tensor, ...]:
        """Messages to model inputs. Copy what you keep: the messages' arrays are views that do not last.

        Raises:
            BadInput: the messages cannot be used; say why.
        """

    def steps(self, model: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> Iterator[Any]:
        """Outputs of an anytime model, from coarse to fine; the last are those of its `forward`.

        Each is of the form that `forward` returns; it is postprocessed before the next is asked for. At the
        deadline the newest is published, and no further one is asked for. Default: the model's own method
        `steps(*inputs)`.
        """
        steps: Iterator[Any] = model.steps(*inputs)  # type: ignore[operator]
        return steps

    @abc.abstractmethod
    def postprocess(self, outputs: Any, messages: Mapping[str, Received]) -> object:  # noqa: ANN401
        """Model outputs to a message of type `output`, stamped with the trigger's stamp.

        Its CDR bytes do, too: where a message has many small parts, they are made much faster by hand.

        Args:
            outputs: what the tier's model returned for the tensors of `preprocess`, as it is, on the
                stage's device: a tensor; of a model that returns `(boxes, scores)` a tuple, `outputs[0]`;
                of one that returns `{"boxes": ..., "scores": ...}` a dict, `outputs["boxes"]`. They are
                yours to keep and to change, as far as the model itself gives new ones at each call.
            messages: what `preprocess` got.
        """

    def scene(self, messages: Mapping[str, Received]) -> str | None:
        """The scene that the vehicle is in, by its name in the parameter `scenes`.

        For the frames from the next on.

        Called after `postprocess`, whose outputs it may have kept, on the frame's time. Default: None,
        which leaves the choice to the parameters' rules, as does a name that no scene has.
        """
        return None

    def training_task(self, log: Any) -> Any:  # noqa: ANN401 - both are of `train`, which lies above this
        """What `torchperf train --adapter` trains.

        A `Task`, of a `train.labelled_log.LabelledLog` or None.

        Default: None, there is nothing to train.
        """
        return None


def load_adapter(path: str) -> type[Adapter]:
    """Import `module:Class`.

    Raises:
        AdapterError: the module or class does not exist, fails to import, or is no `Adapter`.
    """
    module_name, _, class_name = path.partition(":")
    named = module_name.removesuffix(".py").strip("/").replace("/", ".")
    if not module_name or not class_name or named != module_name:
        example = (
            f"{named}:{class_name}" if named and class_name else "torchperf_ros.models.camera:CameraAdapter"
        )
        raise AdapterError(f"adapter {path!r} does not have the form module:Class, for example {example}")
    try:
        with without_exit(f"importing {module_name}"):
            module = importlib.import_module(module_name)
    except AdapterError as error:
        raise AdapterError(f"adapter {path!r}: {error}") from error
    except Exception as error:
        # The user's module runs here: any exception is the reason why it cannot be loaded.
        where = (
            "modules are found in the folder in which the command or node was started, in PYTHONPATH, and"
            " among what is installed"
        )
        is_missing = isinstance(error, ModuleNotFoundError) and module_name.startswith(str(error.name))
        raise AdapterError(
            f"adapter {path!r}: importing {module_name} failed: {type(error).__name__}: {error}"
            f"{f'; {where}' if is_missing else ''}"
        ) from error
    found = getattr(module, class_name, None)
    if not (isinstance(found, type) and issubclass(found, Adapter)):
        names = [
            value.__name__
            for value in vars(module).values()
            if isinstance(value, type) and issubclass(value, Adapter) and value is not Adapter
        ]
        raise AdapterError(
            f"adapter {path!r}: {module_name} has no Adapter class {class_name!r}; it has {names or 'none'}"
        )
    return found


def open_adapter(path: str, options: dict[str, Any], device: torch.device) -> Adapter:
    """Import `module:Class` and make one.

    Raises:
        AdapterError: see `load_adapter`, or its constructor ends the program; any other exception comes
            through.
    """
    kind = load_adapter(path)
    with without_exit(f"{kind.__name__}(options, device)"):
        return kind(options, device)


@contextlib.contextmanager
def without_exit(doing: str) -> Iterator[None]:
    """Context in which the user's code runs.

    An `exit()` in it is an error of that code and ends no program.

    Raises:
        AdapterError: there was one; the text has the place.
    """
    try:
        yield
    except SystemExit as error:
        library = str(Path(contextlib.__file__).parent)
        calls = [
            one
            for one in traceback.extract_tb(error.__traceback__)
            if not one.filename.startswith((library, "<"))
        ]
        where = f" ({Path(calls[-1].filename).name}:{calls[-1].lineno}: {calls[-1].line})" if calls else ""
        raise AdapterError(
            f"{doing} ends the program: SystemExit: {error.code}{where}; raise an error instead, and parse"
            " arguments below `if __name__ == '__main__':` only"
        ) from error


def on_one_cpu(path: str, options: dict[str, Any]) -> Adapter:
    """An adapter beside the workers, for what it says of messages; it gets one thread.

    Raises:
        AdapterError: see `load_adapter`; the adapter's exceptions come through.
    """
    torch.set_num_threads(1)
    return open_adapter(path, options, torch.device("cpu"))


# Seed of the examples by which a tier is judged; those of training have numbers.
HELD_OUT = "held out"


class Task(Protocol):
    """A model and what it learns from; made anew in each process that trains a tier.

    Those that derive from it have its defaults.

    Attributes:
        name: of the model, and of the files that are written.
        tiers: width of each tier's layers, best first.
        steps: of training, by default, of each tier.
        batch_size: examples per step.
        rate: highest learning rate of each tier.
        judged: examples that a final score is of, by default.
        gradient: the longest gradient that is applied as it is; longer ones are shortened to it.
        higher_is_better: whether that is so for the first figure of `judge`; not for a distance.
    """

    name: str
    tiers: Mapping[str, int]
    steps: Mapping[str, int]
    batch_size: int
    rate: Mapping[str, float]
    judged: int
    gradient: float
    higher_is_better: bool = True

    def network(self, tier: str, width: int | None = None) -> nn.Module:
        """An untrained network of a tier, on the CPU, in training mode.

        `width`: of its layers; only weights that `pruned` has made narrower ask for another one than the
        tier's.
        """

    def pruned(self, network: Any, share: float) -> tuple[nn.Module, int]:  # noqa: ANN401
        """The network without that share of its channels, those of the smallest weights; and its width.

        Raises:
            ConfigError: networks of this task cannot be pruned; so by default.
        """
        raise ConfigError(f"its networks cannot be pruned (a share of {share:g} was asked for)")

    def learn_from(self, teacher: Any) -> None:  # noqa: ANN401
        """Learn from the answers of a better network beside the labels (distillation); it is in eval mode.

        Raises:
            ConfigError: this task learns from no teacher; so by default.
        """
        raise ConfigError("it learns from no teacher")

    def batch(self, seed: int | str, number: int, count: int) -> Any:  # noqa: ANN401 - the task's own
        """So many examples, the same ones for the same seed and number, on the CPU."""

    def loss(self, network: nn.Module, batch: Any, device: torch.device) -> Tensor:  # noqa: ANN401
        """What is to become small, a scalar."""

    def judge(
        self, call: Callable[..., Any], seed: int | str, count: int, device: torch.device
    ) -> dict[str, float]:
        """Figures of so many examples by what a network or its engine gives for the inputs of one frame each.

        The first figure is drawn over the steps, and is what `torchperf tune` calls the accuracy.
        """

    def write_examples(self, weights: Path) -> None:
        """Write beside the weights what the adapter wants for its `score_inputs`. Default: nothing."""

    def card(self, judged: int) -> str:
        """Markdown for the model card: what the model does, what it learned from, what its figures mean."""


def open_task(path: str, *log: Any) -> Task:  # noqa: ANN401 - a log of the task's own kind
    """Make the task `module:Class`, which lies in a room above the adapter that names it."""
    module, _, name = path.partition(":")
    task: Task = getattr(importlib.import_module(module), name)(*log)
    return task
