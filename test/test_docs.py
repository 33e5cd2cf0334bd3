"""README and docs do what they print.

Every command is one, and what can run here in seconds runs, in the page's order.

`NOT_RUN` says of every other command why not, and `SHORTER` what is put behind one that would take long.
"""

import glob
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer.main
import yaml
from safetensors.torch import load_file
from typer.testing import CliRunner

from torchperf_ros.api.adapter import Received
from torchperf_ros.api.messages import decode, empty_message, encode, header, stamp_ns_of
from torchperf_ros.engines.fingerprint import changing_weights
from torchperf_ros.replay.logs.log_reader import LogReader
from torchperf_ros.replay.step_times import read_step_times
from torchperf_ros.settings.params_file import config_of, read_params_file
from torchperf_ros.tools.main import app
from torchperf_ros.workers.protocol import RUN, Request, Response

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[1]
PAGES = {page.name: page for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]}
TEXTS = {name: page.read_text(encoding="utf-8") for name, page in PAGES.items()}
WORKFLOW = ROOT / "docs" / "examples" / "replay-gate.yaml"
COMMANDS = typer.main.get_command(app).commands
RUN_COMMANDS = {"demo", "test", "node", "shell", "pack"}
PROGRAMS = r"\./run|torchperf|ros2|colcon|rqt|alias|export|sudo|cd|prometheus|dask|git|mkdir|ls|pip|pytest|python3?|ssh|jq"  # noqa: E501
SHELL = re.compile(rf"^(?: {{4,7}}|\s+run: )(?:\$ )?((?:{PROGRAMS}) (?!=).*)$", re.MULTILINE)
INLINE = re.compile(r"`((?:\./run|torchperf) [^`]+)`")
BLOCK = re.compile(r"^```(python|yaml)\n(.*?)^```", re.MULTILINE | re.DOTALL)
STATE = re.compile(r"~/(\.local/state/torchperf_ros/20\S+_\S+)")

NOT_RUN = {
    r"(ros2|colcon|rqt|alias|export) ": "needs an installed ROS 2; its command line is not on PyPI",
    r"pip install": "downloads gigabytes; test/test_run.py has what ./run installs",
    r"(ssh|dask|git) |.*--parallel tcp": "needs another machine, or another commit",
    r'sudo |cd "|prometheus ': "test/node/test_prometheus.py does it with a real server",
    r"jq ": "is a program of its own; the expression is its documentation's",
    r"cd examples": "test/examples/test_examples.py",
    r"torchperf inspect": "test/tools/test_inspect_command.py has the models that it is for",
    r"torchperf drive .*(--arm|-o) ": "test/world/test_loop.py drives them all",
    r"(torchperf replay|pytest --refresh-golden) drives/": (
        "test/world/test_loop.py replays a drive and runs its test"
    ),
    r"torchperf train .*(--log|--adapter|--device)": (
        "needs a log with labels, or a GPU: test/train has a log"
    ),
    r"ls ": "shows what the recorder has written: test/node/test_recording.py",
    r"torchperf doctor( +#| --)": "listens to a running node: test/node/test_doctor.py",
    r"torchperf (node|top|play)|.*--live": (
        "talks to a running node: test/node, test/top, test/replay/logs/test_play.py"
    ),
    r"\./run (demo|test|shell|pack|--offline)": "test/demo, test/test_run.py; and this is `./run test`",
    r"\./run bench": "test/benchmarks runs each for a moment",
    r"torchperf tune (my_robot|--params segmenter.yaml -o)": (
        "with the parameter file and a budget it is run"
    ),
    r"torchperf compile --params my.yaml": "is the README's segmenter.yaml, with which it is run",
    r"torchperf replay \S+ .*--parallel": "starts a cluster: test/replay/test_batch.py",
    r"torchperf replay (logs/)?drive.mcap --pace real": "the project below is made with it",
    r"torchperf rollout candidate": ("talks to a running node: test/node/test_candidate_live.py"),
    r"torchperf rollout sign .*--gate": (
        "test/fleet/test_rollout_command.py has gates that are open, and closed ones"
    ),
    r"torchperf rollout advance": "refuses without records: test/fleet/test_rollout_command.py has some",
    r"torchperf replay incident --pace": "a real incident of 82 MB; with `incident/` it is run",
}
QUICK = {
    f"{stage}.{name}": value
    for stage in ("perception", "planning")
    for name, value in (("tiers", ["fast"]), ("backup", "none"))
}
"""Parameters with as little of the reference models as a replay needs, and as options."""
SET = [f"--set={name}={json.dumps(value, separators=(',', ':'))}" for name, value in QUICK.items()]
SHORTER = {
    r"torchperf make-log .*160x120": "--seconds 1 --force",  # the README's model takes no other size
    r"torchperf make-log .*--fault": "--size 64x48 --force",
    r"torchperf make-log": "--seconds 1 --size 64x48 --force",
    r"torchperf (tune|compile|train)": "--dry-run",
    r"torchperf replay drive.mcap( +#| --pace virtual)": " ".join(SET),
    r"torchperf drive --scenario": "--arm zero",  # test/world/test_loop.py has the others
    r"torchperf rollout simulate": "--vehicles 300",
}


def shell_lines(text: str) -> list[str]:
    """What a reader could copy into a shell, as it stands."""
    return [line.strip() for line in SHELL.findall(re.sub(r"\\\n *", "", text))]


def printed() -> list[str]:
    """Every command of ours, `page: command`; one in a sentence begins with a backtick."""
    found = []
    for name, text in {**TEXTS, WORKFLOW.name: WORKFLOW.read_text(encoding="utf-8")}.items():
        lines = [line for line in shell_lines(text) if re.match(r"\./run|torchperf", line)]
        in_text = ["`" + " ".join(command.split()) for command in INLINE.findall(text)]
        found += [f"{name}: {command}" for command in lines + in_text]
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


@pytest.mark.parametrize("where", printed())
def test_given_a_printed_command_when_parsed_then_its_name_and_options_are_known(
    where, tmp_path, monkeypatch
):
    program, name, *arguments = words_of(where.partition(": ")[2].lstrip("`"))
    if program == "./run" and name == "torchperf":
        program, (name, *arguments) = name, arguments
    if program == "./run" and name == "bench":
        source = options_of(ROOT / "benchmarks" / f"{arguments[0]}.py") if arguments else ""
        assert [word for word in arguments if word.startswith("--") and f'"{word}"' not in source] == []
    elif program == "./run":
        assert name in RUN_COMMANDS or name.startswith("-")
    elif not name.startswith("-"):
        command = COMMANDS[name]
        assert not command.hidden, f"{name} is an old name"
        if hasattr(command, "commands"):  # a command that has commands of its own
            name, *arguments = arguments
            command = command.commands[name]
        monkeypatch.chdir(tmp_path)
        for (
            word
        ) in arguments:  # an option's file may have to be there: whether it is, is the reader's affair
            if Path(word).suffix and not Path(word).is_absolute():
                Path(word).parent.mkdir(parents=True, exist_ok=True)
                Path(word).touch()
        if "`" in where:  # a sentence may name half of a command
            known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
            assert name == "node" or {word for word in arguments if word.startswith("-")} <= known
        else:
            assert "   " not in where.partition("#")[0].strip()  # a comment without its sign
            command.make_context(name, arguments)


def torchperf(*words: str) -> str:
    """Run a command in this process; what it printed."""
    done = CliRunner().invoke(app, words)
    # its verdict; and a replay in real time, on a machine that others keep busy, leaves frames without an
    # answer
    is_verdict = words[0] in {"compare", "doctor"} or (words[0] == "replay" and "real" in words)
    expected = {0, 1, 3} if is_verdict else {0}
    assert done.exit_code in expected, f"{shlex.join(words)} ends with {done.exit_code}:\n{done.output}"
    return done.output


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A user's folder: the README's model, a drive, an incident of it, and runs; `HOME` lies in it."""
    folder = tmp_path_factory.mktemp("project")
    python, parameters = (
        next(text for kind, text in BLOCK.findall(TEXTS["README.md"]) if kind == name)
        for name in ("python", "yaml")
    )
    (folder / "my_robot").mkdir()
    (folder / "my_robot" / "segmenter.py").write_text(python, encoding="utf-8")
    for name in ("segmenter.yaml", "my.yaml", "tuned.yaml"):
        (folder / name).write_text(parameters, encoding="utf-8")
    for content, name in re.findall(r"`(\{.*?\})` in `(\w+\.yaml)`", TEXTS["testing.md"]):
        (folder / name).write_text(content, encoding="utf-8")
    (folder / "cpu.csv").write_text("".join(f"{n},{20 + n % 7}\n" for n in range(200)), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        torchperf("make-log", "drive.mcap", "--seconds", "1", "--size", "64x48")
        (folder / "monday").mkdir()
        outputs = ("--json", "run.json", "--parquet", "main.parquet", "-o", "monday/drive.mcap")
        patience = (
            "--set=perception.budget_ms=1000.0",
            "--set=planning.budget_ms=1000.0",
        )  # on a busy machine, too
        torchperf("replay", "drive.mcap", "--pace", "real", *SET, *patience, *outputs)
        for name in ("run", "branch", "base", "new"):
            shutil.copy("main.parquet", f"{name}.parquet")
        shutil.copytree("monday", "tuesday")
        make_incident(folder / "incident", Path("drive.mcap"))
        shutil.copytree("incident", "home/.local/state/torchperf_ros/records/perf")
        for name in set(STATE.findall("".join(TEXTS.values()))):
            shutil.copytree("incident", Path("home", name))
    return folder


def make_incident(folder, log):
    """What the recorder writes: the drive, and that a frame of each stage was on time."""
    (folder / "black_box").mkdir(parents=True)
    shutil.copy(log, folder / "black_box")
    (folder / "parameters.json").write_text(json.dumps(QUICK), encoding="utf-8")
    stages = [{"name": name, "tiers": ["fast"]} for name in ("perception", "planning")]
    frame = {
        "v": 1,
        "kind": "frame",
        "seq": 0,
        "t_ns": 2,
        "stamp_ns": 5,
        "total_ms": 9.0,
        "tier": "fast",
        "wait_ms": 0,
        "inference_ms": 9.0,
        "decode_ms": 0,
        "preprocess_ms": 0,
        "postprocess_ms": 0,
        "outcome": "on_time",
    }
    records = [
        {"v": 1, "kind": "start", "t_ns": 1, "stages": stages},
        *(frame | {"stage": s["name"]} for s in stages),
    ]
    (folder / "records.jsonl").write_text(
        "".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8"
    )


@pytest.fixture
def own_project(project, tmp_path, monkeypatch):
    """A copy for one page, in which the test is."""
    folder = shutil.copytree(project, tmp_path / "project")
    monkeypatch.chdir(folder)
    for name, value in {
        "HOME": "home",
        "XDG_STATE_HOME": "home/.local/state",
        "XDG_CACHE_HOME": "home/.cache",
    }.items():
        monkeypatch.setenv(name, str(folder / value))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (folder, ROOT))))
    monkeypatch.syspath_prepend(folder)
    return folder


def why_not(line: str) -> str:
    """Why a command is not run; nothing where it is."""
    return next((reason for pattern, reason in NOT_RUN.items() if re.match(pattern, line)), "")


def run_line(line: str) -> None:
    """As a shell does; a command of ours in this process, where that is quicker."""
    added = next((more for pattern, more in SHORTER.items() if re.match(pattern, line)), "")
    words = [*words_of(line), *added.split()]
    if words[0] == "torchperf" and "|" not in line:
        paths = (os.path.expanduser(word) for word in words[1:])
        torchperf(
            *(found for path in paths for found in (sorted(glob.glob(path)) if "*" in path else [path]))
        )
    else:
        subprocess.run(line, shell=True, check=True, capture_output=True)


@pytest.mark.parametrize(
    "name", [name for name in PAGES if not all(map(why_not, shell_lines(TEXTS[name])))]
)
def test_given_a_page_when_its_commands_are_run_in_its_order_then_each_does_well(name, own_project):
    for line in dict.fromkeys(shell_lines(TEXTS[name])):
        if not why_not(line):
            run_line(line)


@pytest.mark.parametrize("pattern", [*NOT_RUN, *SHORTER])
def test_given_a_reason_not_to_run_a_command_when_the_pages_are_read_then_one_is_there_that_it_is_for(
    pattern,
):
    assert any(re.match(pattern, line) for text in TEXTS.values() for line in shell_lines(text))


def anchors(text: str) -> set[str]:
    """What GitHub makes of a page's headings."""
    found = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {"", *(re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in found)}


@pytest.mark.parametrize("name", PAGES)
def test_given_a_page_when_read_to_its_end_then_every_link_leads_somewhere_and_the_last_lines_say_what_next(
    name,
):
    broken = []
    for file, anchor in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", TEXTS[name]):
        target = (PAGES[name].parent / file).resolve() if file else PAGES[name]
        if not target.exists() or (
            target.suffix == ".md" and anchor not in anchors(target.read_text("utf-8"))
        ):
            broken.append(f"{file}#{anchor}")
    assert broken == []
    assert re.search(r"^(\*\*Next:\*\* |## What next)", TEXTS[name], re.MULTILINE)


def blocks(kind: str, *, tests: bool = False) -> dict[str, str]:
    """Code by `page-number`; those in Python are either tests for pytest or programs."""
    found = {
        f"{name.removesuffix('.md')}-{number}": text
        for name, page in TEXTS.items()
        for number, (language, text) in enumerate(BLOCK.findall(page))
        if language == kind
    }
    return {name: text for name, text in found.items() if ("pytest" in text) == tests or kind != "python"}


@pytest.mark.parametrize("name", blocks("python"))
def test_given_a_program_of_a_page_when_run_then_it_does_well(name, own_project):
    exec(
        blocks("python")[name],
        {"tmp_path": own_project / "home", "time_s": 1.0, "latency_ms": 20.0, "__name__": "page"},
    )


def test_given_the_tests_of_the_pages_when_pytest_runs_them_then_they_pass(pytester, own_project):
    for name, text in blocks("python", tests=True).items():
        if "drive.mcap" not in text:  # that one is the example's: test/examples/test_examples.py
            (own_project / ("conftest.py" if "golden_rules" in text else f"test_{name}.py")).write_text(
                text
            )
    pytest.importorskip(
        "scipy.optimize"
    )  # which cannot be imported a second time; the run in this process would
    done = pytester.runpytest_inprocess("-p", "torchperf", "--refresh-golden")
    done.assert_outcomes(passed=1)


def test_given_the_pages_task_when_its_model_is_trained_then_build_gets_the_weights_as_the_page_says(
    own_project,
):
    task, method = (text for text in blocks("python").values() if "SegmenterTask" in text)
    (own_project / "my_robot" / "task.py").write_text(task)
    with (own_project / "my_robot" / "segmenter.py").open("a") as file:
        file.write(method.partition("class Segmenter(Adapter):\n")[2])
    torchperf("make-log", "road.mcap", "--seconds", "1", "--size", "160x120")
    with LogReader(Path("road.mcap")) as log, Path("labels.jsonl").open("w") as labels:
        for number, raw in enumerate(log.messages({"/camera/image_raw"})):
            image = log.decode(raw)
            np.save(f"{number}.npy", image.data.reshape(120, 160, 3).max(2) // 64)
            labels.write(
                json.dumps({"stamp_ns": stamp_ns_of(image.header), "labels": f"{number}.npy"}) + "\n"
            )
    # a process of its own: this one may have imported another page's `my_robot`
    subprocess.run(
        "torchperf train --adapter my_robot.segmenter:Segmenter --log=road.mcap --topic=/camera/image_raw"
        " --labels=labels.jsonl --steps=0.001 --judged=3 -o mine",
        shell=True,
        check=True,
        capture_output=True,
    )
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from my_robot.task import *\n"
            "net = load(Network(8, 4), 'fast', 'mine/segmenter.safetensors'); print(net.head.bias.tolist())",
        ],
        check=True,
        capture_output=True,
        text=True,
    )
    assert json.loads(done.stdout) == load_file("mine/segmenter.safetensors")["fast.head.bias"].tolist()


@pytest.mark.parametrize("name", blocks("yaml"))
def test_given_parameters_of_a_page_when_read_then_each_is_one(name, own_project):
    values = yaml.safe_load(blocks("yaml")[name])
    if "full" in values.get("perception", {}):  # `times.yaml`
        Path("times.yaml").write_text(blocks("yaml")[name], encoding="utf-8")
        times = read_step_times("times.yaml", Path("drive.mcap"), config_of({}), 0, print)
        assert len(times) == 2
        return
    if "/**/perf" not in values:  # a part of the file
        model = {"adapter": "my_robot.segmenter:Segmenter", "output": "labels", "tiers": ["full", "fast"]}
        own = {"stages": ["segmentation"], **values, "segmentation": model | values.get("segmentation", {})}
        values = {"/**/perf": {"ros__parameters": own}}
    Path("page.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    assert read_params_file(Path("page.yaml")).stages[0].stage in {"segmentation", "perception", "near"}


# -- the frame's way, on the page of the architecture


WAY = TEXTS["architecture.md"].partition("## One frame")[2].partition("1. **Receive.**")[0]
PARTS = re.findall(r"`(\w+/\w+\.py)`\s+\(((?:`[\w.]+`(?:, )?\s*)+)", WAY)


@pytest.mark.parametrize(("file", "names"), PARTS)
def test_given_the_files_of_the_frames_way_when_read_then_they_have_the_functions_that_the_page_names(
    file, names
):
    code = (ROOT / "torchperf_ros" / file).read_text(encoding="utf-8")
    for name in re.findall(r"`([\w.]+)`", names):
        owner, _, function = name.rpartition(".")
        assert f"def {function}(" in code, f"{file}: {name}"
        assert f"class {owner}" in code, f"{file}: {name}"


def test_given_the_frames_way_when_read_then_it_has_all_files_and_says_how_large_messages_are():
    assert len(PARTS) == 9
    sizes = len(Request(RUN, 0, 0, 0, 0).pack()), len(Response(0, 0, 0, 0, 0, 0, 0, 0).pack())
    for size, name in zip(sizes, ("request", "response"), strict=True):
        assert f"{size}-byte {name}" in TEXTS["architecture.md"]


# -- the README


README = TEXTS["README.md"]


def block(language: str) -> str:
    """The README's first code block in a language."""
    text, *_ = re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)
    return text


def test_given_the_readmes_model_when_built_twice_then_its_weights_are_the_same_and_labels_keep_the_stamp() -> (
    None
):
    names: dict[str, Any] = {}
    exec(block("python"), names)
    adapter = names["Segmenter"]({}, torch.device("cpu"))
    for tier in ("full", "fast"):  # so that packages fit
        assert changing_weights(tier, adapter.build(tier), adapter.build(tier)) == ""
    own = {"height": 120, "width": 160, "encoding": "rgb8", "step": 480, "data": np.zeros(57_600, np.uint8)}
    image = empty_message(adapter.output, header=header(12_000_000_034, "camera"), **own)
    messages = {"image": Received(image, 12_000_000_034, 0.0)}
    labels = adapter.postprocess(adapter.build("fast")(*adapter.preprocess(messages)), messages)
    found = decode(encode(labels, adapter.output), adapter.output)
    assert (found.encoding, found.height, found.width) == ("mono8", 120, 160)
    assert stamp_ns_of(found.header) == 12_000_000_034


def test_given_the_readmes_commands_on_a_robot_when_read_then_the_shell_that_listens_sets_no_transport() -> (
    None
):
    commands = README.partition("## On a robot")[2].strip().partition("\n\n")[0]
    assert "ros2 topic echo" in commands
    assert "export" not in commands
