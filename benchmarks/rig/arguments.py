"""Command-line arguments that several benchmarks take, with one meaning."""

import argparse
import os
from collections.abc import Iterable
from pathlib import Path

from torchperf_ros.tools.shell import words


def callers_path(text: str) -> Path:
    """A path from where `./run bench` was called, which changes into the checkout.

    The type of every such argument.
    """
    return Path(os.environ.get("TORCHPERF_CALLED_FROM", "")) / text


def _to_be_written(text: str) -> Path:
    """A file that can be written: a benchmark that runs for hours must not find out at its end."""
    path = callers_path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a folder; name a file")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{path}: the folder {path.parent} is not there")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{path} cannot be written; name a file of yours")
    return path


def arguments_of(description: str, epilog: str = "") -> argparse.ArgumentParser:
    """A parser with what every benchmark takes."""
    parser = argparse.ArgumentParser(
        description=description, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--json", type=_to_be_written, metavar="FILE", help="write figures, parameters and machine to it"
    )
    return parser


def add_camera(parser: argparse.ArgumentParser, *, size: str = "1280x720", rate: float = 30.0) -> None:
    """`--size` and `--rate` of the images."""
    parser.add_argument("--size", default=size, help=f"of the images, rgb8 (default {size})")
    parser.add_argument("--rate", type=float, default=rate, help=f"images per second (default {rate:g})")


def add_stage(parser: argparse.ArgumentParser, *, model_ms: float = 10.0, budget_ms: float = 33.0) -> None:
    """`--model-ms` and `--budget-ms` of the stage."""
    parser.add_argument(
        "--model-ms",
        type=float,
        default=model_ms,
        help=f"inference time of the full tier (default {model_ms:g}; 0: the smallest)",
    )
    parser.add_argument(
        "--budget-ms", type=float, default=budget_ms, help=f"budget of each frame (default {budget_ms:g})"
    )


def add_device(parser: argparse.ArgumentParser) -> None:
    """`--device` that every model runs on."""
    parser.add_argument(
        "--device", default="cpu", choices=("cpu", "cuda"), help="of all models (default cpu)"
    )


def add_backup(parser: argparse.ArgumentParser) -> None:
    """`--backup` of the stage."""
    parser.add_argument(
        "--backup", default="standby", choices=("none", "standby", "active"), help="default standby"
    )


def add_some(
    parser: argparse.ArgumentParser, option: str, names: Iterable[str], chosen: Iterable[str] = ()
) -> None:
    """An option that takes some of these names, with commas between.

    `chosen` or, by default, all of them.
    """
    known, default = tuple(names), tuple(chosen) or tuple(names)

    def some(text: str) -> list[str]:
        found = list(dict.fromkeys(words(text)))
        if unknown := [name for name in found if name not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
        return found or list(default)

    about = f"some of {', '.join(known)}"
    about += f" (default {','.join(default)})" if default != known else " (default all)"
    parser.add_argument(option, type=some, default=list(default), metavar="NAMES", help=about)
