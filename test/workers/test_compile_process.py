"""The process from the outside, with small programs in the compiler's place."""

import contextlib
import functools
import os
import select
import subprocess
import sys
import time
from dataclasses import replace
from unittest import mock

import pytest

from torchperf_ros.api.errors import ProtocolError
from torchperf_ros.settings.build_options import BuildOptions
from torchperf_ros.workers import compile_process
from torchperf_ros.workers.compile_process import AGAIN, CompileProcess, PackageBuilder
from torchperf_ros.workers.worker_setup import WorkerSetup

from ..stage.conftest import PATIENCE_S, wait_until

START = """
import json, os, sys, time
news = os.fdopen(int(sys.argv[1]), "w", buffering=1)
os.set_inheritable(news.fileno(), False)
job = json.load(sys.stdin)
def say(**fields):
    news.write(json.dumps(fields) + "\\n")
"""


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """A folder whose modules processes find."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    return tmp_path


@pytest.fixture
def start(modules):
    """Run a program as the process; it finds `job` and `say`."""
    processes = []

    def make(program, job=None, *, background=False, prefix=START):
        (modules / "pretend_main.py").write_text(prefix + program, encoding="utf-8")
        processes.append(CompileProcess(job or {}, background=background, module="pretend_main"))
        return processes[-1]

    yield make
    for process in processes:
        with contextlib.suppress(OSError):  # a test that closes it itself
            process.close()


def hear(process, until=lambda messages: False):
    """What it says until it has ended, or the condition is true."""
    messages, stop_at = [], time.monotonic() + PATIENCE_S
    while not until(messages):
        assert time.monotonic() < stop_at, messages
        said = process.listen()
        if said is None:
            return messages
        messages += said
        select.select([process.news], [], [], 0.05)
    return messages


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("background", [True, False])
def test_given_a_job_when_started_then_it_gets_it_and_what_it_says_comes_in_order(start, background):
    process = start("say(kind='a', job=job)\nsay(kind='b')\n", {"tiers": ["ü"]}, background=background)
    assert hear(process) == [
        {"kind": "a", "job": {"tiers": ["ü"], "background": background}},
        {"kind": "b"},
    ]
    assert process.death_reason() == ""


def test_given_words_larger_than_a_pipe_when_said_or_printed_then_they_come_whole_and_hold_nobody_up(start):
    program = (
        "for _ in range(40): print('y' * 65_536)\nsay(size=len(job['x']), x='y' *"
        " 3_000_000)\nsay(last=True)\n"
    )
    first, last = hear(start(program, {"x": "y" * 1_000_000}))
    assert (first["size"], len(first["x"]), last) == (1_000_000, 3_000_000, {"last": True})


def test_given_nothing_new_when_heard_then_it_is_empty_and_does_not_wait(start):
    process = start("say(x=1)\ntime.sleep(60)\n")
    hear(process, until=bool)
    assert process.listen() == []


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ("sys.exit(3)", "the pretend process ended by exit status 3\nlast words"),
        ("os.kill(os.getpid(), 9)", "the pretend process ended by signal SIGKILL\nlast words"),
        ("os.abort()", "the pretend process ended by signal SIGABRT\nlast words"),
    ],
)
def test_given_a_bad_end_when_asked_then_it_is_named_with_the_last_that_was_printed(start, end, reason):
    process = start(f"print('x' * 9000)\nprint('last words', end='', flush=True)\n{end}\n")
    assert hear(process) == []
    text = process.death_reason()
    assert text.startswith(reason.partition("\n")[0] + "\nx")
    assert text.endswith("last words")
    assert len(text) < 4_100


def test_given_words_printed_after_the_last_look_when_it_has_died_then_they_are_in_the_reason(
    start, modules
):
    os.mkfifo(modules / "go")
    process = start(
        f"say(x=1)\nopen({str(modules / 'go')!r}).read()\nprint('Fatal', flush=True)\nsys.exit(1)\n"
    )
    hear(process, until=bool)
    (modules / "go").write_text("")
    assert "Fatal" in process.death_reason()


@pytest.mark.parametrize("line", ["no json", "3", "[1]"])
def test_given_words_that_are_no_json_object_when_heard_then_that_is_an_error(start, line):
    process = start(f"say(x=1)\nnews.write({line + chr(10)!r})\ntime.sleep(60)\n")
    with pytest.raises(ProtocolError, match="the pretend process wrote"):
        hear(process)


def test_given_a_process_that_falls_silent_but_lives_on_then_it_is_not_waited_for_without_end(
    start, monkeypatch
):
    monkeypatch.setattr("torchperf_ros.workers.compile_process._END_S", 0.2)
    process = start("news.close()\ntime.sleep(60)\n")
    hear(process)
    assert process.death_reason() == "the pretend process has nothing more to say, but does not end"
    process.close()
    assert not alive(process.pid)


def test_given_children_when_closed_then_they_are_gone_with_it(start):
    child = (
        "import subprocess; child = subprocess.Popen(['sleep', '60'])\nsay(pid=child.pid)\ntime.sleep(60)\n"
    )
    process = start(child)
    (message,) = hear(process, until=bool)
    assert alive(message["pid"])
    process.close()
    wait_until(lambda: not alive(message["pid"]), lambda: "the child's end")
    assert not alive(process.pid)


def open_descriptors():
    return set(os.listdir("/proc/self/fd"))


def test_given_processes_when_closed_then_no_descriptor_is_left(start):
    start("pass").close()
    before = open_descriptors()
    for _ in range(3):
        process = start("say(x=1)")
        hear(process)
        process.close()
    assert len(open_descriptors()) == len(before)


def test_given_no_process_when_it_cannot_be_started_then_no_descriptor_is_left(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", mock.Mock(side_effect=OSError("no more processes")))
    before = open_descriptors()
    with pytest.raises(OSError, match="no more processes"):
        CompileProcess({}, background=True)
    assert open_descriptors() == before


def test_given_a_job_that_is_no_json_when_started_then_nothing_is_spawned(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **options: pytest.fail("spawned"))
    with pytest.raises(TypeError):
        CompileProcess({"x": object()}, background=True)


def test_given_a_process_that_does_not_read_its_job_when_started_then_its_end_says_why(start):
    process = start("", prefix="raise SystemExit('no such thing')")
    assert hear(process) == []
    assert process.death_reason() == "the pretend process ended by exit status 1\nno such thing"


JOB = {
    "adapter": "no.such:Adapter",
    "options": {},
    "device": "cpu",
    "threads": 1,
    "tiers": ["a", "b"],
    "build": [],
    "cache_dir": "",
    "cache_mib": 64,
}


def job_of(folder, code):
    """Has the compiler itself do this in place of building, for which it would import torch."""
    (folder / "other_work.py").write_text(
        f"import os, time\ndef do_job(job, say):\n{code}", encoding="utf-8"
    )
    return JOB | {"does": "other_work", "fresh": True}


def test_given_the_compiler_itself_when_its_adapter_is_not_there_then_it_says_so():
    with contextlib.closing(CompileProcess(JOB, background=False)) as process:
        (failed,) = process.messages(PATIENCE_S)
        assert (failed["kind"], failed["tier"], failed["unusable"]) == ("failed", "a, b", True)
        assert "importing no.such failed" in failed["text"]
        assert process.death_reason().startswith("the compile process ended by exit status 1")


@pytest.mark.parametrize(("background", "nice"), [(True, 19), (False, 0)])
def test_given_the_compiler_itself_when_it_works_then_it_does_so_at_its_priority(modules, background, nice):
    job = job_of(modules, "    say('nice', nice=os.getpriority(os.PRIO_PROCESS, 0))\n")
    with contextlib.closing(CompileProcess(job, background=background)) as process:
        assert list(process.messages(PATIENCE_S)) == [{"kind": "nice", "nice": nice}]


def test_given_the_compiler_itself_when_a_capture_fails_and_that_is_kept_then_its_last_word_is_to_go_on(
    modules,
):
    capture = (
        "    from torchperf_ros.engines.engine import CaptureFailed\n"
        "    error = CaptureFailed('it cannot be captured')\n"
        "    error.lacked = 'key'\n    raise error\n"
    )
    with contextlib.closing(CompileProcess(job_of(modules, capture), background=False)) as process:
        assert list(process.messages(PATIENCE_S)) == [
            {"kind": AGAIN, "text": "it cannot be captured", "lacked": {"key": "it cannot be captured"}}
        ]


def test_given_a_parent_that_is_killed_when_it_compiles_then_the_process_dies_with_it(modules):
    program = f"""
import sys
from torchperf_ros.workers.compile_process import CompileProcess
process = CompileProcess({job_of(modules, "    say('works'); time.sleep(60)")!r}, background=False)
while not process.listen():
    pass
print(process.pid, flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        try:
            pid = int(parent.stdout.readline())
            assert alive(pid)
        finally:
            parent.kill()
    wait_until(lambda: not alive(pid), lambda: "its end")


# -- the builder, as the pool's thread sees it: nothing may hold that up


SETUP = WorkerSetup("tested", "a:B", {}, ("full", "fast"), (BuildOptions(),) * 2, ("", ""), (0, 1), (1, -1))


SAYS = """
import json, os, signal, sys, time
news, job = int(sys.argv[1]), json.loads(sys.stdin.readline())
def say(**message):
    os.write(news, json.dumps(message).encode() + b"\\n")
"""


@pytest.fixture
def build(modules, monkeypatch):
    """Have a program stand in for the compiler; gives the builder, what it tells, and its process."""
    monkeypatch.setattr(
        compile_process, "CompileProcess", functools.partial(CompileProcess, module="pretend_main")
    )
    monkeypatch.setattr(compile_process, "_END_S", 600.0)  # who waits for an end is over no test's time
    made = []

    def make(program, setup=SETUP):
        (modules / "pretend_main.py").write_text(f"{SAYS}{program}")
        told = []
        builder = PackageBuilder(setup, told.append, told.append)
        made.append(builder)
        builder.want(["full"])
        return builder, told, builder.process

    yield make
    for builder in made:
        builder.close()


def test_given_a_process_that_says_no_more_but_lives_when_listened_to_then_the_pool_is_not_held_up(
    build, monkeypatch
):
    builder, told, process = build("os.close(news)\ntime.sleep(600)")
    wait_until(lambda: builder.listen() or builder.news is None, lambda: "its last word")
    assert (told, builder.progress) == ([], "compiling 1 of 1")
    monkeypatch.setattr(compile_process, "_SILENT_S", 0.0)
    builder.listen()
    assert told == ["the pretend process has nothing more to say, but does not end"]
    assert builder.progress == ""
    wait_until(lambda: builder.listen() or not builder.killed, lambda: "it is reaped")
    assert process.ended


def test_given_a_process_that_cannot_be_ended_at_once_when_stopped_then_the_pool_is_not_held_up(
    build, monkeypatch
):
    builder, _, process = build("time.sleep(600)")
    with monkeypatch.context() as patch:
        patch.setattr(process, "kill", lambda: None)  # as while it waits for a driver
        builder.stop()
        builder.listen()
        assert builder.killed == [process]
    process.kill()
    wait_until(lambda: builder.listen() or not builder.killed, lambda: "it is reaped")


def test_given_a_process_that_dies_when_listened_to_then_its_last_words_are_told_once(build):
    builder, told, _ = build("print('Fatal', flush=True)\nsys.exit(1)")
    wait_until(lambda: builder.listen() or told, lambda: "its end is told")
    assert told == ["the pretend process ended by exit status 1\nFatal"]
    builder.want(["full"])  # which was tried
    assert builder.news is None


def test_given_a_process_that_ends_for_what_it_has_found_out_when_listened_to_then_the_job_goes_on_in_the_next(
    build, tmp_path
):
    """A capture that fails leaves torch unusable; the next process knows of it and does not try."""
    known = tmp_path / "known"
    builder, told, process = build(
        f"if not os.path.exists({str(known)!r}):\n"
        f"    open({str(known)!r}, 'w').close()\n"
        "    say(kind='again', text='it cannot be captured', lacked={'key': 'no memory'})\n"
        "    os._exit(1)\n"
        "say(kind='tier', tier='full', number=1, step='loading')\n"
        "say(kind='built', tier='full' if job['lacked'] else 'not handed on')\n"
    )
    wait_until(lambda: builder.listen() or builder.process is None, lambda: "its end")
    assert (told, builder.progress) == (["it cannot be captured; it goes on without that", "full"], "")
    assert builder.lacked == {"key": "no memory"}


@pytest.mark.parametrize(
    ("does", "is_kept"),
    [("signal.SIGKILL", True), ("signal.SIGSEGV", True), ("signal.SIGTERM", False), ("0", False)],
)
def test_given_a_process_that_dies_while_it_captures_when_it_was_not_asked_to_then_the_second_death_is_its_cause(
    build, tmp_path, does, is_kept
):
    known = tmp_path / "key.uncapturable"
    builder, told, _ = build(
        f"say(kind='tier', tier='full', number=1, step='graph', capturing='key')\n"
        f"if not os.path.exists({str(known)!r}):\n"
        f"    os.kill(os.getpid(), {does})\n    time.sleep(600)\n"
        "say(kind='built', tier='full')\n",
        replace(SETUP, cache_dir=str(tmp_path)),
    )
    wait_until(lambda: builder.listen() or builder.progress, lambda: "it begins")
    if does == "0":  # the node stops
        wait_until(lambda: builder.process.listen() or True, lambda: "it captures")
        builder.close()
    else:
        wait_until(lambda: builder.listen() or builder.process is None, lambda: "its end")
    assert ("full" in told, known.exists()) == (is_kept, is_kept)
    assert is_kept or not list(tmp_path.glob("key*"))
