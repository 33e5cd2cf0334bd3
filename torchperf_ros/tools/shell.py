"""The command shell.

How every command fails, where it prints, and the options that mean one thing everywhere.
"""

import importlib.util
import json
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from torchperf_ros.api.errors import ConfigError, TorchperfError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

# The exit status for input that cannot be used.
BAD_INPUT: Final = 2
_ANALYSIS: Final = "`pip install 'torchperf_ros[analysis]'`"
_EXTRAS: Final = {
    **dict.fromkeys(("dask", "distributed", "pyarrow"), "`pip install 'torchperf_ros[logs]'`"),
    **dict.fromkeys(("cryptography", "mmh3", "openfeature"), "`pip install 'torchperf_ros[rollout]'`"),
}
_ROS: Final = "source a ROS 2 installation, or `pip install torchperf_ros[ros]`"
_LINE_EVERY_S: Final = 10.0
_BAR_EVERY_S: Final = 0.25
_NODE: Final = re.compile(r"(/[A-Za-z_][A-Za-z0-9_]*)+")


def _flowing(text: str | None, *, wide: bool) -> str | None:
    """A help text whose paragraphs fill the terminal.

    Those with indented lines, the examples, stay as they are.

    A narrow terminal gets click's own layout, which wants a mark (a backspace) before what is to stay.
    """
    paragraphs = text.split("\n\n") if text else []
    kept = "" if wide else "\b\n"
    flowing = (kept + one if "\n " in one else " ".join(one.split("\n")) for one in paragraphs)
    return "\n\n".join(flowing) or text


_STORE: Final = "a baseline is a run's file: keep a copy of it, and name it as BASE"
_VIEW: Final = "there is a live view in a terminal only; `| cat` leaves it out"
# By command: options of earlier versions. Those that another name replaces (`--...`) are taken under it, what is
# always so ("") is left out, and else the text says what to write.
_GONE: Final[dict[str, dict[str, str]]] = {
    "compare": {
        **dict.fromkeys(("--markdown", "--html", "--json"), "--output"),
        "--baseline": "a baseline is a run's file: `torchperf compare BASE NEW`",
        **dict.fromkeys(("--save", "--commit", "--replace", "--list", "--dir"), _STORE),
        "--min-effect": "`--margin PERCENT` sets the change of p50 and p99 that matters",
        "--limit": "`--max-miss PERCENT` limits the misses; other figures are in -o FILE.json",
        "--skip": "p50, p99, misses, lower tiers and outputs are judged; other figures are in -o FILE.json",
        "--confidence": "all verdicts together have a chance of 5 % of a false alarm",
        "--resamples": "it is fixed at 1,000",
        "--seed": "it is fixed: the same runs have the same verdict",
    },
    "demo": {"--no-tui": _VIEW, "--json": "--output", "--svg": "--output"},
    "compile": {"--json": "--output"},
    "tune": {"--json": "--output"},
    "replay": {"--json": "--output", "--parquet": "--output", "--scheduler": "--parallel"},
    "play": {"--wait-for-node": "--wait-for", "--wait-for-subscribers": "--wait-for"},
    "status": {"--html": "--output", "--json": "--output"},
    "drive": {
        "--no-tui": _VIEW,
        "--list": "write `--scenario list`",
        "--camera": "write `--sensors camera`",
        "--lidar": "write `--sensors lidar`",
    },
    "train": {
        "--again": "remove the folder of -o, or name another",
        **dict.fromkeys(("--bf16", "--no-bf16"), "bf16 is used where the device has instructions for it"),
    },
    **dict.fromkeys(("hold", "rollback"), {"--write": ""}),
    "check": {"--vehicle": "write `--fact vehicle=ID`"},
    "simulate": {"--by": "write `--candidate worse=PERCENT`"},
}


# What is left of a command that was stopped.
_STANDS: Final = {
    "compile": "; what was built stays, and the same command builds the rest",
    "make-log": "; nothing was written",
    "tune": "; what was measured stays",
    "train": "; the same command goes on from the last checkpoint",
    **dict.fromkeys(("check", "inspect"), "; nothing is kept"),
}


def _stop(number: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt(number)


class Command(TyperCommand):
    """A command: an error of this package or of a file is one line and the status 2."""

    def __init__(self, *args: Any, **options: Any) -> None:  # noqa: ANN401 - typer's own
        super().__init__(*args, **options)
        self.help = _flowing(self.help, wide=self.rich_markup_mode is not None)

    # typer's own copies of click's types
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401
        gone, taken = _GONE.get(self.name or "", {}), list[str]()
        for word in args:
            name, sign, value = word.partition("=")
            today = gone.get(name)
            if today is not None and " " in today:
                fail(f"{name}: there is no such option any more; {today}")
            if today is None:
                taken.append(word)
            elif today:
                taken.append(f"{today}{sign}{value}")
        return super().parse_args(ctx, taken)

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401 - typer's own copies of click's types
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # `| head` has seen enough; typer ends quietly
            raise
        except (TorchperfError, OSError) as error:
            fail(str(error))


class CommandGroup(TyperGroup):
    """Says in whole sentences what its commands are for, in a narrow terminal, too.

    A command that is stopped says so in one line, once its processes have ended; the status is 128 + signal.
    """

    def __init__(self, *args: Any, **options: Any) -> None:  # noqa: ANN401 - typer's own
        super().__init__(*args, **options)
        self.help = _flowing(self.help, wide=self.rich_markup_mode is not None)

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401 - typer's own copies of click's types
        signal.signal(signal.SIGTERM, _stop)
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stopped:
            by = signal.Signals(*(stopped.args or (signal.SIGINT,)))
            fail(f"stopped by {by.name}{_STANDS.get(ctx.invoked_subcommand or '', '')}", 128 + by)

    # typer's own copies of click's types
    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401
        """Write them under the titles that they have in a wide one."""
        whole, titles = 1000, dict[str, list[tuple[str, str]]]()
        for name, command in self.commands.items():
            title = getattr(command, "rich_help_panel", None)
            shown = titles.setdefault(title if isinstance(title, str) else "Commands", [])
            shown.append((name, command.get_short_help_str(whole)))
        for title, rows in titles.items():
            with formatter.section(title):
                formatter.write_dl(rows)


def fail(text: str, status: int = BAD_INPUT) -> NoReturn:
    sys.stderr.write(f"torchperf: {text}\n")
    raise typer.Exit(status)


def need(*libraries: str) -> None:
    """Say what to install, and stop, where a library is not there."""
    missing = [name for name in libraries if importlib.util.find_spec(name) is None]
    if missing:
        how = (
            _ROS
            if "rclpy" in missing
            else next((_EXTRAS[one] for one in missing if one in _EXTRAS), _ANALYSIS)
        )
        fail(f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed: {how}")


def console(width: int = 100, *, stderr: bool = False) -> "Console":
    """The terminal; elsewhere lines of this width."""
    from rich.console import Console

    # the stream itself: what a model prints is put aside meanwhile
    file = sys.stderr if stderr else sys.stdout
    found = Console(file=file)
    return found if found.is_terminal else Console(file=file, width=width)


def say(shown: "Console", text: str, style: str = "") -> None:
    """Print a text as it is: no markup, no emoji, no highlights, no line breaks of our own."""
    shown.print(text, style=style or None, highlight=False, markup=False, emoji=False, soft_wrap=True)


def progress_bars() -> "Progress":
    """Bars on stderr that go when they are done; what `follow` says where there is no terminal."""
    from rich import progress

    shown = console(stderr=True)
    columns = (
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        progress.TaskProgressColumn(),
        progress.TextColumn("{task.fields[at]}"),
        progress.TimeElapsedColumn(),
        progress.TextColumn("left"),
        progress.TimeRemainingColumn(),
    )
    off = not shown.is_terminal
    return progress.Progress(*columns, console=shown, transient=True, refresh_per_second=2, disable=off)


def follow(bars: "Progress", name: str, per_s: float = 0.0) -> Callable[[int, int], None]:
    """One bar, or a line every 10 s where there is no terminal.

    What it gives takes what is done and the whole.

    `per_s`: of what is counted, so many are a second of a log; 0: it is not time.
    """
    number, next_s = bars.add_task(name, start=False, total=None, at=""), 0.0
    (task,) = (one for one in bars.tasks if one.id == number)

    def tell(done: int, total: int) -> None:
        nonlocal next_s
        # What it waits for before, such as workers, says nothing about its speed, and neither does a round
        # of the log before this one.
        if not task.started or done < task.completed:
            bars.reset(number)
        if monotonic() < next_s:
            return
        next_s = monotonic() + (_LINE_EVERY_S if bars.disable else _BAR_EVERY_S)
        at = f"{done / per_s:.1f}" + (f" of {total / per_s:.1f}" if total else "") + " s" if per_s else ""
        if bars.disable:
            left_s = (task.elapsed or 0.0) * (total / done - 1) if done else 0.0
            left = f", {left_s:,.0f} s left" if left_s >= 1.0 else ""
            say(bars.console, f"{name}: at {at or f'{done / max(total, 1):.0%}'}{left}")
        bars.update(number, completed=done, total=total or None, at=at)

    return tell


def check_outputs(
    outputs: Mapping[str, Path | None], inputs: Iterable[Path] = (), kept: tuple[str, ...] = ()
) -> None:
    """See that every output, by its flag, can be written, and replaces no input, before anything is read.

    Files of an input folder whose names end in one of `kept` are what it is made of; others in it may be
    replaced.

    Raises:
        ConfigError: an output is an input, another output, or lies in no folder.
    """

    def same(path: Path, other: Path) -> bool:  # through any links
        return path.resolve() == other.resolve() or (
            path.exists() and other.exists() and path.samefile(other)
        )

    def replaces(path: Path, source: Path) -> bool:
        inside = source.is_dir() and path.is_file() and path.resolve().is_relative_to(source.resolve())
        return same(path, source) or (inside and path.resolve().name.endswith(kept))

    seen: dict[str, Path] = {}
    for flag, path in outputs.items():
        if path is None:
            continue
        if path.is_dir() or not path.absolute().parent.is_dir():
            raise ConfigError(f"{flag} {path}: needs a file name in an existing folder")
        try:  # root may write by the permissions, and not on a disk that is read-only
            if not path.exists():
                tempfile.TemporaryFile(dir=path.absolute().parent).close()
        except OSError as error:
            raise ConfigError(f"{flag} {path}: cannot be written there: {error.strerror}") from error
        if hit := next((one for one in inputs if replaces(path, one)), None):
            raise ConfigError(f"{flag} {path}: would replace the input {hit}; name another file")
        if other := next((name for name, one in seen.items() if same(path, one)), ""):
            raise ConfigError(f"{flag} {path}: is the file of {other}, too; name another file")
        seen[flag] = path


def write_output(path: Path, text: str) -> None:
    """Write all of an output or nothing: who reads it meanwhile, or after a full disk, has the one before.

    Raises:
        ConfigError: it cannot be written.
    """
    from torchperf_ros.observe.runs.run_log import whole_file

    try:
        with whole_file(path) as part:
            part.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error


def files_by_suffix(
    files: Iterable[Path] | None, *suffixes: str, inputs: Iterable[Path] = (), kept: tuple[str, ...] = ()
) -> dict[str, Path]:
    """The output files by their suffixes, of which each says what is to be written, and is there once.

    A suffix "" stands for all other names. See `check_outputs` for the others.

    Raises:
        ConfigError: a file has none of the suffixes, two have one, or one cannot be written.
    """
    found: dict[str, Path] = {}
    for file in files or ():
        kind = file.suffix if file.suffix in suffixes else ""
        if kind not in suffixes:
            raise ConfigError(
                f"-o {file}: has to end in {' or '.join(suffixes)}, which says what is written"
            )
        if kind in found:
            raise ConfigError(
                f"-o {file}: {found[kind]} is of the same kind already; leave one of the two out"
            )
        found[kind] = file
    check_outputs({f"-o FILE{kind}": file for kind, file in found.items() if kind}, inputs, kept)
    return found


def json_object(text: str) -> dict[str, Any]:
    """An adapter's `--options`.

    Raises:
        ConfigError: they are no JSON object.
    """
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ConfigError(f"--options {text!r} is not a JSON object like '{{\"classes\": 4}}'")
    return found


def pairs(flag: str, texts: Iterable[str], sign: str, form: str, *, turned: bool = False) -> dict[str, str]:
    """What stands before and behind the sign in each text of an option that is given several times.

    `turned`: what stands before it, by what stands behind it.

    Raises:
        ConfigError: one does not have this form, or stands in two.
    """
    found: dict[str, str] = {}
    for text in texts:
        name, given, value = text.partition(sign)
        if not (given and name and (value or sign == "=")):  # a parameter may be an empty text
            raise ConfigError(f"{flag} {text!r}: has to be {form}")
        if turned:
            name, value = value, name
        if name in found:
            raise ConfigError(f"{flag} {text!r}: {name} is {found[name]} already")
        found[name] = value
    return found


def words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def every_word(texts: "Texts") -> list[str]:
    """What stands between commas in an option that may also be given again and again, each word once."""
    return list(dict.fromkeys(word for text in texts or () for word in words(text)))


def node_name(text: str | None) -> str | None:
    name = text if text is None or text.startswith("/") else f"/{text}"
    if name is not None and not _NODE.fullmatch(name):
        raise typer.BadParameter(
            f"{text!r}: a node's name with its namespace is letters, digits, _ and /, for example"
            " /robot1/perf"
        )
    return name


def node_option(flag: str, text: str) -> Any:  # noqa: ANN401 - typer's own type
    """An option that takes a node's name with its namespace; `perf` is `/perf`."""
    return typer.Option(flag, metavar="NAME", callback=node_name, help=text)


Text = str | None
Texts = list[str] | None
File = Path | None
# What options take that need not be given; the last of each two may be given again and again.
Files = list[Path] | None
NodeName = Annotated[str, node_option("--node", "The node, with its namespace, for example /robot1/perf.")]
AdapterOptions = Annotated[str, typer.Option("--options", help="JSON object, handed to the adapter.")]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write every figure to this file.")
]
SvgFile = Annotated[
    Path | None, typer.Option("--svg", metavar="FILE", help="Write the last picture to this file.")
]


def outputs_option(text: str) -> Any:  # noqa: ANN401 - typer's own type
    """Files to write, whose suffixes say what."""
    return typer.Option("-o", "--output", metavar="FILE", help=text)


Force = Annotated[bool, typer.Option("--force", help="Replace or build what is there already.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")]
