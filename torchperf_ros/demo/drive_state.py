"""What is known about a running drive: the node's messages and the saboteurs' journals, folded into one state.

Nothing here waits, reads a clock or draws; times are handed in. Missing keys and unknown stages are tolerated, so that
the view can look at any version of the node.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torchperf_ros.telemetry.node_state import NodeState
from torchperf_ros.telemetry.stage_state import SeenFrame


@dataclass(frozen=True)
class Injection:
    """One line of a saboteur's journal, and the frame that it hit."""

    stage: str
    kind: str
    stamp_ns: int
    pid: int
    record: SeenFrame | None = None

    @property
    def answer(self) -> str:
        """How the frame was answered, in words."""
        return "not seen" if self.record is None else self.record.answer


class DriveState(NodeState):
    """Everything that the view and the verdict are made of.

    Attributes:
        title: what is driven.
        seconds: how long it is to last.
        phase: `starting`, `driving`, `ending` or `ended`.
        injections: what was sabotaged.
        player: what the player said at its end, empty before.
        player_ready: whether the player can start.
        others_share: of the processor, that other programs took, 0 to 1; NaN if unknown.
    """

    def __init__(self, stages: Iterable[str], title: str, seconds: float) -> None:
        """Know nothing yet about these stages."""
        super().__init__(stages)
        self.title = title
        self.seconds = seconds
        self.phase = "starting"
        self.injections: list[Injection] = []
        self.player: dict[str, Any] = {}
        self.player_ready = False
        self.others_share = math.nan

    def on_player(self, line: str) -> None:
        """Fold in a line that the player wrote."""
        try:
            said = json.loads(line)
            word = said.pop("event")
        except (ValueError, KeyError, AttributeError, TypeError):
            said, word = {"text": line}, "note"
        if word == "done":
            self.player = said
        elif word == "ready":
            self.player_ready = True
        else:
            self.event("note", "player", str(said.get("text", word)))

    def on_journal(self, stage: str, line: str) -> None:
        """Fold in a line of a saboteur's journal."""
        entry = json.loads(line)
        self.injections.append(Injection(stage, entry["kind"], entry["stamp_ns"], entry["pid"]))

    def match(self) -> None:
        """Find the frames that were hit by injections whose frame is not known yet, and tell how they were answered."""
        for number, injection in enumerate(self.injections):
            stage = self.stages.get(injection.stage)
            if injection.record is not None or stage is None:
                continue
            near = stage.nearest(injection.stamp_ns)
            if near is None:
                continue
            found = Injection(injection.stage, injection.kind, injection.stamp_ns, injection.pid, near)
            self.injections[number] = found
            self.event(
                "sabotage",
                injection.stage,
                f"{injection.kind} in pid {injection.pid}: {found.answer} after {near.total_ms:.1f} ms"
                f" of {near.budget_ms:.0f}",
            )

    def answers(self) -> Mapping[str, Counter[str]]:
        """Per kind of sabotage, how often it was answered how."""
        table: dict[str, Counter[str]] = {}
        for injection in self.injections:
            table.setdefault(injection.kind, Counter())[injection.answer] += 1
        return table
