"""What compiles in the background, as the pool's thread sees it: nothing may hold that up."""

import functools
import os
import time

import pytest

from torchperf_ros.settings.build_options import BuildOptions
from torchperf_ros.workers import compile_process
from torchperf_ros.workers.compile_process import CompileProcess, PackageBuilder
from torchperf_ros.workers.worker_setup import WorkerSetup

from ..stage.conftest import wait_until

SETUP = WorkerSetup("tested", "a:B", {}, ("full", "fast"), (BuildOptions(),) * 2, ("", ""), (0, 1), (1, -1))


@pytest.fixture
def build(tmp_path, monkeypatch):
    """Have a program stand in for the compiler; gives the builder, what it tells, and its process."""
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    )
    monkeypatch.setattr(
        compile_process, "CompileProcess", functools.partial(CompileProcess, module="pretend_main")
    )
    made = []

    def make(program):
        (tmp_path / "pretend_main.py").write_text(
            f"import os, sys, time\nnews = int(sys.argv[1])\n{program}"
        )
        told = []
        builder = PackageBuilder(SETUP, told.append, told.append)
        made.append(builder)
        builder.want(["full"])
        return builder, told, builder.process

    yield make
    for builder in made:
        builder.close()


def listen(builder):
    """Listen, and be back at once."""
    began_s = time.monotonic()
    builder.listen()
    assert time.monotonic() - began_s < 2.0


def test_given_a_process_that_says_no_more_but_lives_when_listened_to_then_the_pool_is_not_held_up(
    build, monkeypatch
):
    builder, told, process = build("os.close(news)\ntime.sleep(600)")
    wait_until(lambda: listen(builder) or builder.news is None, lambda: "its last word")
    assert (told, builder.progress) == ([], "compiling 1 of 1")
    monkeypatch.setattr(compile_process, "_SILENT_S", 0.0)
    listen(builder)
    assert told == ["the pretend process has nothing more to say, but does not end"]
    assert builder.progress == ""
    wait_until(lambda: listen(builder) or not builder.killed, lambda: "it is reaped")
    assert process.ended


def test_given_a_process_that_cannot_be_ended_at_once_when_stopped_then_the_pool_is_not_held_up(
    build, monkeypatch
):
    builder, _, process = build("time.sleep(600)")
    with monkeypatch.context() as patch:
        patch.setattr(process, "kill", lambda: None)  # as while it waits for a driver
        began_s = time.monotonic()
        builder.stop()
        listen(builder)
        assert time.monotonic() - began_s < 2.0
        assert builder.killed == [process]
    process.kill()
    wait_until(lambda: listen(builder) or not builder.killed, lambda: "it is reaped")


def test_given_a_process_that_dies_when_listened_to_then_its_last_words_are_told_once(build):
    builder, told, _ = build("print('Fatal', flush=True)\nsys.exit(1)")
    wait_until(lambda: listen(builder) or told, lambda: "its end is told")
    assert told == ["the pretend process ended by exit status 1\nFatal"]
    builder.want(["full"])  # which was tried
    assert builder.news is None


def test_given_a_process_that_ends_for_what_it_has_found_out_when_listened_to_then_the_job_goes_on_in_the_next(
    build, tmp_path
):
    """A capture that fails leaves torch unusable; the next process knows of it and does not try."""
    known = tmp_path / "known"
    builder, told, process = build(
        "import json\n"
        "def say(**message):\n    os.write(news, json.dumps(message).encode() + b'\\n')\n"
        f"if not os.path.exists({str(known)!r}):\n"
        f"    open({str(known)!r}, 'w').close()\n"
        "    say(kind='again', text='it cannot be captured')\n"
        "    os._exit(1)\n"
        "say(kind='tier', tier='full', number=1, step='loading')\n"
        "say(kind='built', tier='full')\n"
    )
    wait_until(lambda: listen(builder) or told, lambda: "the next process's package")
    assert told == ["full"]
    wait_until(lambda: listen(builder) or builder.process is None, lambda: "its end")
    assert (told, builder.progress) == (["full"], "")
