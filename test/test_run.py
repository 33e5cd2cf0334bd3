"""`./run`: an environment counts as made only when it is, and the lock file covers what the package asks for."""

import importlib.util
import re
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from xml.etree import ElementTree

import pytest

from torchperf_ros import __version__

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    loader = SourceFileLoader("run", str(ROOT / "run"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("run", loader))
    loader.exec_module(module)
    return module


@pytest.fixture
def calls(run, monkeypatch, tmp_path):
    """A checkout in tmp_path, on a machine without ROS 2 and torch, and the commands that would have been run."""
    for name in ("pyproject.toml", "setup.py", "setup.cfg", "run", "requirements.lock"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    monkeypatch.setattr(run, "ROOT", tmp_path)
    monkeypatch.setattr(run, "LOCK", tmp_path / "requirements.lock")
    monkeypatch.setattr(run, "_kept_from_machine", dict)
    monkeypatch.setattr(run, "_check_wheels_exist", lambda: None)
    monkeypatch.setattr(run, "_install_ensurepip", lambda: None)
    calls = []

    def call(*command):
        if "venv" in command:
            Path(command[-1]).mkdir(exist_ok=True)
        calls.append("venv" if "venv" in command else "packages" if "--requirement" in command else "project")

    monkeypatch.setattr(run, "_call", call)
    return calls


def test_second_start_installs_nothing(run, calls):
    run.Environment("kilted").make()
    run.Environment("kilted").make()
    assert calls == ["venv", "packages", "project"]


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


@pytest.mark.parametrize(
    ("kept", "absent", "present"),
    [
        ({}, {"ros-rclpy==7.1.6"}, {"ros-rclpy==9.1.2", "torch==2.13.0"}),
        ({"torch": "2.8.0", "numpy": "1.26.4"}, {"torch==2.13.0", "numpy==2.4.6"}, {"ros-rclpy==9.1.2"}),
        ({"rclpy": "/opt/ros", "numpy": "1.26.4"}, {"ros-rclpy==9.1.2", "numpy==2.4.6"}, {"torch==2.13.0"}),
    ],
    ids=["bare machine", "own torch", "ROS 2 sourced"],
)
def test_what_the_machine_brings_is_not_installed(run, calls, monkeypatch, kept, absent, present):
    monkeypatch.setattr(run, "_kept_from_machine", lambda: kept)
    monkeypatch.setattr(run, "_check_rclpy_imports", lambda: None)
    environment = run.Environment("kilted")
    environment.make()
    chosen = {line.partition(" ;")[0] for line in (environment.folder / "requirements.txt").read_text().splitlines()}
    assert present <= chosen
    assert not absent & chosen


def test_alone_it_says_what_it_can_do():
    done = subprocess.run([ROOT / "run"], capture_output=True, text=True, check=True)
    assert all(command in done.stdout for command in ("demo", "test", "bench", "node", "torchperf", "shell"))


def test_lock_names_one_exact_version_of_everything_asked_for(run, calls):
    asked = re.findall(r'^\s+"([a-z-]+)(?:\[\w+\])?(?:[<>=].*)?",', (ROOT / "setup.py").read_text(), re.M)
    for ros in run.WHEELS:
        environment = run.Environment(ros)
        environment.folder.mkdir()
        locked = environment._requirements().read_text().splitlines()
        assert all(re.fullmatch(r"[a-z0-9-]+==[0-9.]+( ; python_version .*)?", line) for line in locked)
        assert {"torch", "ros-rclpy", "typer"} <= set(asked) <= {line.partition("==")[0] for line in locked}


def test_versions_of_package_and_manifest_agree():
    assert ElementTree.parse(ROOT / "package.xml").findtext("version") == __version__


@pytest.fixture
def debian(run, monkeypatch, tmp_path):
    """A machine of Debian's without the optional packages, on which this is root; what apt-get was asked is noted."""
    (tmp_path / "bin").mkdir()
    apt = tmp_path / "bin" / "apt-get"
    policy = tmp_path / "policy-rc.d"
    apt.write_text(
        f'#!/bin/sh\n{policy} prometheus start; echo "$* | policy $? | $DEBIAN_FRONTEND" >>{tmp_path}/asked\n'
        f"if [ -e {tmp_path}/offline ]; then echo E: no network; exit 100; fi\n"
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


def asked(folder):
    return (folder / "asked").read_text().splitlines() if (folder / "asked").exists() else []


def test_optional_packages_are_installed_once_and_start_no_service(run, debian, tmp_path):
    debian.install_optional_packages()
    debian.install_optional_packages()
    update, install = asked(tmp_path)
    assert " update | policy 101 | noninteractive" in update
    assert "--no-install-recommends prometheus chromium | policy 101 | noninteractive" in install
    assert not run.SERVICE_POLICY.exists()


def test_machines_own_policy_for_services_stays(run, debian, tmp_path):
    run.SERVICE_POLICY.write_text("#!/bin/sh\nexit 104\n")
    run.SERVICE_POLICY.chmod(0o755)
    debian.install_optional_packages()
    assert all("| policy 104 |" in line for line in asked(tmp_path))
    assert run.SERVICE_POLICY.read_text().endswith("exit 104\n")


def test_what_is_there_is_not_installed(debian, tmp_path):
    for program in ("promtool", "chromium"):
        (tmp_path / "bin" / program).write_text("#!/bin/sh\n")
        (tmp_path / "bin" / program).chmod(0o755)
    debian.install_optional_packages()
    assert asked(tmp_path) == []


def test_failed_installation_is_only_a_message(run, debian, tmp_path, capsys):
    (tmp_path / "offline").touch()
    debian.install_optional_packages()
    assert "will be skipped: E: no network" in capsys.readouterr().err
    assert not run.SERVICE_POLICY.exists()


def test_machine_with_systemd_or_another_user_is_only_told(run, debian, tmp_path, monkeypatch, capsys):
    run.SYSTEMD.mkdir()
    debian.install_optional_packages()
    assert "sudo apt-get install prometheus chromium" in capsys.readouterr().err
    run.SYSTEMD.rmdir()
    (debian.folder / "optional-packages").unlink()
    monkeypatch.setattr(run.os, "geteuid", lambda: 1000)
    debian.install_optional_packages()
    assert "sudo apt-get install prometheus chromium" in capsys.readouterr().err
    assert asked(tmp_path) == []
