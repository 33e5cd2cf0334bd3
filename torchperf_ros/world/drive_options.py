"""The command `torchperf drive`."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from torchperf_ros.tools.shell import console, every_word, fail, need

_SENSORS = ("camera", "lidar")


def drive(  # noqa: PLR0913, PLR0917 - the options of the command
    scenario: Annotated[str, Option(help="Which situation; list: show all choices.")] = "cut_in",
    seed: Annotated[
        int, Option(help="Draws its parameters, the latencies and the faults; 0 to 440,000.")
    ] = 1,
    arm: Annotated[str, Option(help="Who drives, see --scenario list.")] = "full",
    load: Annotated[int, Option(help="Work on the machine: 1, or 4 times as much.")] = 1,
    faults: Annotated[
        str, Option(help="What goes wrong, see --scenario list. Or so many a minute: hang=0.5,sigkill=2")
    ] = "none",
    times: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="What the models take, one file: records or a log of yours, or a table, see above.",
        ),
    ] = None,
    restart_ms: Annotated[
        float | None,
        Option(
            min=0.0,
            help="From a death until there is a worker, or a naive node, again. Default: as measured, or in --times.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        Option(
            "--output",
            "-o",
            metavar="FOLDER",
            help="Write log, parameters, page, figures and a test.",
        ),
    ] = None,
    sensors: Annotated[
        str,
        Option(
            metavar="camera,lidar",
            help="With -o: write what these see, too, on /image and /cloud.",
        ),
    ] = "",
) -> None:
    """Drive a scenario in a closed loop: sensors, the stages, a vehicle that follows their plans.

    Time is virtual, and models take what is drawn for them: the same seed gives
    the same drive on any machine. Nothing of ROS has to be installed. A terminal
    shows it in real time; elsewhere it is as fast as it goes.

    Latencies, faults and restarts can be yours. A table of latencies, in ms, is
    YAML with a tier of each stage at least: `perception: {full: {inference_ms:
    {median: 40, p99: 70}}}` and `planning: {full: {inference_ms: 5}}`.

    With -o the folder gets drive.mcap and drive.yaml (`torchperf replay
    drive.mcap --params drive.yaml`), drive.html, drive.json, and a
    test that drives it again and replays it (`pytest FOLDER`).

    Examples:
        torchperf drive --scenario cut_in --seed 7
        torchperf drive --scenario pedestrian --arm naive --faults bench --load 4
        torchperf drive --scenario ccrb --seed 3 -o drives/ccrb-3
        torchperf drive --scenario overtake --faults hasty
        torchperf drive --times records.jsonl --faults sigkill=2 --restart-ms 900
        torchperf drive --arm naive --times mine.yaml --faults hang=0.5,sigkill=2 --restart-ms 5000

    Exit status: 0 if nothing was hit, 1 if the vehicle is to blame for a collision, 2 for input that cannot
    be used.
    """
    if output is not None:
        need("jinja2", "plotly")
        if output.exists() and not output.is_dir():
            fail(f"--output {output}: is a file; name a folder")
    elif sensors:
        fail(f"--sensors {sensors}: what they see goes into the log; name a folder with -o")
    seeing = every_word([sensors])
    if unknown := [name for name in seeing if name not in _SENSORS]:
        fail(f"--sensors {unknown[0]!r} is not allowed; it has to be one of {', '.join(_SENSORS)}, or both")
    with console(stderr=True).status("loading"):
        from torchperf_ros.world.drive_command import list_choices, run_drive
        from torchperf_ros.world.loop import FAULTLESS, Drive
        from torchperf_ros.world.scenarios import draw_scenario
    shown = console()
    if scenario == "list":
        list_choices(shown)
        return
    if restart_ms is not None and arm in FAULTLESS:
        fail(f"--restart-ms: has no effect on the arm {arm}, in which nothing dies")
    one = Drive(
        draw_scenario(scenario, seed),
        arm,
        load,
        faults,
        camera="camera" in seeing,
        lidar="lidar" in seeing,
        times=times,
        restart_ms=restart_ms,
    )
    raise typer.Exit(run_drive(shown, one, output, tui=shown.is_terminal))
