"""The house does not grow unseen: how much there is of each thing, and why that may be.

A number here is a bound. Who raises one writes the reason behind it, in the same commit; who makes something smaller
lowers it. What counts is statements, which neither long lines nor short ones change.
"""

import ast
import collections
import dataclasses
import functools
import re
from pathlib import Path

import pytest
import typer

from torchperf_ros.settings.config import NODE_PARAMETERS, stage_parameters
from torchperf_ros.tools.main import app

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "torchperf_ros"
FILES = 239
"""Of the package: what one file uses stands in it, and what carries one thing is one file."""
MOST_FILES_IN_A_FOLDER = 25
# Streams of a stage, with batches, came into every room that carries a frame: a thread and a timer for several
# streams, an adapter for each in the worker, runs of several frames, and their parameters.
STATEMENTS = {
    # A value that its field cannot hold is named with its field; depths of compressed_depth_image_transport.
    "api": 892,
    # Lines of sensors, what to write instead of each parameter that is gone, and what a batch needs.
    # A part of a file that a process left is removed with the file.
    "settings": 1175,
    # The guard knows the road beside its own lane, and asks for a way back where a plan ends in the way of what comes.
    # Our lane follows a bend that no plan foresaw, and says whether a plan keeps it.
    # A planner that gives up leaves no vehicle beside its lane, and what comes shows the road of a bend.
    # The bend that is driven has the noise of the yaw rates that it comes from.
    # A latch is written again where its file is removed, and a node without its lane warns of it.
    # Tracks have an acceleration, and what comes aslant may drive straight on.
    # Boxes that are parts of an object, or several in one, are told apart; a row of cars shows how a bend leads on.
    # Only near pairs of an object and a box are looked at; what was in another's box counts when it has its own.
    # What comes parallel beyond a plan shows how a kept lane goes on.
    # A plan that looks another way than the vehicle, and messages that were overtaken.
    "safety": 3926,
    # Who captures a model, and what had too little memory for it, is known to the process that looks after it.
    # A disk that takes no more is one line, with what is free.
    "workers": 2951,
    # What one stream costs the others in a fault, an overload, a batch, an answer or a probe is held to its share.
    # What wires stages to each other is here, once for the node and for a replay.
    # A worker that fails where another does not is found, and a stream that ends workers leaves the last one to others.
    # Noise around what was usual before is no reason for a further step of an action.
    # An alert that actions of several rules may cause is doubtful for each of them; one rise takes one tier.
    # Which rules of several stages may bring each other about is found once, as the stages are wired.
    "stage": 3600,
    # CUDA graphs as an engine, what is known of captures, and the ways that `auto` times with and without them.
    # Whether a model's sizes follow from values is looked for in its operations.
    # Answers in a reduced precision are compared by what they choose, and by what tells inputs apart.
    # Outputs are the caller's own; a model that computes otherwise at each call runs in eager.
    # What a model has become at its first call is left as it is.
    # Weights that calls change, and counts that show in one answer of many, are found; what lacks memory while all
    # ways are timed is left out, and named tuples are refused before a build.
    "engines": 2689,
    # On CUDA the check of outputs is enqueued behind the model, and one wait is for both.
    # A start that fails names the user's line.
    # Weights that warm-up changed come back from another build.
    "worker": 1653,
    # A page or a run is written whole or not at all; the timeline is drawn by three functions.
    # An incident's log begins with the inputs that its first frames ran with; a recorder that starts is waited for.
    "observe": 6073,
    # A node that a roll-out may reach loads it at configure, not on the thread that receives frames.
    # Triggers have a thread of their own: rclpy's executor took more for a message than the stage did.
    # A node whose lane is off asks whether that is latched.
    # Its readers share memory by a profile.
    # What a publisher keeps is heard, also of a trigger, and whoever starts first.
    "node": 2463,
    # Steps of the clock, pauses, odd stamps and messages of a second type are named.
    # A part of a log begins with what publishers had kept; a database cut within a page is reported.
    "replay": 4111,
    "models": 1858,
    # Tuning shares a process, keeps one ready, looks before it measures, and names what it did not try.
    # The files of -o by their suffixes; options of earlier versions are taken, or say what to write.
    # What is read from a tensor and is more than an operand gets no advice to stay a tensor.
    # A precision that the task has not judged is not chosen.
    # A command that is stopped says so in one line, and a full disk does.
    # What -o names is looked at before a build.
    "tools": 3822,
    # Lines that no vehicle writes, and minutes of the future.
    # What a plan takes back leaves, whatever the clock says, and no operator writes over another.
    "fleet": 2946,
    "world": 1472,  # an error in the stages' own code ends a drive
    "train": 1225,
}
"""Of each room, docstrings included."""
OPTIONS = 170
"""And arguments, of all commands."""
PARAMETERS = 105
"""Of the node and of one stage."""
DATACLASSES = 210
SWITCHED_OFF = 6
"""Places where the formatter is switched off: tables."""
LONG_LINES = 240
"""Of the package, over 110 characters."""
TEST_STATEMENTS = 34_983
"""Of all tests: who adds some looks first for those that show the same.

The last to come show models whose state no comparison of answers shows, parts of logs, and how nodes end.
"""
PRIVATE_NAMES_IN_TESTS = 20
"""Uses of `other._name` in tests, but for the names that the standard library documents."""
DOCUMENTED = {"_exit", "_replace"}
"""Of `os`, and of named tuples."""
FIGURES_OF_SPEECH = 0
"""Words that CONVENTIONS replaces by terms and actors: told, said, what of, whatever, nobody."""


@functools.cache
def trees():
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}


def statements_of(room):
    return sum(
        isinstance(node, ast.stmt)
        for path, tree in trees().items()
        if path.is_relative_to(PACKAGE / room)
        for node in ast.walk(tree)
    )


@pytest.mark.parametrize("room", STATEMENTS)
def test_given_a_room_when_its_statements_are_counted_then_there_are_no_more_than_its_bound(room):
    assert statements_of(room) <= STATEMENTS[room]


def test_given_the_rooms_when_listed_then_each_has_a_bound():
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} == set(STATEMENTS)


def test_given_the_package_when_its_files_are_counted_then_there_are_no_more_than_the_bound():
    assert len(trees()) <= FILES


def test_given_the_package_when_its_folders_are_listed_then_none_is_an_attic():
    counts = collections.Counter(path.parent for path in [*trees(), *(ROOT / "test").rglob("*.py")])
    assert [str(folder) for folder, count in counts.items() if count > MOST_FILES_IN_A_FOLDER] == []


def test_given_all_classes_when_their_names_are_compared_then_each_name_means_one_thing():
    places = collections.defaultdict(list)
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path.relative_to(PACKAGE)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_given_the_commands_when_their_options_are_counted_then_there_are_no_more_than_the_bound():
    def count(command):
        below = getattr(command, "commands", None)
        return sum(map(count, below.values())) if below else len(command.params)

    assert count(typer.main.get_command(app)) <= OPTIONS


def test_given_the_parameters_when_counted_then_there_are_no_more_than_the_bound():
    assert len(NODE_PARAMETERS) + len(stage_parameters("perception")) <= PARAMETERS


def test_given_the_dataclasses_when_counted_then_there_are_no_more_than_the_bound():
    found = [
        node.name
        for tree in trees().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        and any(dataclasses.dataclass.__name__ in ast.unparse(each) for each in node.decorator_list)
    ]
    assert len(found) <= DATACLASSES


def test_given_the_code_when_searched_then_the_formatter_is_switched_off_for_tables_only():
    found = sum(path.read_text(encoding="utf-8").count("fmt: skip") for path in trees())
    assert found <= SWITCHED_OFF


def test_given_the_package_when_searched_then_few_of_its_lines_are_long():
    texts = [path.read_text(encoding="utf-8") for path in trees()]
    assert sum(len(line) > 110 for text in texts for line in text.splitlines()) <= LONG_LINES


@functools.cache
def nodes_of_tests():
    return [
        (path, node)
        for path in sorted((ROOT / "test").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    ]


def test_given_the_tests_when_their_statements_are_counted_then_there_are_no_more_than_the_bound():
    assert sum(isinstance(node, ast.stmt) for _, node in nodes_of_tests()) <= TEST_STATEMENTS


def test_given_the_tests_when_searched_then_few_reach_into_other_objects():
    found = [
        f"{path.name}:{node.lineno} {ast.unparse(node)}"
        for path, node in nodes_of_tests()
        if isinstance(node, ast.Attribute)
        and re.match(r"_[a-z]", node.attr)
        and ast.unparse(node.value) not in {"self", "cls", "super()"}
        and node.attr not in DOCUMENTED
    ]
    assert len(found) <= PRIVATE_NAMES_IN_TESTS, "\n".join(found)


def test_given_the_code_when_searched_then_its_words_have_an_actor():
    words = re.compile(r"\b(told|said|what of|whatever|nobody)\b", re.IGNORECASE)
    found = [
        f"{path.relative_to(PACKAGE)}:{number} {line.strip()}"
        for path in trees()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if words.search(line)
    ]
    assert len(found) <= FIGURES_OF_SPEECH, "\n".join(found)
