"""`torchperf train`."""

from pathlib import Path
from typing import Annotated

from typer import Option

from torchperf_ros.api.import_paths import look_here_after_python
from torchperf_ros.tools import shell

_MOST_EXAMPLES = 100_000


def train(  # noqa: PLR0913, PLR0917 - options of a command line
    output: Annotated[Path, Option("--output", "-o", help="Folder for weights, cards and curves.")] = Path(
        "trained"
    ),
    models: Annotated[str, Option(help="Which reference models, with commas between; default: all.")] = "",
    tiers: Annotated[str, Option(help="Which tiers, with commas between; default: all.")] = "",
    steps: Annotated[float, Option(min=0.001, max=100.0, help="Of the usual number, as a factor.")] = 1.0,
    seed: Annotated[int, Option(min=0, help="Of the examples and of the first weights.")] = 1,
    start: Annotated[Path | None, Option("--from", help="Weights to start from (fine-tuning).")] = None,
    log: Annotated[Path | None, Option(help="Learn from this log, with --topic and --labels.")] = None,
    topic: Annotated[str, Option(help="The log's topic that is labelled.")] = "/image",
    labels: Annotated[Path | None, Option(help="Labels of the log's messages, JSON Lines.")] = None,
    adapter: Annotated[str, Option(help="Train your own adapter's model, module:Class.")] = "",
    teacher: Annotated[Path | None, Option(help="Learn from the best tier of these weights, too.")] = None,
    prune: Annotated[
        float, Option(min=0.0, max=0.9, help="Take this share of --from's channels away first.")
    ] = 0.0,
    judged: Annotated[
        int | None, Option(min=1, max=_MOST_EXAMPLES, help="Held-out examples that the scores are of.")
    ] = None,
    accumulate: Annotated[int, Option(min=1, help="Cut each batch in so many parts: less memory.")] = 1,
    loaders: Annotated[
        int, Option(min=0, max=64, help="Processes that make batches ready ahead, for each tier.")
    ] = 0,
    device: shell.Device = "auto",
    dry_run: Annotated[bool, Option("--dry-run", help="Say what would be done.")] = False,
) -> None:
    """Train the reference models from the closed loop's world, every tier of them.

    The detector learns from images of the drawn road, the planner from drives by
    the rules. Examples are drawn as they are needed, with their labels, from a
    seed: nothing is downloaded. Every tier is judged on examples of another seed. A
    run that was ended goes on where it was. Two idle cores with bf16
    instructions take half an hour.

    With --log, --topic and --labels it learns from your own log instead: a line
    of JSON for each labelled image, with its stamp and its boxes, see
    docs/training.md. The last fifth of them is only judged by.

    Example: torchperf train -o weights --models detector --tiers fast

    Exit status: 0 done, 1 it failed, 2 input that cannot be used, 130 after Ctrl-C.
    """
    shell.need("plotly", "jinja2")
    if (log is None) != (labels is None):
        shell.fail(f"--{'labels' if labels is None else 'log'} is missing: --log and --labels go together")
    if prune and start is None:
        shell.fail("--from is missing: --prune takes channels of trained weights away")
    with shell.console(stderr=True).status("importing torch"):
        from torchperf_ros.train.run import plans_of, train_all, write
        from torchperf_ros.train.tier_training import Techniques, TrainingFailed, read_checkpoint
    if adapter:
        look_here_after_python(add=True)
    data = None if log is None or labels is None else (log, topic, labels)
    named = shell.words(models or ("detector" if log and not adapter else ""))
    means = Techniques(
        start=start,
        teacher=teacher,
        prune=prune,
        accumulate=accumulate,
        loaders=loaders,
        data=data,
        adapter=adapter,
    )
    plans = plans_of(means, named, shell.words(tiers), steps, seed, device, judged, output)
    shown = shell.console()
    for plan in plans:
        begun = ""
        if plan.checkpoint.exists():
            if (found := read_checkpoint(plan)) is None:
                other = f"{plan.checkpoint} is of other options, weights or labels"
                shell.fail(f"{other}: remove it, or name another folder with -o")
            begun = f", goes on from step {found['step']:,}"
        precision = "bf16" if plan.bf16 else "fp32"
        shell.say(
            shown, f"{plan.model} {plan.tier}: {plan.steps:,} steps in {precision} on {plan.device}{begun}"
        )
    if dry_run:
        return
    try:
        with shell.progress_bars() as bars:
            follow = {plan: shell.follow(bars, f"{plan.model} {plan.tier}") for plan in plans}
            results = train_all(plans, lambda plan, step: follow[plan](step, plan.steps))
    except TrainingFailed as error:
        shell.fail(str(error), status=1)
    try:
        write(results)
    except OSError as error:
        shell.fail(
            f"{output} cannot be written: {error.strerror}; mend that, and the same command goes on",
            status=1,
        )
    for plan, result in results.items():
        score = ", ".join(f"{name} {value:.3f}" for name, value in result.score.items())
        shell.say(shown, f"{plan.model} {plan.tier}: {score}; {result.seconds:,.0f} s")
    shell.say(shown, f"written to {output}")
