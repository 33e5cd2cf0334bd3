"""What a candidate beside a stage costs the version that serves, in turns.

Without one, and with one as a shadow.

One node, one camera. The candidate is the same model with another option, so both take the same time; it
gets every frame that leaves it slack. Then it serves, and is called back; what the camera sees of both
changes is timed, too. Lateness is receipt to publish less the budget.
"""

import argparse
import json
import sys
import time
from typing import Any, Final

from rcl_interfaces.srv import SetParametersAtomically
from rclpy.parameter import Parameter

from benchmarks.rig.arguments import add_backup, add_camera, add_stage, arguments_of
from benchmarks.rig.bench_stage import OURS, STAGE
from benchmarks.rig.frames import lateness, show_lateness
from benchmarks.rig.graph import GraphError, Streaming
from benchmarks.rig.observer import Row
from benchmarks.rig.report import Report, Target, say

_FIRST_FRAMES: Final = 10  # of each slice: after the pause, caches are cold
_WITHOUT, _WITH, _CHANGES = "without", "with a shadow", "while it serves and is called back"
_ROOM_MS: Final = 0.1
_BACK_S: Final = 1.0
_PAUSE_S: Final = 1.0
_SERVES_WITHIN_S = 120.0
_EPILOG = """\
target: p99.9 of the lateness grows by no more than 0.1 ms; called back, the base serves within 1 s

examples:
  ./run bench candidate
  ./run bench candidate --seconds 120 --model-ms 5 --json candidate.json"""


class Candidate:
    """The node's parameters `candidate` and `candidate_serves`, set while the camera streams or stands still."""

    def __init__(self, streaming: Streaming) -> None:
        self._streaming, self._observer = streaming, streaming.graph.observer
        self._client = self._observer._node.create_client(
            SetParametersAtomically, f"{OURS}/perf/set_parameters_atomically"
        )
        file = streaming.graph.folder / "candidate.yaml"
        options = json.loads((streaming.graph.folder / "parameters.yaml").read_text())["/**"][
            "ros__parameters"
        ][STAGE]
        other = {**json.loads(options["options"]), "candidate": True}
        file.write_text(json.dumps({"version": "b", "options": other}), encoding="utf-8")
        self._file = str(file)

    def set(self, **values: object) -> None:
        """Set parameters of the stage; raises `GraphError` where the node refuses."""
        named = [
            Parameter(f"{STAGE}.{name}", value=value).to_parameter_msg() for name, value in values.items()
        ]
        future = self._client.call_async(SetParametersAtomically.Request(parameters=named))
        self._observer.listen(30.0, future.done)
        if not future.done() or not future.result().result.successful:
            raise GraphError(f"the node does not take {values}: {future.result()}")

    def says(self, key: str) -> str:
        return self._streaming.node.counters.get(key, "")

    def begin(self) -> None:
        """Have the candidate beside, and wait until it is ready."""
        self.set(candidate=self._file)
        self.wait("candidate", "b: shadow")

    def end(self) -> None:
        """Have none, and wait until it is gone."""
        self.set(candidate="", candidate_serves=False)
        self.wait("candidate", "")

    def wait(self, key: str, value: str) -> None:
        """Wait until the stage's status says so."""
        self._streaming.graph.wait(
            lambda: self.says(key) == value,
            f"{key} {value}; it is {self.says(key)}",
            self._streaming.node.process,
        )


def main() -> int:
    arguments = _parser().parse_args()
    report = Report("candidate", arguments)
    rows: dict[str, list[Row]] = {_WITHOUT: [], _WITH: [], _CHANGES: []}
    back_s: list[float] = []
    with Streaming(arguments, adapter="benchmarks.rig.bench_adapter:BenchAdapter") as streaming:
        candidate = Candidate(streaming)
        seconds = min(arguments.slice, arguments.seconds)
        for turn in range(max(1, round(arguments.seconds / seconds))):
            for kind in (_WITHOUT, _WITH):
                say(f"turn {turn + 1}: {kind}, {seconds:g} s")
                if kind == _WITH:
                    candidate.begin()
                streaming.seen.clear()
                streaming.stream(seconds)
                rows[kind] += streaming.seen.rows[_FIRST_FRAMES:]
            pairs, skipped = candidate.says("candidate_pairs"), candidate.says("candidate_skipped")
            if turn < round(arguments.seconds / seconds) - 1:
                candidate.end()
        say("it serves, and is called back")
        streaming.seen.clear()
        for _ in range(arguments.changes):
            back_s.append(_there_and_back(streaming, candidate, arguments))
        rows[_CHANGES] = list(streaming.seen.rows)
    figures = {kind: lateness(found) for kind, found in rows.items()}
    figures["candidate"] = {"pairs": pairs, "skipped": skipped, "back_s": back_s}
    _show(report, figures)
    grown_ms = figures[_WITH]["lateness_ms"]["p99_9"] - figures[_WITHOUT]["lateness_ms"]["p99_9"]
    report.finish(
        figures,
        [
            Target("p99.9 of the lateness, with a shadow less without", grown_ms, "<=", _ROOM_MS, "ms"),
            Target("until the base serves again, called back, slowest", max(back_s), "<=", _BACK_S, "s"),
        ],
    )
    return 0


def _there_and_back(streaming: Streaming, candidate: Candidate, arguments: argparse.Namespace) -> float:
    """Seconds from the call until an output of the base leaves; outputs name the process that made them."""
    camera, observer, outputs = streaming.camera, streaming.graph.observer, streaming.seen.outputs
    observer.listen(_PAUSE_S)  # the stream of the time before has ended
    candidate.set(candidate_serves=True)
    give_up_s = time.monotonic() + _SERVES_WITHIN_S
    while candidate.says("version") != "b":
        if time.monotonic() > give_up_s:
            says = candidate.says("candidate")
            raise GraphError(f"the candidate does not serve within {_SERVES_WITHIN_S:g} s: {says}")
        streaming.stream(
            _PAUSE_S
        )  # it serves only after enough frames beside the base, and gets all its workers first
    observer.listen(_PAUSE_S)
    count = len(outputs)
    camera.begin(OURS, seconds=_PAUSE_S + arguments.slice, rate=arguments.rate, size=arguments.size)
    if not observer.listen(30.0, lambda: len(outputs) > count):
        raise GraphError("no image is answered while the candidate serves")
    before_ns, own = time.time_ns(), outputs[-1].source
    candidate.set(candidate_serves=False)
    count = len(outputs)
    if not observer.listen(30.0, lambda: any(one.source != own for one in outputs[count:])):
        raise GraphError("called back, the base has not served within 30 s")
    back_ns = next(one.written_ns for one in outputs[count:] if one.source != own)
    observer.listen(arguments.slice)
    return (back_ns - before_ns) / 1e9


def _show(report: Report, figures: dict[str, Any]) -> None:
    show_lateness(report, {kind: figures[kind] for kind in (_WITHOUT, _WITH, _CHANGES)})
    found = figures["candidate"]
    report.table(
        "The candidate",
        ("", ""),
        [
            ["pairs of the last turn", found["pairs"]],
            ["frames that it only observed", found["skipped"]],
            ["base serves again after, in s", ", ".join(f"{each:.2f}" for each in found["back_s"])],
        ],
    )


def _parser() -> argparse.ArgumentParser:
    parser = arguments_of(__doc__ or "", _EPILOG)
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="of stream with and without each (default 60)"
    )
    parser.add_argument("--slice", type=float, default=20.0, help="seconds of each turn (default 20)")
    parser.add_argument(
        "--changes", type=int, default=3, help="so often it serves and is called back (default 3)"
    )
    add_camera(parser)
    add_stage(parser)
    add_backup(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
