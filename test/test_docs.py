"""Every command that README and docs print is one: its name and its options exist, in the shell as they stand there."""

import re
import shlex
from pathlib import Path

import pytest
import typer.main

from torchperf_ros.cli.main import app

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RUN_COMMANDS = {"demo", "test", "node", "shell", "pack"}
SHELL = re.compile(r"^ {4}(?:\$ )?((?:\./run|torchperf) .*)$", re.MULTILINE)
INLINE = re.compile(r"`((?:\./run|torchperf) [^`]+)`")


def commands() -> list[str]:
    """What a reader could copy, `page: command`; code in a sentence begins with a backtick."""
    found = []
    for page in PAGES:
        text = re.sub(r"\\\n *", "", page.read_text(encoding="utf-8"))
        in_text = ["`" + " ".join(command.split()) for command in INLINE.findall(text)]
        found += [f"{page.name}: {command.strip()}" for command in SHELL.findall(text) + in_text]
    return sorted(set(found))


def words_of(command: str) -> list[str]:
    """As a shell splits the command: without its comment, and up to a pipe or another command."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars="|&;>")
    lexer.whitespace_split, lexer.commenters = True, "#"
    words = list(lexer)
    ends = (n for n, word in enumerate(words) if set(word) <= set("|&;>"))
    return words[: next(ends, len(words))]


def options_of(benchmark: Path) -> str:
    """The sources in which a benchmark declares its options."""
    return benchmark.read_text(encoding="utf-8") + "".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "benchmarks" / "rig").glob("*.py")
    )


@pytest.mark.parametrize("where", commands())
def test_given_a_printed_command_when_parsed_then_its_name_and_options_are_known(where, tmp_path, monkeypatch):
    program, name, *arguments = words_of(where.partition(": ")[2].lstrip("`"))
    if program == "./run" and name == "torchperf":
        program, (name, *arguments) = name, arguments
    if program == "./run" and name == "bench":
        source = options_of(ROOT / "benchmarks" / f"{arguments[0]}.py") if arguments else ""
        assert [word for word in arguments if word.startswith("--") and f'"{word}"' not in source] == []
    elif program == "./run":
        assert name in RUN_COMMANDS or name.startswith("-")
    elif not name.startswith("-"):
        command = typer.main.get_command(app).commands[name]
        assert not command.hidden, f"{name} is an old name"
        monkeypatch.chdir(tmp_path)
        for word in arguments:  # an option's file may have to be there: whether it is, is the reader's affair
            if Path(word).suffix and not Path(word).is_absolute():
                Path(word).parent.mkdir(parents=True, exist_ok=True)
                Path(word).touch()
        if "`" in where:  # a sentence may name half of a command
            known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
            assert name == "node" or {word for word in arguments if word.startswith("-")} <= known
        else:
            assert "   " not in where.partition("#")[0].strip()  # a comment without its sign
            command.make_context(name, arguments)
