"""`./run`: only a whole environment counts as made, and the lock file covers the package's needs."""

import contextlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.machinery import SourceFileLoader
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.rig.arguments import arguments_of
from torchperf_ros import __version__

ROOT = Path(__file__).resolve().parents[1]
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    loader = SourceFileLoader("run", str(ROOT / "run"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("run", loader))
    loader.exec_module(module)
    return module


def make_by(folder, version):
    """What `venv --clear` leaves, of a Python of this version."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(sys.executable)
    (folder / "pyvenv.cfg").write_text(f"home = /usr/bin\nversion = {version}\n")


@pytest.fixture
def calls(run, monkeypatch, tmp_path):
    """A checkout in tmp_path, on a machine without ROS 2 and torch, and the commands that would be run."""
    for name in ("pyproject.toml", "setup.py", "setup.cfg", "run", "requirements.lock"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    monkeypatch.setattr(run, "ROOT", tmp_path)
    monkeypatch.setattr(run, "LOCK", tmp_path / "requirements.lock")
    monkeypatch.setattr(run, "_kept_from_machine", dict)
    monkeypatch.setattr(run, "_check_wheels_exist", lambda: None)
    monkeypatch.setattr(run, "_install_ensurepip", lambda: None)
    monkeypatch.setattr(run, "compile_all", lambda python, folder: None)
    calls = []

    def call(*command):
        if "venv" in command:
            make_by(Path(command[-1]), platform.python_version())
        calls.append(
            "venv" if "venv" in command else "packages" if "--requirement" in command else "project"
        )

    monkeypatch.setattr(run, "call", call)
    return calls


def test_second_start_installs_nothing(run, calls):
    run.Environment("kilted").make()
    run.Environment("kilted").make()
    assert calls == ["venv", "packages", "project"]


def test_ros2_launch_finds_the_launch_files_also_where_an_older_setup_linked_their_folder(
    run, calls, tmp_path
):
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "perception.launch.py").touch()
    share = tmp_path / ".venv" / "share" / "torchperf_ros"

    def old_setup(*_):
        share.mkdir(parents=True, exist_ok=True)
        (share / "launch").symlink_to(tmp_path / "launch")

    environment = run.Environment("kilted")
    run.compile_all = old_setup
    environment.make()
    # as ros2launch looks, not through linked folders
    found = [name for _, _, files in os.walk(share) for name in files]
    assert "perception.launch.py" in found
    assert (
        share / "launch" / "perception.launch.py"
    ).resolve() == tmp_path / "launch" / "perception.launch.py"


def test_interrupted_installation_is_begun_anew(run, calls, monkeypatch):
    interrupt_packages(run, monkeypatch)
    run.Environment("kilted").make()
    assert calls == ["venv", "venv", "packages", "project"]


def test_interrupted_update_is_begun_anew(run, calls, monkeypatch):
    run.Environment("kilted").make()
    before = run.LOCK.read_text()
    run.LOCK.write_text(before + "another==1.0\n")
    interrupt_packages(run, monkeypatch)
    run.LOCK.write_text(before)
    calls.clear()
    run.Environment("kilted").make()
    assert calls == ["venv", "packages", "project"]


def interrupt_packages(run, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    environment = run.Environment("kilted")
    monkeypatch.setattr(environment, "_pip", interrupted)
    with pytest.raises(KeyboardInterrupt):
        environment.make()


def test_changed_lock_updates_in_place(run, calls):
    run.Environment("kilted").make()
    run.LOCK.write_text(run.LOCK.read_text() + "another==1.0\n")
    run.Environment("kilted").make()
    assert calls == ["venv", "packages", "project", "packages", "project"]


OWN = f".venv-{HERE}"


def test_another_python_gets_an_environment_of_its_own(run, calls, tmp_path):
    make_by(tmp_path / ".venv", "3.9.1")
    for _ in range(2):
        environment = run.Environment("kilted")
        environment.make()
        assert environment.folder == tmp_path / OWN
    assert calls == ["venv", "packages", "project"]
    assert "3.9.1" in (tmp_path / ".venv" / "pyvenv.cfg").read_text()


def test_another_python_that_was_faster_keeps_its_environment(run, calls, tmp_path, monkeypatch):
    """Both find no environment; while this one waits for its turn, the other makes one."""
    environment = run.Environment("kilted")
    assert environment.folder == tmp_path / ".venv"
    monkeypatch.setattr(run.fcntl, "flock", lambda *_: make_by(tmp_path / ".venv", "3.9.1"))
    environment.make()
    assert environment.folder == tmp_path / OWN
    assert "3.9.1" in (tmp_path / ".venv" / "pyvenv.cfg").read_text()


def test_environment_of_a_python_that_was_removed_is_made_anew(run, calls, tmp_path):
    make_by(tmp_path / ".venv", "3.9.1")
    (tmp_path / ".venv" / "bin" / "python").unlink()
    (tmp_path / ".venv" / "bin" / "python").symlink_to(tmp_path / "nowhere")
    assert run.Environment("kilted").folder == tmp_path / ".venv"


def test_environment_that_a_process_runs_from_is_not_made_anew(run, calls, tmp_path):
    run.Environment("kilted").make()
    (tmp_path / ".venv" / "stamp").write_text("python of another machine\n")
    calls.clear()
    command = [str(tmp_path / ".venv" / "bin" / "python"), "-c", "print(flush=True); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        with pytest.raises(run.SetupError, match=f"process {process.pid} runs from it; end that first"):
            run.Environment("kilted").make()
        assert calls == []
        process.stdin.close()
    run.Environment("kilted").make()
    assert calls == ["venv", "packages", "project"]


@pytest.mark.parametrize(
    ("kept", "absent", "present"),
    [
        ({}, {"ros-rclpy==7.1.6"}, {"ros-rclpy==9.1.2", "torch==2.13.0", "openvino==2026.4.1"}),
        (
            {"torch": "2.8.0", "numpy": "1.26.4"},
            {"torch==2.13.0", "numpy==2.4.6", "openvino==2026.4.1"},
            {"ros-rclpy==9.1.2"},
        ),
        ({"rclpy": "/opt/ros", "numpy": "1.26.4"}, {"ros-rclpy==9.1.2", "numpy==2.4.6"}, {"torch==2.13.0"}),
    ],
    ids=["bare machine", "own torch", "ROS 2 sourced"],
)
def test_what_the_machine_brings_is_not_installed(run, calls, monkeypatch, kept, absent, present):
    monkeypatch.setattr(run, "_kept_from_machine", lambda: kept)
    monkeypatch.setattr(run, "_check_rclpy_imports", lambda: None)
    environment = run.Environment("kilted")
    environment.make()
    chosen = {
        line.partition(" ;")[0]
        for line in (environment.folder / "requirements.txt").read_text().splitlines()
    }
    assert present <= chosen
    assert not absent & chosen


def installed(environment):
    lines = (environment.folder / "requirements.txt").read_text().splitlines()
    return {line.partition("==")[0] for line in lines}


def test_each_command_installs_what_it_needs_and_none_takes_away_what_another_needed(run, calls):
    def set_up(command):
        environment = run.Environment("kilted", None, run.NEEDS[command])
        environment.make()
        return installed(environment)

    tests_only, tools_only = (
        {"mypy", "ruff", "shapely"},
        {"openvino", "plotly", "scipy", "pyarrow", "dask", "pytest"},
    )
    runtime = set_up("demo")
    assert {"torch", "ros-rclpy", "rosbags"} <= runtime
    assert not (tests_only | tools_only) & runtime
    assert set_up("node") == runtime
    assert calls == ["venv", "packages", "project"]
    tools = set_up("shell")
    assert runtime | tools_only <= tools
    assert not tests_only & tools
    everything = set_up("test")
    assert tools | tests_only <= everything
    assert set_up("demo") == everything
    assert calls == ["venv", *["packages", "project"] * 3]


PIP = (
    "import sys; print('Collecting torch==2.13.0'); print('  Downloading torch');"
    " sys.exit(int(sys.argv[1]))"
)


def test_what_pip_says_is_shown_only_where_it_fails(run, capfd):
    run.call(sys.executable, "-c", PIP, "0")
    assert capfd.readouterr() == ("", "")
    with pytest.raises(run.SetupError, match="this failed, for the reason above: "):
        run.call(sys.executable, "-c", PIP, "1")
    assert capfd.readouterr().err == "Collecting torch==2.13.0\n  Downloading torch\n"


def test_where_the_disk_is_full_what_failed_says_how_much_is_free(run, monkeypatch, tmp_path):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(run.shutil, "disk_usage", lambda _path: usage._replace(free=3_000_000))
    with pytest.raises(run.SetupError, match=r"only 0\.00 GB are free on the disk of "):
        run.call("false")


def test_in_a_terminal_one_line_says_which_package_comes(run, capfd, monkeypatch):
    monkeypatch.setattr(run.sys.stderr, "isatty", lambda: True)
    run.call(sys.executable, "-c", PIP, "0")
    assert capfd.readouterr().err == "\r[run] package 1: torch\033[K\r\033[K"


@pytest.fixture
def packed(run, tmp_path):
    """A folder that was packed for this Python, and what was there for another."""
    for version in ("3.9", HERE):
        folder = tmp_path / "packed" / f"python{version}-{platform.machine()}"
        folder.mkdir(parents=True)
        zipfile.ZipFile(folder / "pip-1.0-py3-none-any.whl", "w").close()
    return tmp_path / "packed"


def test_without_a_network_packed_wheels_are_installed_beside_the_machines_torch(
    run, calls, packed, tmp_path, monkeypatch
):
    monkeypatch.setattr(run, "_kept_from_machine", lambda: {"torch": "2.11.0", "numpy": "2.5.2"})
    commands, call = [], run.call
    monkeypatch.setattr(run, "call", lambda *command: (commands.append(command), call(*command)))
    monkeypatch.setattr(run.sys, "base_prefix", sys.prefix)  # a torch of the system's own Python
    environment = run.Environment("kilted", packed)
    environment.make()
    assert calls == ["venv", "packages", "project"]
    assert "--without-pip" in commands[0]
    assert {"--no-index", str(packed / f"python{HERE}-{platform.machine()}")} <= set(commands[1])
    assert commands[1][1].endswith("pip-1.0-py3-none-any.whl/pip")
    chosen = installed(environment)
    assert {"rosbags", "typer", "pytest", "hypothesis", "pip"} <= chosen
    assert not {"torch", "numpy", "ros-rclpy", "pyarrow", "mypy"} & chosen


def test_what_was_packed_with_a_ros_in_one_file_is_unpacked_and_installed_with_its_rclpy(
    run, calls, packed, tmp_path, monkeypatch
):
    there = packed / f"python{HERE}-{platform.machine()}"
    wheel = there / "ros_rclpy-9.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as packing:
        packing.writestr("rclpy/__init__.py", "# rclpy\n" * 1000)
    run.press([wheel, *there.glob("pip-*")], run.pressed_file(there))
    shutil.rmtree(there)
    monkeypatch.setattr(run, "_kept_from_machine", lambda: {"torch": "2.11.0", "numpy": "2.5.2"})
    monkeypatch.setattr(run.sys, "base_prefix", sys.prefix)
    environment = run.Environment("kilted", packed)
    environment.make()
    chosen = installed(environment)
    assert {"ros-rclpy", "plotly", "pip"} <= chosen
    assert "numpy" not in chosen
    with zipfile.ZipFile(wheel) as unpacked:
        assert unpacked.read("rclpy/__init__.py") == b"# rclpy\n" * 1000


def test_without_a_network_and_without_a_torch_it_says_so(run, calls, packed):
    with pytest.raises(run.SetupError, match=r"has no torch of 2\.6 or newer, and none was packed"):
        run.Environment("kilted", packed)


def test_what_was_packed_for_another_python_is_named(run, calls, packed):
    shutil.rmtree(packed / f"python{HERE}-{platform.machine()}")
    with pytest.raises(
        run.SetupError, match=f"packed is python3.9-{platform.machine()}. Where there is a network: "
    ):
        run.Environment("kilted", packed)


def test_what_is_packed_has_the_versions_of_the_python_there(run):
    lines = run.locked(run.sections() - {*run.WHEELS, *run.NO_NETWORK, "torch"})
    found = {
        python: [one for line in lines if (one := run.line_for(line, python))]
        for python in ("3.10", "3.12")
    }
    assert {"numpy==2.2.6", "tomli==2.5.0"} <= set(found["3.10"])
    assert {"numpy==2.4.6"} <= set(found["3.12"])
    assert not {"numpy==2.4.6"} & set(found["3.10"])
    for chosen in found.values():
        assert len({one.partition("==")[0] for one in chosen}) == len(chosen)


def test_alone_it_says_what_it_can_do():
    done = subprocess.run([ROOT / "run"], capture_output=True, text=True, check=True)
    assert all(
        command in done.stdout for command in ("demo", "test", "bench", "node", "torchperf", "shell")
    )


def test_given_a_benchmark_that_is_a_part_of_another_when_asked_for_then_its_new_name_is_told(
    run, monkeypatch, capsys
):
    for old, new in run.MERGED.items():
        monkeypatch.setattr(run.sys, "argv", ["run", "bench", old])
        monkeypatch.setattr(run, "_leave_other_environments", lambda but_torchs: None)
        assert run.main() == 2
        assert f"./run bench {new}" in capsys.readouterr().err
        name, *words = new.split()
        text = (ROOT / "benchmarks" / f"{name}.py").read_text(encoding="utf-8")
        assert all(f'"{part}"' in text for part in words[1:])


@pytest.mark.parametrize(
    ("arguments", "ways"),
    [
        ([], ["-n", "3"]),
        (["test/test_run.py", "-x"], ["test/test_run.py", "-x"]),
        (["--ros", "jazzy"], ["-m", "ros"]),
    ],
)
def test_all_tests_run_side_by_side_and_a_choice_of_them_in_one_process(
    run, calls, monkeypatch, tmp_path, arguments, ways
):
    became = []
    monkeypatch.chdir(tmp_path)  # the checkout, where paths are as they are given
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "test_run.py").write_text("")
    monkeypatch.setattr(run.sys, "argv", ["run", "test", *arguments])
    monkeypatch.setattr(run.os, "chdir", lambda folder: None)
    monkeypatch.setattr(run, "_leave_other_environments", lambda but_torchs: None)
    monkeypatch.setattr(run.Environment, "optional_packages", lambda environment: contextlib.nullcontext())
    monkeypatch.setattr(run.Environment, "become", lambda environment, *command: became.extend(command))
    run.main()
    assert became == ["python", "-m", "pytest", *ways]


def test_given_another_folder_when_tests_are_run_then_paths_are_from_there_and_words_stay(
    run, calls, monkeypatch, tmp_path
):
    here = tmp_path / "test" / "frame"
    here.mkdir(parents=True)
    for name in ("test_a.py", "slow", "outcome"):
        (here / name).write_text("")
    monkeypatch.chdir(here)
    given = [
        "-q",
        "test_a.py::test_one[a/b]",
        "-k",
        "outcome",
        "-m",
        "slow",
        "--junitxml=out.xml",
        "--basetemp",
        "tmp",
        "-x",
        "nowhere.py",
        "--ignore=slow",
        str(here / "test_a.py"),
        "../frame/slow",
        "-m=slow",
    ]
    assert run.from_here(given) == [
        "-q",
        f"{here}/test_a.py::test_one[a/b]",
        "-k",
        "outcome",
        "-m",
        "slow",
        f"--junitxml={here}/out.xml",
        "--basetemp",
        f"{here}/tmp",
        "-x",
        "nowhere.py",
        f"--ignore={here}/slow",
        str(here / "test_a.py"),
        f"{here}/../frame/slow",
        "-m=slow",
    ]
    monkeypatch.chdir(tmp_path)
    assert run.from_here(["test/frame/slow"]) == ["test/frame/slow"]


def test_given_another_folder_when_a_benchmark_is_run_then_its_files_are_where_it_was_called(
    run, calls, monkeypatch, tmp_path, capsys
):
    """The command becomes one that runs in the checkout, and tells the benchmark where it was called."""
    here = tmp_path / "elsewhere"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv(run.CALLED_FROM, "")
    monkeypatch.setattr(run.sys, "argv", ["run", "bench", "anomalies", "--json", "out.json"])
    monkeypatch.setattr(run, "_leave_other_environments", lambda but_torchs: None)
    became = []
    monkeypatch.setattr(run.Environment, "become", lambda environment, *command: became.extend(command))
    run.main()
    assert became == ["python", "-m", "benchmarks.anomalies", "--json", "out.json"]
    assert (os.environ[run.CALLED_FROM], Path.cwd()) == (str(here), tmp_path)
    for folder in (here, tmp_path):
        asked = arguments_of("what").parse_args(["--json", "out.json"]).json
        assert asked == folder / "out.json"
        monkeypatch.delenv(run.CALLED_FROM)  # run as a module in the checkout: from there
        assert arguments_of("what").parse_args(["--json", "out.json"]).json == Path("out.json")
        monkeypatch.setenv(run.CALLED_FROM, str(tmp_path))
    absolute = here / "out.json"
    assert arguments_of("what").parse_args(["--json", str(absolute)]).json == absolute
    for name, why in (("no/out.json", "no is not there"), ("elsewhere", "is a folder")):  # before it runs
        with pytest.raises(SystemExit):
            arguments_of("what").parse_args(["--json", name])
        assert re.search(f"argument --json: .*{why}", capsys.readouterr().err)


def test_given_every_benchmark_when_searched_then_none_takes_a_path_from_where_it_does_not_run():
    found = [
        f"{file.name}: {line.strip()}"
        for file in sorted((ROOT / "benchmarks").rglob("*.py"))
        for line in file.read_text(encoding="utf-8").splitlines()
        if re.search(r"type=Path\b", line) and "SUPPRESS" not in line
    ]
    assert found == []


def test_lock_names_one_exact_version_of_everything_asked_for(run, calls):
    asked = re.findall(r'^\s+"([a-z-]+)(?:\[\w+\])?(?:[<>=].*)?",', (ROOT / "setup.py").read_text(), re.M)
    for ros in run.WHEELS:
        environment = run.Environment(ros)
        environment.folder.mkdir()
        locked = environment.requirements().read_text().splitlines()
        assert all(re.fullmatch(r"[a-z0-9-]+==[0-9.]+( ; python_version .*)?", line) for line in locked)
        assert {"torch", "ros-rclpy", "typer"} <= set(asked) <= {line.partition("==")[0] for line in locked}


def test_versions_of_package_and_manifest_agree():
    assert ElementTree.parse(ROOT / "package.xml").findtext("version") == __version__


@pytest.fixture
def debian(run, monkeypatch, tmp_path):
    """A machine of Debian's without the optional packages, on which this is root.

    What apt-get was asked is noted.
    """
    (tmp_path / "bin").mkdir()
    apt = tmp_path / "bin" / "apt-get"
    policy = tmp_path / "policy-rc.d"
    apt.write_text(
        f'#!/bin/sh\n"{policy}" prometheus start; echo "$* | policy $? | $DEBIAN_FRONTEND"'
        f' >>"{tmp_path}/asked"\nif [ -e "{tmp_path}/offline" ]; then echo E: no network; exit 100; fi\n'
    )
    apt.chmod(0o755)
    monkeypatch.setenv("PATH", str(apt.parent))
    monkeypatch.setattr(run, "SERVICE_POLICY", policy)
    monkeypatch.setattr(run, "SYSTEMD", tmp_path / "systemd")
    monkeypatch.setattr(run.os, "geteuid", lambda: 0)
    environment = run.Environment("kilted")
    environment.folder = tmp_path / "environment"
    environment.folder.mkdir()
    return environment


def install(environment):
    with environment.optional_packages():
        pass


def asked(folder):
    return (folder / "asked").read_text().splitlines() if (folder / "asked").exists() else []


def test_optional_packages_are_installed_once_and_start_no_service(run, debian, tmp_path):
    install(debian)
    install(debian)
    update, installed = asked(tmp_path)
    assert " update | policy 101 | noninteractive" in update
    assert "--no-install-recommends prometheus chromium | policy 101 | noninteractive" in installed
    assert not run.SERVICE_POLICY.exists()


def test_machines_own_policy_for_services_stays(run, debian, tmp_path):
    run.SERVICE_POLICY.write_text("#!/bin/sh\nexit 104\n")
    run.SERVICE_POLICY.chmod(0o755)
    install(debian)
    assert all("| policy 104 |" in line for line in asked(tmp_path))
    assert run.SERVICE_POLICY.read_text().endswith("exit 104\n")


def test_what_is_there_is_not_installed(debian, tmp_path):
    for program in ("promtool", "chromium"):
        (tmp_path / "bin" / program).write_text("#!/bin/sh\n")
        (tmp_path / "bin" / program).chmod(0o755)
    install(debian)
    assert asked(tmp_path) == []


def test_failed_installation_is_only_a_message(run, debian, tmp_path, capsys):
    (tmp_path / "offline").touch()
    install(debian)
    assert "will be skipped: E: no network" in capsys.readouterr().err
    assert not run.SERVICE_POLICY.exists()


def test_machine_with_systemd_or_another_user_is_only_told(run, debian, tmp_path, monkeypatch, capsys):
    run.SYSTEMD.mkdir()
    install(debian)
    assert "sudo apt-get install prometheus chromium" in capsys.readouterr().err
    run.SYSTEMD.rmdir()
    (debian.folder / "optional-packages").unlink()
    monkeypatch.setattr(run.os, "geteuid", lambda: 1000)
    install(debian)
    assert "sudo apt-get install prometheus chromium" in capsys.readouterr().err
    assert asked(tmp_path) == []


def test_a_test_that_ends_its_process_fails_and_every_other_is_run(tmp_path):
    """The process has done whole files by then."""
    shutil.copy(ROOT / "test" / "conftest.py", tmp_path)
    ends_once = """
        marker = pathlib.Path(__file__).with_suffix(".ended")
        if number == 1 and not marker.exists():
            marker.touch()
            time.sleep(0.5)
            os._exit(9)
    """
    files = {f"test_{number:02}.py": "" for number in range(20)}
    files |= {"test_ends.py": ends_once}
    for name, body in files.items():
        (tmp_path / name).write_text(
            "import os, pathlib, pytest, time\n@pytest.mark.parametrize('number', range(4))\ndef"
            " test_one(number):\n" + (body or "    pass\n")
        )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "2",
        "-q",
        "--rootdir",
        str(tmp_path),
        "-p",
        "no:cacheprovider",
    ]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run(
        command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False, timeout=240
    )
    assert "crashed while running 'test_ends.py::test_one[1]'" in done.stdout
    assert "1 failed, 84 passed" in done.stdout
