"""Adapters with one mistake each, and what the check says of it."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional
from typer.testing import CliRunner

from torchperf_ros import BadInput
from torchperf_ros.api.adapter import Adapter
from torchperf_ros.api.messages import empty_message, message_class
from torchperf_ros.tools import main as cli
from torchperf_ros.tools.check import AdapterCheck

IMAGE = "sensor_msgs/msg/Image"


class Good(Adapter):
    """Answers an image with the mean of each of its four quarters."""

    inputs = {"image": IMAGE}
    output = IMAGE

    def __init__(self, options, device):
        pass

    def build(self, tier):
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Conv2d(3, 1, 1), torch.nn.AdaptiveAvgPool2d(2))

    def example_inputs(self, tier):
        return (torch.zeros(1, 3, 480, 640),)

    def preprocess(self, messages):
        image = messages["image"].message
        if image.encoding != "rgb8":
            raise BadInput(f"the encoding is {image.encoding}")
        return (torch.tensor(image.data.reshape(1, 480, 640, 3)).permute(0, 3, 1, 2).float(),)

    def postprocess(self, outputs, messages):
        return message_class(IMAGE)(
            messages["image"].message.header, 2, 2, "mono8", 0, 2, np.zeros(4, np.uint8)
        )


class Two(Good):
    """Its tiers are not the node's usual three, and it takes images of one size."""

    size = (120, 160)

    def build(self, tier):
        torch.manual_seed(0)
        return torch.nn.Conv2d(3, {"full": 4, "fast": 2}[tier], 1)

    def example_inputs(self, tier):
        return (torch.zeros(1, 3, *self.size),)

    def preprocess(self, messages):
        image = messages["image"].message
        if (image.height, image.width) != self.size:
            raise BadInput(f"{image.width}x{image.height}")
        return self.example_inputs("full")


class Computes(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.forward = function


def detected(image):
    """Boxes of what is bright: their number follows from the frame."""
    return {"boxes": (image[0, 0] > image.mean() - 1).nonzero(), "scores": image[image > image.mean() - 1]}


def raise_(error):
    raise error


def like_good(name, **methods):
    """The good one, but for these methods."""
    return type(name, (Good,), methods)


Others = like_good(
    "Others", build=lambda self, tier: {"large": torch.nn.ReLU(), "small": torch.nn.Tanh()}[tier]
)
Disparity = "stereo_msgs/msg/DisparityImage"
Markers = "visualization_msgs/msg/MarkerArray"
Marking = like_good(
    "Marking",
    output=Markers,
    postprocess=lambda self, outputs, messages: empty_message(
        Markers, markers=[empty_message("visualization_msgs/msg/Marker")]
    ),
)


def models(name, make, **methods):
    """The good one, with models of another kind."""

    def build(self, tier):
        torch.manual_seed(0)
        return make()

    return like_good(name, build=build, **methods)


class Layer(torch.nn.Module):
    """Means of three colours; `change` makes of them what is wrong."""

    def __init__(self, change, part=None):
        super().__init__()
        self.layer, self.part, self.change = torch.nn.Linear(3, 2), part, change

    def forward(self, image):
        return self.change(self, self.layer(image.mean((2, 3))))


def kept(module, means):
    module.last = means + getattr(module, "last", 0.0)
    return module.last


CALLS = []


def counted():
    """State that is the module's, of Python: no model holds it."""
    CALLS.append(0)
    return float(len(CALLS))


Refusing = like_good("Refusing", preprocess=lambda self, messages: raise_(BadInput("too dark")))


MISTAKES = [
    (
        like_good("OtherWeights", build=lambda self, tier: torch.nn.Sequential(torch.nn.Conv2d(3, 1, 1))),
        "tier full: weights",
        "build('full') gives other weights at every call (0.bias and 1 more)",
    ),
    (
        Others,
        "tiers",
        "builds none of the tiers full, medium, fast (tier full: Others.build knows no tier",
    ),
    (
        like_good(
            "Within",
            output=Disparity,
            postprocess=lambda self, outputs, messages: empty_message(
                Disparity, image=empty_message(IMAGE, height=1, width=4, encoding="rgb8", step=9)
            ),
        ),
        "tier full: frame",
        "contradicts itself: image: step is 9; 4 pixels of rgb8 take 12",
    ),
    (
        like_good("NotAModule", build=lambda self, tier: 7),
        "tier full: build",
        "build gave an int, not a torch.nn.Module",
    ),
    (
        like_good("Nan", build=lambda self, tier: Computes(lambda image: image.mean() / 0)),
        "tier full: second run",
        "NaN or Inf",
    ),
    (
        like_good(
            "OtherInputs",
            example_inputs=lambda self, tier: (torch.zeros(1, 3, 480, 640 if tier == "full" else 320),),
        ),
        "tiers",
        "tiers take different inputs",
    ),
    (
        models("Dropping", lambda: Layer(lambda module, x: functional.dropout(x))),
        "tier full: same input",
        "dropout is active: dropout gets training=True; it has to follow self.tr",
    ),
    (
        models("Training", lambda: Layer(lambda module, x: module.train().part(x), torch.nn.Dropout())),
        "tier full: same input",
        "part is in training mode after eval()",
    ),
    (
        models(
            "Attending",
            lambda: Layer(
                lambda module, x: functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
            ),
        ),
        "tier full: same input",
        "scaled_dot_product_attention gets dropout_p=0.5",
    ),
    (
        models("NotThere", lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.LazyLinear(2))),
        "tier full: weights",
        "1.weight is not initialised",
    ),
    (
        models("OfProgram", lambda: torch.export.export(torch.nn.ReLU(), (torch.zeros(1),))),
        "tier full: build",
        "build gave an ExportedProgram, not a torch.nn.Module; its .module() is one",
    ),
    (
        models("NanOfFrame", lambda: Computes(lambda image: image.mean() / (image.max() - 128))),
        "tier full: frame",
        "NaN or Inf",
    ),
    (
        models("TypeOfFrame", lambda: Computes(lambda image: image.double() if image.any() else image)),
        "tier full: frame",
        "outputs have the types and shapes float64",
    ),
    (
        like_good("Untupled", preprocess=lambda self, messages: torch.zeros(1, 3, 480, 640)),
        "tier full: preprocess",
        "preprocess gave a tensor float32 1x3x480x640 alone",
    ),
    (
        like_good("OfArrays", preprocess=lambda self, messages: (np.zeros((1, 3, 480, 640), np.float32),)),
        "tier full: preprocess",
        "preprocess gave a tuple of 1: a ndarray; it has to give",
    ),
    (
        like_good("OtherRank", preprocess=lambda self, messages: (torch.zeros(3, 480, 640),)),
        "tier full: preprocess",
        "number, types and dimensions of the tensors have to be the same",
    ),
    (
        like_good("OtherSize", preprocess=lambda self, messages: (torch.zeros(1, 3, 240, 320),)),
        "tier full: preprocess",
        "`dynamic_dims` has to declare the difference; it declares none",
    ),
    (
        like_good("Leaving", __init__=lambda self, options, device: sys.exit()),
        "load",
        "Leaving(options, device) ends the program: SystemExit: None (test_check.py:",
    ),
    (
        like_good("LeavingLater", preprocess=lambda self, messages: raise_(SystemExit(3))),
        "tier full: preprocess",
        "preprocess ends the program: SystemExit: 3 (test_check.py:",
    ),
    (
        like_good("OtherStamp", postprocess=lambda self, outputs, messages: empty_message(IMAGE)),
        "tier full: frame",
        "header.stamp is 0 ns, the trigger's is 1000000000",
    ),
]
UNUSUAL = [
    (models("Stateful", lambda: Layer(kept)), "same input", "the answer depends on earlier calls (last)"),
    (
        models("Drawing", lambda: Layer(lambda module, x: x + torch.rand(1))),
        "same input",
        "the same input gives another answer the second time: the model draws at random",
    ),
    (
        models("CountingCalls", lambda: Layer(lambda module, x: x + counted())),
        "same input",
        "no attribute of a module holds what it depends on: a global, a class, a closure",
    ),
    (
        models("Hidden", lambda: Layer(lambda module, x: lambda: x)),
        "outputs",
        "are not checked for NaN and Inf: in a function no tensor, array or number can be found",
    ),
]


def check(kind, monkeypatch, tiers=()):
    monkeypatch.setattr("torchperf_ros.api.adapter.load_adapter", lambda path: kind)
    checked = AdapterCheck(f"{__name__}:{kind.__name__}", {}, tiers, "cpu", None)
    found = list(checked.run())
    return not checked.failed, found, checked


Detecting = models(
    "Detecting", lambda: Computes(detected), example_inputs=lambda self, tier: (torch.rand(1, 3, 480, 640),)
)
Changing = models(
    "Changing",
    lambda: Computes(lambda image: image.sub_(0.5).mean()),
    example_inputs=lambda self, tier: (torch.rand(1, 3, 480, 640),),
)


# a marker without a texture has none that could be wrong
@pytest.mark.parametrize("kind", [Good, Marking, Detecting, Changing])
def test_given_a_good_adapter_when_checked_then_every_step_is_ok(monkeypatch, kind):
    good, found, _ = check(kind, monkeypatch, tiers=("full", "fast"))
    assert good, found
    assert {finding.ok for finding in found} == {True}
    assert {"load", "tier full: build again", "tier fast: frame"} <= {finding.step for finding in found}


@pytest.mark.parametrize(("kind", "tiers"), [(Good, {"full"}), (Two, {"full", "fast"})])
def test_given_no_names_of_tiers_then_those_that_it_builds_are_run_on_an_image_of_their_size(
    monkeypatch, kind, tiers
):
    good, found, checked = check(kind, monkeypatch)
    assert good, found
    assert not checked.refused
    assert {
        finding.step.split()[1].rstrip(":") for finding in found if finding.step.startswith("tier ")
    } == tiers


@pytest.mark.parametrize(
    ("kind", "step", "text", "ok"),
    [
        *((*mistake, False) for mistake in MISTAKES),
        *((kind, f"tier full: {step}", text, None) for kind, step, text in UNUSUAL),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_given_a_mistake_or_what_is_only_unusual_when_checked_then_the_step_says_so(
    monkeypatch, kind, step, text, ok
):
    good, found, _ = check(kind, monkeypatch, () if kind is Others else ("full", "fast"))
    assert good == (ok is None), found
    assert any(finding.step == step and finding.ok is ok and text in finding.text for finding in found), (
        found
    )


def test_given_a_frame_that_is_refused_when_checked_then_nothing_failed_and_a_log_is_asked_for(monkeypatch):
    good, found, checked = check(Refusing, monkeypatch)
    assert good
    assert checked.refused
    assert found[-1].text == "refused: too dark; try a frame of a log: --log"


def test_given_weights_that_change_when_the_command_runs_then_one_line_says_so(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    result = CliRunner().invoke(
        cli.app, ["check", "tune_adapters:TinyAdapter", "--device", "cpu", *["--options", '{"seed": null}']]
    )
    assert result.exit_code == 1
    (line,) = [
        line for line in result.stdout.splitlines() if "gives other weights" in line and "tier full" in line
    ]
    assert line.startswith(
        "no  tier full: weights  no package can be kept: build('full') gives other weights"
    )
    assert line.endswith("load them from a file, or call torch.manual_seed before they are drawn")
