"""The page of promises is made of the benchmarks' own results, and of nothing else."""

import json

import pytest

from benchmarks import promises
from benchmarks.rig.report import Target

MACHINE = {
    "cpu": "a processor",
    "cores": 2,
    "memory_mib": 8192,
    "kernel": "6.1",
    "python": "3.11",
    "torch": "2.13",
    "rclpy": "9.1",
    "date": "2026-01-02T03:04:05",
    "others_cpu_percent_meanwhile": 1.0,
    "stolen_percent_meanwhile": 0.5,
}


def result(*targets, **machine):
    found = [{**vars(target), "met": target.met} for target in targets]
    return {"machine": MACHINE | machine, "targets": found}


def test_given_the_results_in_the_repository_then_they_make_the_page_and_every_promise_is_measured():
    results = {
        name: json.loads((promises._RESULTS / f"{name}.json").read_text()) for name in promises.COMMANDS
    }
    page = promises.page(results)
    assert promises._PAGE.read_text(encoding="utf-8") == page
    assert "not measured" not in page
    for name, found in results.items():  # by the commands that the page shows
        words = promises.COMMANDS[name].split()
        for option, value in zip(words[::2], words[1::2], strict=True):
            given = found["parameters"][option.removeprefix("--").replace("-", "_")]
            assert value == (
                ",".join(given)
                if isinstance(given, list)
                else f"{given:g}"
                if isinstance(given, float)
                else str(given)
            )
    assert len(promises.PROMISES) == 12


def test_given_a_target_that_was_missed_and_a_benchmark_without_a_result_then_the_page_says_both():
    missed = Target("node, per 1,000 frames", 2.5, "<", 1.0, "KiB")
    page = promises.page(dict.fromkeys(promises.COMMANDS) | {"soak": result(missed)})
    assert "| memory of the node, trend over 1,000 frames | 2.5 KiB | < 1 KiB | **missed** |" in page
    assert page.count("not measured") == 11


@pytest.mark.parametrize("taken", ["others_cpu_percent_meanwhile", "stolen_percent_meanwhile"])
def test_given_a_machine_that_others_used_then_the_page_says_that_its_times_count_for_little(taken):
    quiet = dict.fromkeys(promises.COMMANDS) | {"soak": result()}
    assert "no idle machine" not in promises.page(quiet)
    assert "no idle machine" in promises.page(quiet | {"guard": result(**{taken: 30.0})})


def test_given_a_dry_run_then_each_command_is_shown_and_none_is_run(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["promises", "--dry-run", "--only", "guard,soak"])
    assert promises.main() == 0
    assert capsys.readouterr().out == "./run bench guard --parts cost\n./run bench soak --frames 60000\n"
