"""The command `torchperf drive`."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from torchperf_ros.tools.shell import console, fail, need


def drive(  # noqa: PLR0913, PLR0917 - the options of the command
    scenario: Annotated[str, Option(help="Which situation; --list shows them.")] = "cut_in",
    seed: Annotated[
        int, Option(min=0, max=1_000_000, help="Draws its parameters, the latencies and the faults.")
    ] = 1,
    arm: Annotated[str, Option(help="Who drives; --list shows them.")] = "full",
    load: Annotated[int, Option(help="Work on the machine: 1, or 4 times as much.")] = 1,
    faults: Annotated[
        str, Option(help="What goes wrong; --list shows them. Or so many a minute: hang=0.5,sigkill=2")
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
    camera: Annotated[
        bool, Option("--camera", help="With -o: write what a camera sees, too, on /image.")
    ] = False,
    lidar: Annotated[
        bool, Option("--lidar", help="With -o: write what a lidar sees, too, on /cloud.")
    ] = False,
    no_tui: Annotated[bool, Option("--no-tui", help="No live view; as fast as it goes.")] = False,
    show_list: Annotated[
        bool, Option("--list", help="Scenarios, arms and faults, with their sources.")
    ] = False,
) -> None:
    """Drive a scenario in a closed loop: sensors, the stages, a vehicle that follows their plans.

    Time is virtual, and models take what is drawn for them: the same seed gives
    the same drive on any machine. Nothing of ROS has to be installed.

    Latencies, faults and restarts can be yours. A table of latencies, in ms, is
    YAML with a tier of each stage at least: `perception: {full: {inference_ms:
    {median: 40, p99: 70}}}` and `planning: {full: {inference_ms: 5}}`.

    With -o the folder gets drive.mcap and drive.yaml (`torchperf replay
    drive.mcap --params drive.yaml`), drive.html, drive.json, and a
    test that drives it again and replays it (`pytest FOLDER`).

    Examples:
        torchperf drive --scenario cut_in --seed 7
        torchperf drive --scenario pedestrian --arm naive --faults bench --load 4
        torchperf drive --scenario ccrb --seed 3 --no-tui -o drives/ccrb-3
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
    elif camera or lidar:
        fail(
            f"{'--camera' if camera else '--lidar'}: what it sees goes into the log; name a folder with -o"
        )
    with console(stderr=True).status("loading"):
        from torchperf_ros.world.drive_command import list_choices, run_drive
        from torchperf_ros.world.loop import FAULTLESS, Drive
        from torchperf_ros.world.scenarios import draw_scenario
    shown = console()
    if show_list:
        list_choices(shown)
        return
    if restart_ms is not None and arm in FAULTLESS:
        fail(f"--restart-ms: has no effect on the arm {arm}, in which nothing dies")
    tui = shown.is_terminal and not no_tui
    one = Drive(
        draw_scenario(scenario, seed),
        arm,
        load,
        faults,
        camera=camera,
        lidar=lidar,
        times=times,
        restart_ms=restart_ms,
    )
    raise typer.Exit(run_drive(shown, one, output, tui=tui))
