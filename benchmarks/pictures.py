"""The pictures of README and docs, made anew.

Drives of this version with faults and under load, a report, a cut-in.

The pictures of figures come from their benchmarks: `./run bench curve -o`; the one of a stutter is of the
drive that the page describes.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from benchmarks.rig.arguments import callers_path
from benchmarks.rig.report import say
from torchperf_ros.world.drive_command import HIT, OURS, WALL, outlines, title_of
from torchperf_ros.world.loop import Drive, Driven, drive
from torchperf_ros.world.scenarios import draw_scenario

ROOT = Path(__file__).resolve().parents[1]
_WIDTH, _HEIGHT = 1180, 1880  # of a screenshot, px
_DRIVE_S, _LOAD_AFTER_S, _LOAD_S = 40, 25, 8
_BUSY = 8  # processes, of higher priority than the models where this user may have such
_CUT_IN_SEED = 2  # one in which the naive node is dead when it matters
_FIRST_IMAGE_S = 100.0  # the start takes a tenth of that
_EPILOG = """\
example:
  ./run bench pictures                  # into docs/pictures, in two minutes; look at them before they are committed"""

_SHOWN = 6  # moments of a drive


def torchperf(*words: object) -> list[str]:
    """A command line of this checkout's torchperf."""
    return [sys.executable, "-m", "torchperf_ros.tools", *map(str, words)]


def screenshot(page: Path, picture: Path) -> None:
    """What a browser shows of a page's beginning, without scroll bars."""
    quiet = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--virtual-time-budget=10000",
    ]
    size, user = f"--window-size={_WIDTH},{_HEIGHT}", f"--user-data-dir={page.parent / 'user'}"
    command = ["chromium", *quiet, size, user, f"--screenshot={picture}", page.as_uri()]
    subprocess.run(command, check=True, capture_output=True)


def sabotaged(folder: Path, pictures: Path) -> None:
    """A drive with faults, its picture, and the page of its records."""
    say("a sabotaged drive")
    svg = pictures / "sabotaged_drive.svg"
    subprocess.run(torchperf("demo", "--sabotage", "--svg", svg), check=False, stdout=subprocess.DEVNULL)
    records = next(folder.rglob("records.jsonl"))
    page = folder / "drive.html"
    subprocess.run(torchperf("report", records, "-o", page), check=True, stdout=subprocess.DEVNULL)
    screenshot(page, pictures / "report.png")


def loaded(folder: Path, pictures: Path) -> None:
    """A drive while other programs take the machine, seen by `top`."""
    say(f"a drive of {_DRIVE_S} s, under load after {_LOAD_AFTER_S} s")
    demo = subprocess.Popen(torchperf("demo", "--seconds", _DRIVE_S), stdout=subprocess.PIPE, text=True)
    assert demo.stdout is not None
    give_up_s = time.monotonic() + _FIRST_IMAGE_S
    while "% on time" not in (line := demo.stdout.readline()) or "- on time" in line:
        if not line or time.monotonic() > give_up_s:
            raise SystemExit("the drive did not begin")
    top = torchperf("top", "--seconds", _LOAD_AFTER_S + _LOAD_S - 2, "--svg", pictures / "top.svg")
    looking = subprocess.Popen(top, stdout=subprocess.DEVNULL)
    with ExitStack() as stack:
        time.sleep(_LOAD_AFTER_S)
        program = folder / "logrotate"
        program.symlink_to(shutil.which("bash") or "/bin/bash")
        for _ in range(_BUSY):
            busy = subprocess.Popen([program, "-c", "while :; do :; done"])
            stack.callback(busy.wait)
            stack.callback(busy.kill)
            os.setpriority(os.PRIO_PROCESS, busy.pid, -15 if os.geteuid() == 0 else 0)
        time.sleep(_LOAD_S)
    looking.wait()
    demo.communicate()


def write_picture(drives: Sequence[tuple[Drive, Driven]], path: Path) -> None:
    """Drives from above, each in a row, and their speed and time to collision.

    PNG or SVG by the file's suffix.

    The road is drawn wider than it is: across, a metre is longer than along.
    """
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    heights = [1.0] * len(drives) + [1.2, 1.2]
    figure, (*roads, speed, ttc) = plt.subplots(
        len(heights), 1, figsize=(11, 1.7 * len(heights)), height_ratios=heights, layout="constrained"
    )
    farthest_m = max(driven.world.progress_m for _, driven in drives) + 40.0
    for (one, driven), road in zip(drives, roads, strict=True):
        trace, colour = driven.world.trace, HIT if driven.score.collision else OURS
        for edge in one.scenario.road:
            points = one.scenario.lane.at(np.arange(-20.0, farthest_m, 2.0), edge)
            road.plot(points[:, 0], points[:, 1], color=WALL, linewidth=1)
        for number, index in enumerate(np.linspace(0, len(trace) - 1, _SHOWN)):
            for shade, outline in outlines(driven, trace[round(index)]):
                strength = 0.25 + 0.75 * number / (_SHOWN - 1)
                road.fill(outline[:, 0], outline[:, 1], color=shade, alpha=strength, linewidth=0)
            x, y, *_ = trace[round(index)].vehicle
            at = f"{trace[round(index)].at_s:.0f} s"
            road.annotate(
                at,
                (x, y),
                (0, -15),
                textcoords="offset points",
                ha="center",
                fontsize="x-small",
                color=colour,
            )
        own = [moment.vehicle[1] for moment in trace]
        road.set(
            ylim=(min(own) - 8, max(own) + 8),
            xlim=(-20.0, farthest_m),
            title=title_of(one, driven),
            yticks=[],
        )
        at_s = [moment.at_s for moment in trace]
        speed.plot(at_s, [3.6 * moment.vehicle[3] for moment in trace], color=colour, label=one.arm)
        ttc.plot(at_s, [min(moment.ttc_s, 3.0) for moment in trace], color=colour)
    roads[-1].set_xlabel("m; with a time: this vehicle; blue: the others at these times")
    fastest = max(moment.vehicle[3] for _, driven in drives for moment in driven.world.trace)
    speed.set(ylabel="km/h", ylim=(0, max(1.0, 1.1 * 3.6 * fastest)))
    speed.legend(loc="lower right")
    ttc.set(ylabel="TTC, s", xlabel="s", ylim=(0, 3.1))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def cut_in(pictures: Path) -> None:
    """A car cuts in, with faults: the naive node and these stages on the same seed."""
    say("a cut-in")
    drives = [Drive(draw_scenario("cut_in", _CUT_IN_SEED), arm, 1, "bench") for arm in ("naive", "full")]
    write_picture([(one, drive(one)) for one in drives], pictures / "cut_in.png")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder", type=callers_path, default=ROOT / "docs" / "pictures", help="where they go"
    )
    pictures = parser.parse_args().folder.resolve()
    if shutil.which("chromium") is None:
        sys.stderr.write("chromium is not installed: sudo apt-get install chromium\n")
        return 2
    with tempfile.TemporaryDirectory(prefix="torchperf-pictures-", ignore_cleanup_errors=True) as name:
        os.environ |= {"XDG_STATE_HOME": name, "ROS_DOMAIN_ID": str(20 + os.getpid() % 80)}
        sabotaged(Path(name), pictures)
        loaded(Path(name), pictures)
        cut_in(pictures)
    say(f"they are in {pictures}; look at them")
    return 0


if __name__ == "__main__":
    sys.exit(main())
