"""The example workflow and the commands of docs/regression.md are ones that there are."""

import re
import shlex
from pathlib import Path

import pytest
import typer
import yaml

from torchperf_ros.cli import main as cli

ROOT = Path(__file__).parents[1]
WORKFLOW = ROOT / "docs" / "examples" / "replay-gate.yaml"
GUIDE = ROOT / "docs" / "regression.md"


def commands(text):
    """Every command line of ours, without what a shell does with it."""
    found = re.findall(r"^(?: {4}|\s*run: )(?:.*&& )?(torchperf .*)$", text, flags=re.MULTILINE)
    return [re.split(r"\s{2,}|\s>>", re.sub(r"[\[\]]", "", line))[0] for line in found]


def unknown_options(line):
    """Options of a command line that the command does not have; its name, if there is no such command."""
    command, words = typer.main.get_command(cli.app), shlex.split(line)[1:]
    while hasattr(command, "commands"):
        name = words.pop(0)
        if name not in command.commands:
            return [name]
        command = command.commands[name]
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    return [word for word in words if word.startswith("-") and word not in known]


@pytest.mark.parametrize("path", [WORKFLOW, GUIDE], ids=lambda path: path.name)
def test_given_documented_commands_when_looked_up_then_each_and_its_options_are_there(path):
    found = commands(path.read_text(encoding="utf-8"))

    assert len(found) >= 3
    assert {line: unknown_options(line) for line in found if unknown_options(line)} == {}


def test_given_a_command_that_is_not_there_when_looked_up_then_it_is_told():
    assert unknown_options("torchperf compare a b --nonsense") == ["--nonsense"]
    assert unknown_options("torchperf burn") == ["burn"]


def test_given_the_workflow_when_parsed_then_its_steps_run_something_and_files_are_made_before_they_are_used():
    workflow = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))
    steps = workflow["jobs"]["gate"]["steps"]
    text = [step.get("run", "") for step in steps]

    assert all(("run" in step) != ("uses" in step) for step in steps)
    written = next(number for number, line in enumerate(text) if "--parquet run.parquet" in line)
    used = [number for number, line in enumerate(text) if "run.parquet" in line and number != written]
    assert used
    assert min(used) > written
    assert {"push", "pull_request"} <= set(workflow[True])  # YAML 1.1 reads `on` so
