"""Adapters for workers under test: what a frame's `header.frame_id` says (JSON) is what they do with it.

Imported by worker processes, which find this folder on PYTHONPATH. A frame's orders:
    do: what to do, see `misbehave`; wait: until the file `until` is in the adapter's folder
    where: preprocess (default) or observe
    once: only the first worker that comes to it does it (default), else every one
    only: the process that does it, default any
    ms, bytes: how long, how much
"""

import ctypes
import inspect
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path

import torch

from torchperf_ros.api.adapter import Adapter
from torchperf_ros.api.errors import BadInput, ConfigError
from torchperf_ros.api.messages import message_class
from torchperf_ros.engines.engine import CaptureFailed
from torchperf_ros.engines.package import ENGINES

TRIGGER = "geometry_msgs/msg/PointStamped"
OUTPUT = "nav_msgs/msg/Path"
POSES = 11
TIER_OFFSET = 1000.0
BREAKS_THE_RUN, SLOWS_THE_RUN = 66_666.0, 33_333.0


class Offset(torch.nn.Module):
    """Adds the tier's number times 1000, so that an output shows which tier made it.

    A flag makes it misbehave.
    """

    def __init__(self, tier_number):
        super().__init__()
        self.offset = TIER_OFFSET * tier_number

    def forward(self, x, flag):
        y = x + self.offset
        if flag[0] == 1:
            return y * torch.nan
        if flag[0] == 2:
            return torch.cat([y, y])
        return y


class Controlled(Adapter):
    """Does what each frame says. Its folder gets the stamps that each worker observed and preprocessed."""

    inputs = {"point": TRIGGER}
    output = OUTPUT

    def __init__(self, options, device):
        self._folder = Path(options["folder"])
        self._tiers = options.get("tiers", ["full", "fast"])
        self._cache, self._does = options.get("cache", ""), options.get("does", "")
        self._slow_tier_ms = options.get("slow_tier_ms", {})
        self._large_bytes = 0
        at_start(options, "init")

    def build(self, tier):
        return Offset(self._tiers.index(tier))

    def example_inputs(self, tier):
        return torch.zeros(1), torch.zeros(1)

    def observe(self, messages):
        received = messages["point"]
        self._note("observed", received.stamp_ns)
        self._obey(received, "observe")

    def missed(self, frames):
        self._note("missed", frames)

    def preprocess(self, messages):
        received = messages["point"]
        self._note("preprocessed", received.stamp_ns)
        done = self._obey(received, "preprocess")
        flag = {"nan": 1.0, "wrong_shape": 2.0}.get(done, 0.0)
        self._large_bytes = self._orders(received).get("bytes", 0) if done == "large" else 0
        return torch.tensor([float(received.message.point.x)]), torch.tensor([flag])

    def postprocess(self, outputs, messages):
        header = messages["point"].message.header
        x = float(outputs[0])
        poses = [self._pose(header, number, x) for number in range(POSES)]
        frame_id = "map" + "x" * self._large_bytes
        return message_class(OUTPUT)(
            header=message_class("std_msgs/msg/Header")(stamp=header.stamp, frame_id=frame_id), poses=poses
        )

    def _pose(self, header, number, x):
        at_ns = header.stamp.sec * 1_000_000_000 + header.stamp.nanosec + number * 500_000_000
        stamp = message_class("builtin_interfaces/msg/Time")(
            sec=at_ns // 1_000_000_000, nanosec=at_ns % 1_000_000_000
        )
        # The place above the ground, in nanometres, says which process made the path.
        point = message_class("geometry_msgs/msg/Point")(x=x + number, y=0.0, z=os.getpid() / 1e9)
        in_flight = message_class("geometry_msgs/msg/Quaternion")(x=0.0, y=0.0, z=0.0, w=1.0)
        return message_class("geometry_msgs/msg/PoseStamped")(
            header=message_class("std_msgs/msg/Header")(stamp=stamp, frame_id="map"),
            pose=message_class("geometry_msgs/msg/Pose")(position=point, orientation=in_flight),
        )

    def _note(self, what, stamp_ns):
        with (self._folder / f"{what}-{os.getpid()}").open("a", encoding="utf-8") as notes:
            notes.write(f"{stamp_ns}\n")

    @staticmethod
    def _orders(received):
        text = received.message.header.frame_id
        return json.loads(text) if text else {}

    def _obey(self, received, where):
        orders = self._orders(received)
        if not orders or orders.get("where", "preprocess") != where:
            return ""
        if orders.get("only", os.getpid()) != os.getpid():
            return ""
        if orders.get("once", True) and not self._claim(received.stamp_ns):
            return ""
        if orders["do"] == "wait":
            self._wait_for(orders["until"])
        misbehave(orders)
        return orders["do"]

    def _wait_for(self, name):
        while not (self._folder / name).exists():
            time.sleep(0.001)

    def _claim(self, stamp_ns):
        try:
            (self._folder / f"claimed-{stamp_ns}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


class Branchless(torch.nn.Module):
    """What `Offset` does, without branches, so that it can be compiled; it takes a size that varies."""

    def __init__(self, offset):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.offset = offset

    def forward(self, x, flag):
        return torch.tanh(x * 1e-6 * self.weight) * 1e6 + self.offset + 0.0 * flag[0]


class Compilable(Controlled):
    """Its model can be compiled; a frame's order `rows` says how long its first input is."""

    def build(self, tier):
        return Branchless(TIER_OFFSET * self._tiers.index(tier))

    def example_inputs(self, tier):
        return torch.ones(4), torch.zeros(1)

    def dynamic_dims(self):
        return {0: {0: (2, 64)}}

    def preprocess(self, messages):
        (x, flag), rows = super().preprocess(messages), self._orders(messages["point"]).get("rows", 4)
        return x.expand(rows).contiguous(), flag


class CompilableByOne(Compilable):
    """Its processes know one engine beside eager: the others' builds take many times as long."""

    def __init__(self, options, device):
        super().__init__(options, device)
        for name in set(ENGINES) - {"openvino"}:
            del ENGINES[name]


class HalfCompilable(Compilable):
    """Only its last tier can be compiled."""

    def build(self, tier):
        return super().build(tier) if tier == self._tiers[-1] else Offset(0)


class LooksAtValues(torch.nn.Module):
    """Its body can be compiled, and what it does with that cannot."""

    def __init__(self, offset):
        super().__init__()
        self.body = Branchless(offset)

    def forward(self, x, flag):
        y = self.body(x, flag)
        return y if bool(y.sum() > -1e9) else -y


class CompilableInPart(Compilable):
    """Only parts of its models can be compiled."""

    def build(self, tier):
        return LooksAtValues(TIER_OFFSET * self._tiers.index(tier))


class Plain(Controlled):
    """Keeps no history: `observe` is the adapter's own, which does nothing."""

    observe = Adapter.observe


class NamesScenes(Plain):
    """Names the scene that a frame's order `scene` says."""

    def scene(self, messages):
        return self._orders(messages["point"]).get("scene")


class ManyInputs(Plain):
    """Takes three more inputs than its trigger."""

    inputs = {"point": TRIGGER, **{f"other{number}": "std_msgs/msg/String" for number in range(3)}}


class Fusing(Plain):
    """Takes a second input with stamps: its x comes out, -1 without a message of it."""

    inputs = {"point": TRIGGER, "other": TRIGGER}

    def preprocess(self, messages):
        _, flag = super().preprocess(messages)
        other = messages.get("other")
        return torch.tensor([-1.0 if other is None else float(other.message.point.x)]), flag


class UnknownOutput(Plain):
    """Gives a message type that is not installed."""

    output = "nowhere_msgs/msg/Nothing"


def at_start(options, where):
    """Misbehave while a worker starts, if the options say so."""
    what = options.get("at_start", {}).get(where)
    if what == "config_error":
        raise ConfigError("option speed: -1 is not allowed")
    if what:
        misbehave({"do": what})


class Speechless(Exception):
    """An error whose text cannot be had."""

    def __str__(self):
        raise ValueError("no words")


def close_descriptors(which):
    """Close the sockets to the node: both, or only the one that frames come by, and never return."""
    sockets = [fd for fd in map(int, os.listdir("/proc/self/fd")) if fd > 2 and is_socket(fd)]
    for descriptor in sorted(sockets)[: None if which == "close_sockets" else 1]:
        os.close(descriptor)
    if which == "close_frames":
        signal.pause()


def is_socket(descriptor):
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:")
    except OSError:
        return False


def recurse():
    return recurse()


def misbehave(orders):
    """Do what a bad model does."""
    {
        "name": lambda: None,
        "sleep": lambda: time.sleep(orders["ms"] / 1000),
        "hold_gil": lambda: ctypes.PyDLL(None).usleep(int(orders["ms"] * 1000)),
        "spin": spin,
        "raise": lambda: throw(RuntimeError("the model has had enough")),
        "raise_unprintable": lambda: throw(FileNotFoundError("no such file: \udcff")),
        "raise_speechless": lambda: throw(Speechless()),
        "bad_input": lambda: throw(BadInput("this point is useless")),
        "keyboard_interrupt": lambda: throw(KeyboardInterrupt()),
        "recursion": recurse,
        "sigkill": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "sigsegv": segfault,
        "exit": lambda: sys.exit(3),
        "os_exit": lambda: os._exit(3),
        "close_sockets": lambda: close_descriptors("close_sockets"),
        "close_frames": lambda: close_descriptors("close_frames"),
        "print": lambda: (
            print("said on stdout", flush=True),
            print("said on stderr", file=sys.stderr, flush=True),
        ),
        "flood": lambda: sys.stdout.write("many words\n" * (orders["bytes"] // 11)),
        "fork": fork,
    }.get(orders["do"], bool)()


def throw(error):
    raise error


def spin():
    while True:
        pass


def segfault():
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.string_at(0)


def fork():
    if os.fork() == 0:
        signal.pause()
        os._exit(0)


class Uncapturable(Controlled):
    """Fails as a capture does, four times; on a CPU a worker that still wants graphs would not load at all."""

    def build(self, tier):
        tried = len(list(self._folder.glob("tried*")))
        if tried < 4:
            (self._folder / f"tried{tried}").touch()
            raise CaptureFailed("it cannot be captured")
        return super().build(tier)


class Capturing(Controlled):
    """Captures its models, which misbehaves until somebody has found out."""

    def build(self, tier):
        loader = next(one.frame.f_locals["self"] for one in inspect.stack() if one.function == "load")
        loader.capturing("key")
        if not Path(self._cache, "key.uncapturable").exists():
            misbehave({"do": self._does})
        loader.capturing("")
        return super().build(tier)


class Refining(Offset):
    """`Offset`'s result plus 1, 2 and 3; before a frame's `step` it does what the frame says."""

    before = staticmethod(lambda number: None)

    def forward(self, x, flag):
        return super().forward(x, flag) + 3

    def steps(self, x, flag):
        for number in (1, 2, 3):
            self.before(number)
            yield Offset.forward(self, x, flag) + number


class Stepping(Controlled):
    """An anytime model. An order's `step` is the one before which it is obeyed."""

    anytime = True

    def build(self, tier):
        return Refining(self._tiers.index(tier))

    def preprocess(self, messages):
        orders = self._orders(messages["point"])

        def before(number):
            if number == orders.get("step") and (orders.get("only", os.getpid()) == os.getpid()):
                if orders["do"] == "wait":
                    self._wait_for(orders["until"])
                misbehave(orders)

        Refining.before = staticmethod(before)
        return torch.tensor([float(messages["point"].message.point.x)]), torch.zeros(1)


class Shifted(Controlled):
    """Another version: half a metre beside."""

    def postprocess(self, outputs, messages):
        return super().postprocess((outputs[0] + 0.5, *outputs[1:]), messages)


class GivesPoints(Controlled):
    """Gives another type of message."""

    output = TRIGGER


class Joints(Controlled):
    """Takes names of joints, of which one message may list millions."""

    inputs = {"point": "sensor_msgs/msg/JointState"}

    def observe(self, messages):
        pass

    def preprocess(self, messages):
        return torch.zeros(1), torch.zeros(1)


class Together(Controlled):
    """Takes several frames in one run."""

    def dynamic_dims(self):
        return {index: {0: (1, 8)} for index in range(2)}


class Slow(torch.nn.Module):
    """Takes 20 ms for however many frames, as a GPU does that has room for more."""

    def forward(self, x):
        time.sleep(0.3 if (x == SLOWS_THE_RUN).any() else 0.02)
        if (x == BREAKS_THE_RUN).any():
            throw(RuntimeError("an index is out of range"))
        return x + 0.0


class Batched(Controlled):
    """Frames of several streams may run together; with the option `sizes` each stream has its size."""

    def __init__(self, options, device):
        super().__init__(options, device)
        self._size = ord(options["stream"][0]) if options.get("sizes") else 1

    def build(self, tier):
        return Slow()

    def example_inputs(self, tier):
        return (torch.zeros(1, 1),)

    def dynamic_dims(self):
        return {0: {0: (1, 8)}}

    def preprocess(self, messages):
        x, _ = super().preprocess(messages)
        do = self._orders(messages["point"]).get("do")
        x = {"break_run": x * 0 + BREAKS_THE_RUN, "slow_run": x * 0 + SLOWS_THE_RUN}.get(do, x)
        return (x[None].expand(1, self._size).contiguous(),)

    def postprocess(self, outputs, messages):
        return super().postprocess(outputs[0], messages)
