"""A log's frames as model inputs: what quantised engines are calibrated with, and compared by.

A process of its own reads them, as the adapter's code runs there. Job: `adapter`, `options`, `device`,
`log`, `frames` (the file to write). It sends `step` (text), and `frames` (text) at last, or `failed` (text).
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from torchperf_ros.api.adapter import Adapter, Received, open_adapter
from torchperf_ros.api.cdr import header_stamp_ns
from torchperf_ros.api.errors import AdapterError, BadInput, TorchperfError, one_line
from torchperf_ros.api.messages import decode, has_header
from torchperf_ros.engines.built_tier import Inputs, write_frames
from torchperf_ros.engines.device import Device, choose_device
from torchperf_ros.replay.logs.log_reader import LogReader

# half of them calibrate, as many as static quantisation usually takes, and half are compared
_MOST_FRAMES: Final = 64


def do_job(job: Mapping[str, Any], say: Callable[..., None]) -> bool:
    """Keep the log's frames as inputs; a `TorchperfError` where there are none."""
    say("step", text=f"reading frames of {job['log']}")
    say("frames", text=keep_frames(job))
    return True


def keep_frames(job: Mapping[str, Any]) -> str:
    """Write the inputs that the job's adapter makes of frames spread over the job's log.

    Returns how many there are, in words.

    Raises:
        TorchperfError: the log has no frame that the adapter takes, or the adapter raises.
    """
    device, log = Device(choose_device(job["device"]), 0).device, Path(job["log"])
    adapter = open_adapter(job["adapter"], job["options"], device)
    trigger = next(iter(adapter.inputs))
    with LogReader(log) as counted:
        triggers = sum(1 for _ in counted.messages(_topics_of(counted, adapter.inputs[trigger])))
    chosen = set(np.linspace(0, triggers - 1, min(_MOST_FRAMES, triggers)).astype(int))
    frames, refused, why = list[Inputs](), 0, ""
    for number, messages in enumerate(log_frames(adapter, log)):
        try:
            adapter.observe(messages)
            if number in chosen:
                frames.append(tuple(adapter.preprocess(messages)))
        except BadInput as error:
            refused, why = refused + 1, str(error)
        except Exception as error:  # the user's code
            raise AdapterError(
                f"adapter {job['adapter']!r} raises on frame {number} of {log}: {one_line(error)}"
            ) from error
    if not frames:
        refusal = f"; the adapter refuses all {refused}: {why}" if refused else ""
        raise TorchperfError(f"log {log}: none of its {triggers} frames can be used{refusal}")
    write_frames(frames, Path(job["frames"]))
    return f"{len(frames)} of {triggers} frames of {log.name}" + (
        f", {refused} refused: {why}" if refused else ""
    )


def log_frames(adapter: Adapter, log: Path) -> Iterator[dict[str, Received]]:
    """Each frame of a log: its trigger, and the newest message of each other input before it, if any.

    A topic is the first input of its message type.

    Raises:
        TorchperfError: the log has no message of the trigger's type.
    """
    by_type = {kind: topic for topic, kind in reversed(adapter.inputs.items())}
    trigger, latest = next(iter(adapter.inputs)), dict[str, Received]()
    with LogReader(log) as reader:
        _topics_of(reader, adapter.inputs[trigger])
        for message in reader.messages():
            topic = by_type.get(message.type_name)
            if topic is None:
                continue
            stamp_ns = header_stamp_ns(message.data) if has_header(message.type_name) else 0
            latest[topic] = Received(decode(message.data, message.type_name), stamp_ns, 0.0)
            if topic == trigger:
                yield {name: latest[name] for name in adapter.inputs if name in latest}


def _topics_of(log: LogReader, kind: str) -> list[str]:
    found = [name for name, topic in log.topics.items() if topic.type_name == kind]
    if not found:
        kinds = ", ".join(sorted({topic.type_name for topic in log.topics.values()}))
        raise TorchperfError(f"log {log.path} has no {kind}, which is the trigger; it has {kinds}")
    return found
