"""A latch and its file, whatever happens to the node, the disk, the buttons and the clocks, in any order.

What holds is taken from docs/emergency.md: once latched, only a granted clear ends it. No restart does, at whatever
moment the process before it was killed and whatever its file has become since.
"""

import os
import shutil
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from torchperf_ros.api.clock import NS_PER_S
from torchperf_ros.safety.emergency import Emergency, Latch
from torchperf_ros.safety.kept_latch import LatchKeeper, read_latch
from torchperf_ros.settings.config import node_config

from .sensor_messages import bool_bytes, odometry_bytes, scan_bytes

SEQUENCES = int(os.environ.get("TORCHPERF_LANE_SEQUENCES", "40"))
SCAN, BUTTON = range(2)
FREE, BLOCKED, BLIND = (scan_bytes(np.full(31, distance)) for distance in (np.inf, 4.0, 0.0))
OPTIONS = node_config(
    {"emergency.sensors": ["scan", "button Bool timeout 0"], "emergency.start_s": 2.0}, {}
).emergency
TIMEOUT_NS = 3 * NS_PER_S // 10
AGAIN_S, WITHIN_S = 0.01, 20.0
NODES = ("first", "second")
"""Of one name, so that they have one file."""


def mark_of(file):
    """Of what lies there: another one after it was written anew, None if nothing does."""
    try:
        found = os.lstat(file)
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def soon(holds, what):
    give_up_at = time.monotonic() + WITHIN_S
    while not holds():
        assert time.monotonic() < give_up_at, what
        time.sleep(0.0002)


class Process:
    """A lane's process with its latch on disk, as `emergency_process` puts them together."""

    def __init__(self, file, now_ns, *, disk_hangs, active):
        self.rules = Emergency(OPTIONS)
        self.heard = None  # the button's last message, as far as this process can know
        self.good_ns = {}  # when each topic last said that all is well
        self._goes_on = threading.Event()
        self.disk_hangs = disk_hangs
        if active:
            self.rules.activate(now_ns)
        self.kept = read_latch(file, now_ns)
        if self.kept is not None:
            self.rules.resume(self.kept.kind, self.kept.reason, None, now_ns)
        if not disk_hangs:
            self._goes_on.set()
        latch = self.rules.latch if self.kept else None
        self.keeper = LatchKeeper(file, latch, self._begin, again_s=AGAIN_S)

    def _begin(self):
        self._goes_on.wait()

    def tell(self):
        self.keeper.keep(self.rules.latch)

    def kill(self):
        """Leave things as they are on the disk."""
        if self.disk_hangs:
            self.keeper.keep(self.kept if self.kept is not None else None)  # what the disk says already
            self._goes_on.set()
        self.keeper.close()


class Latched(RuleBasedStateMachine):
    """Nodes of one name come and go, and each is latched until a clear of its own is granted."""

    @initialize()
    def begin(self):
        self.folder = Path(tempfile.mkdtemp())
        self.file = self.folder / "state" / "latch.json"
        self.part = self.file.with_name(".latch.json.part")
        self.now_ns = 1_000 * NS_PER_S
        self.processes: dict[str, Process] = {}
        self.latches: dict[str, Latch] = {}  # of those that run
        self.is_owed = False  # whether a node that starts now has to be latched
        self.is_full = False

    def teardown(self):
        for process in self.processes.values():
            process.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    # -- nodes

    @rule(name=st.sampled_from(NODES), disk_hangs=st.booleans(), active=st.booleans())
    def start(self, name, disk_hangs, active):
        if name in self.processes:
            return
        process = self.processes[name] = Process(
            self.file, self.now_ns, disk_hangs=disk_hangs, active=active
        )
        latch = process.rules.latch
        assert latch is not None or not self.is_owed
        assert latch is not None or len(self.processes) > 1 or not os.path.lexists(self.file)
        if latch is not None:
            self.latches[name] = latch
            if "is not known" in latch.reason:
                assert str(self.file) in latch.reason
                assert "clear it" in latch.reason
            else:
                assert "before the node's start" in latch.reason

    @precondition(lambda self: self.processes)
    @rule(
        draw=st.data(),
        in_order=st.booleans(),
        leaves=st.one_of(st.none(), st.integers(0, 300)),
    )
    def end(self, draw, in_order, leaves):
        """It is killed, or ended in order; killed while it writes, it leaves a part of the file."""
        name = draw.draw(st.sampled_from(sorted(self.processes)))
        process, latch = self.processes.pop(name), self.latches.pop(name, None)
        if in_order and process.disk_hangs:
            process._goes_on.set()
            process.disk_hangs = False
        if latch is not None and not process.disk_hangs:
            self.settle(process)
        process.kill()
        if latch is not None and not in_order and leaves is not None and not os.path.lexists(self.part):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.part.write_bytes(b'{"v": 1, "sha256": "0123456789"'[:leaves])
            self.is_owed = True

    def settle(self, process):
        """Wait until the disk has a latch that there is, or its keeper says why not."""
        if process.disk_hangs or process.rules.latch is None:
            return
        keeper = process.keeper
        soon(lambda: keeper.problem or os.path.lexists(self.file), "the latch on the disk")
        if keeper.problem:
            assert str(self.file) in keeper.problem
        else:
            self.is_owed = True

    # -- what goes on

    @precondition(lambda self: self.processes)
    @rule(
        draw=st.data(),
        what=st.sampled_from(("free", "blocked", "blind", "pressed", "released", "copy", "moved", "beat")),
        wild=st.floats(-60.0, 60.0),
    )
    def hear(self, draw, what, wild):
        name = draw.draw(st.sampled_from(sorted(self.processes)))
        process = self.processes[name]
        rules, now_ns = process.rules, self.now_ns
        if what in {"free", "blocked", "blind"}:
            message = {"free": FREE, "blocked": BLOCKED, "blind": BLIND}[what]
            for _ in range(2):
                rules.saw(SCAN, message, now_ns)
            if rules.active:
                process.good_ns["scan"] = now_ns if what == "free" else None
        elif what in {"pressed", "released"}:
            process.heard = what == "pressed"
            rules.saw(BUTTON, bool_bytes(process.heard), now_ns)
            if process.heard and rules.active:
                assert rules.latch is not None
        elif what == "copy" and process.heard is not None:
            rules.saw(BUTTON, bool_bytes(process.heard), now_ns, again=True)
        elif what == "moved":
            rules.moved(odometry_bytes(wild, stamp_ns=round(wild * NS_PER_S) + 60 * NS_PER_S), now_ns)
            process.good_ns["odom"] = now_ns
        elif what == "beat":
            rules.beat(now_ns)
        self.look(name)

    def all_well(self, process):
        process.heard = False
        for _ in range(2):
            process.rules.saw(SCAN, FREE, self.now_ns)
        process.rules.saw(BUTTON, bool_bytes(False), self.now_ns)
        process.rules.moved(odometry_bytes(0.0), self.now_ns)
        process.rules.beat(self.now_ns)
        process.good_ns = {"scan": self.now_ns, "odom": self.now_ns}

    @rule(seconds=st.floats(0.0, 5.0))
    def wait(self, seconds):
        self.now_ns += round(seconds * NS_PER_S)
        for name in self.processes:
            self.look(name)

    def look(self, name):
        """As the lane's thread does: silences, then the path, then the disk."""
        process = self.processes[name]
        rules, before = process.rules, self.latches.get(name)
        rules.look_for_silence(self.now_ns)
        assert before is None or rules.latch is before
        if rules.latch is not None:
            self.latches[name] = rules.latch
        if rules.latch is not None and rules.active:
            assert rules.stop_path(self.now_ns, self.now_ns)
        mark = mark_of(self.file)
        process.tell()
        if rules.latch is not before and not process.disk_hangs:  # its own takes the place of another's
            soon(lambda: process.keeper.problem or mark_of(self.file) != mark, "its latch on the disk")
        self.settle(process)

    @precondition(lambda self: self.processes)
    @rule(draw=st.data(), activates=st.booleans())
    def change_state(self, draw, activates):
        name = draw.draw(st.sampled_from(sorted(self.processes)))
        process = self.processes[name]
        if activates:
            process.rules.activate(self.now_ns)
            process.good_ns = {}
        else:
            process.rules.deactivate()
        self.look(name)

    @precondition(lambda self: self.processes)
    @rule(draw=st.data(), well_before=st.booleans())
    def clear(self, draw, well_before):
        name = draw.draw(st.sampled_from(sorted(self.processes)))
        process = self.processes[name]
        if well_before:
            self.all_well(process)
        latch, clears, before = process.rules.latch, process.rules.clears, mark_of(self.file)
        why = process.rules.clear(self.now_ns)
        assert (process.rules.latch is latch) == (latch is None or why != "")
        if latch is None or why:
            assert process.rules.clears == clears
            return
        assert process.rules.clears == clears + 1
        assert process.heard is False
        if process.rules.active:
            for topic in ("scan", "odom"):
                assert self.now_ns - (process.good_ns.get(topic) or 0) < TIMEOUT_NS
        del self.latches[name]
        self.look(name)
        if process.disk_hangs:
            return  # so that the next start is latched, which is safe
        self.is_owed = False  # where it cannot be removed, the next start is latched, which is safe
        gone = lambda: before is None or mark_of(self.file) != before  # noqa: E731
        soon(lambda: process.keeper.problem or gone(), "the file to be gone")
        for other in self.latches:  # who has the same file, and is latched, writes it again
            self.settle(self.processes[other])

    # -- the disk

    @rule(
        kind=st.sampled_from(("cut off", "flipped", "emptied", "folder", "no target", "by hand")),
        at=st.integers(0, 400),
    )
    def damage(self, kind, at):
        """Something happens to the file; none of it unlatches."""
        if not os.path.lexists(self.file) or self.file.is_dir() or self.file.is_symlink():
            return
        data = bytearray(self.file.read_bytes())
        if kind == "cut off":
            self.file.write_bytes(data[:at])
        elif kind == "flipped" and data:
            data[at % len(data)] ^= 1 << (at % 8)
            self.file.write_bytes(data)
        elif kind == "emptied":
            self.file.write_bytes(b"")
        elif kind == "folder":
            self.file.unlink()
            self.file.mkdir()
        elif kind == "no target":
            self.file.unlink()
            self.file.symlink_to(self.folder / "gone")
        elif kind == "by hand":
            self.file.unlink()
            self.is_owed = os.path.lexists(self.part)
            for name in self.latches:  # one that is latched does not leave it at that
                self.settle(self.processes[name])

    @precondition(lambda self: len(self.processes) <= 1)  # two write at once, so that a part comes and goes
    @rule(full=st.booleans())
    def fill(self, full):
        """No file can be written, or it can again; one that is there can be removed all the same."""
        if full == self.is_full:
            return
        self.is_full = full
        if full:
            self.part.unlink(missing_ok=True)
            (self.part / "in the way").mkdir(parents=True)
        else:
            shutil.rmtree(self.part, ignore_errors=True)

    # -- what holds

    @invariant()
    def holds(self):
        for name, process in getattr(self, "processes", {}).items():
            latch = process.rules.latch
            assert latch is self.latches.get(name)
            status = process.rules.status(self.now_ns)
            assert status.values["state"] == (
                "latched" if latch else "watching" if process.rules.active else "inactive"
            )
            assert status.values["reason"] == (latch.reason if latch else "")


TestLatched = Latched.TestCase
TestLatched.settings = settings(max_examples=SEQUENCES, stateful_step_count=30, deadline=None)
