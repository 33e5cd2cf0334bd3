"""Tuning with real processes: `tune_adapters.TinyAdapter` in them, crashing, hanging and lying as told."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from torchperf_ros import cli
from torchperf_ros.analysis.tune_parameters import tuned_parameters
from torchperf_ros.analysis.tune_request import target_of_adapter, target_of_file
from torchperf_ros.analysis.tune_search import Subject, TuneSearch, ask_facts
from torchperf_ros.analysis.tune_state import TuneState, default_path
from torchperf_ros.core.build_options import BuildOptions
from torchperf_ros.core.errors import AdapterError, ConfigError
from torchperf_ros.core.params_file import read_params_file
from torchperf_ros.core.tune_ranking import Limits
from torchperf_ros.core.tune_space import Facts, Step
from torchperf_ros.core.tune_trial import CRASHED, HOPELESS, HUNG, MEASURED, REFUSED, Candidate, Trial

ADAPTER = "tune_adapters:TinyAdapter"
ROOT = Path(__file__).resolve().parents[2]
FACTS = Facts("id", cuda=False, machine="here", threads=1, cores=1)
PATIENCE_S = 90.0


@pytest.fixture(autouse=True)
def _trials_can_import_the_adapter(monkeypatch, tmp_path):
    here = [str(Path(__file__).parent), str(ROOT), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, here)))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


class Silent:
    def trying(self, tier, step): ...
    def says(self, text): ...
    def ended(self, trial, ranking, *, earlier): ...


class Space:
    """Stands in for a walk: these candidates in this order."""

    def __init__(self, *candidates):
        self.trials, self._candidates = [], candidates

    def steps(self):
        yield from (Step("test", one) for one in self._candidates)

    def hopeless_ratio(self):
        return 1e6

    @property
    def ranking(self):
        from torchperf_ros.core.tune_ranking import Ranking

        return Ranking(self.trials, Limits(1e4))


def tried(tmp_path, space, *, options=None, tiers=("big",), timeout_s=PATIENCE_S):
    subject = Subject(ADAPTER, options or {}, "cpu")
    state = TuneState(tmp_path / "state.jsonl", "key", resume=True)
    search = TuneSearch(
        subject, FACTS, Limits(1e4), state, seconds=0.02, timeout_s=timeout_s,
        until_s=time.monotonic() + 10 * PATIENCE_S, view=Silent(),
    )  # fmt: skip
    search.run(space, tiers)
    return search.trials


def precision(name, engine="eager"):
    return Candidate(BuildOptions(engine, precision=name))


def test_given_a_good_candidate_when_tried_then_it_is_measured_next_to_eager(tmp_path):
    (trial,) = tried(tmp_path, Space(precision("bf16")))
    assert trial.outcome == MEASURED, trial.reason
    figures = trial.figures
    assert 0 < figures.p50_ms <= figures.p95_ms <= figures.max_ms
    assert figures.eager_p50_ms > 0
    assert figures.samples >= 30
    assert 0 < figures.relative_l2 < 0.05
    assert figures.memory_mb > 50
    assert figures.compile_s == 0


def test_given_one_that_segfaults_when_tried_then_it_is_noted_and_the_next_one_is_tried(tmp_path):
    crashed, next_one = tried(tmp_path, Space(precision("bf16"), Candidate()), options={"crash_in": "bf16"})
    assert crashed.outcome == CRASHED
    assert "SIGSEGV" in crashed.reason
    assert next_one.outcome == MEASURED


def test_given_one_that_hangs_when_tried_then_it_is_killed_and_noted_after_the_timeout(tmp_path):
    (trial,) = tried(tmp_path, Space(precision("bf16")), options={"hang_in": "bf16"}, timeout_s=12.0)
    assert trial.outcome == HUNG
    assert "12 s" in trial.reason
    assert "comparing" in trial.reason
    assert not _processes_of("trial_main")


def test_given_one_with_wrong_results_when_tried_then_it_is_refused_with_the_figures(tmp_path):
    (trial,) = tried(tmp_path, Space(precision("bf16")), options={"wrong_in": "bf16"})
    assert trial.outcome == REFUSED
    assert "relative L2" in trial.reason
    assert trial.figures is None


def test_given_one_that_cannot_be_made_when_tried_then_it_is_refused_with_the_reason(tmp_path):
    (trial,) = tried(tmp_path, Space(Candidate(BuildOptions(cuda_graphs=True))))
    assert trial.outcome == REFUSED
    assert "CUDA" in trial.reason


def test_given_a_hopeless_one_when_tried_then_it_ends_after_the_first_look(tmp_path, monkeypatch):
    space = Space(precision("bf16"))
    monkeypatch.setattr(space, "hopeless_ratio", lambda: 1e-6)
    (trial,) = tried(tmp_path, space)
    assert trial.outcome == HOPELESS
    assert "the limit is 1e-06" in trial.reason


def test_given_engine_compile_and_sizes_when_tried_then_buckets_run_and_compiling_is_counted(tmp_path):
    bucketed = Candidate(BuildOptions("compile", dynamic="never"), threads=2, shapes="bucket", bucket_width=16)
    (trial,) = tried(tmp_path, Space(bucketed), options={"sizes": True})
    assert trial.outcome == MEASURED, trial.reason
    assert trial.figures.compile_s > 0


def test_given_engine_aoti_when_tried_then_its_package_is_measured_and_leaves_nothing_behind(tmp_path, monkeypatch):
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    (trial,) = tried(tmp_path, Space(precision("fp32", "aoti")))
    assert trial.outcome == MEASURED, trial.reason
    assert trial.figures.compile_s > 0
    assert list(folder.glob("torchperf_*")) == []


def test_given_other_tiers_when_searched_then_the_best_of_the_first_is_checked_on_them(tmp_path):
    trials = tried(tmp_path, Space(precision("bf16")), tiers=("big", "small"))
    assert [(one.tier, one.candidate.options.precision) for one in trials] == [
        ("big", "bf16"), ("small", "bf16"), ("small", "fp32"),
    ]  # fmt: skip


def test_given_a_state_when_searched_again_then_nothing_is_run_twice(tmp_path):
    touched = tmp_path / "built"
    options = {"touch": str(touched)}
    first = tried(tmp_path, Space(Candidate(), precision("bf16")), options=options)
    built = len(touched.read_bytes())
    assert tried(tmp_path, Space(Candidate(), precision("bf16")), options=options) == first
    assert len(touched.read_bytes()) == built


def test_given_a_hang_when_there_is_more_time_now_then_it_is_tried_again(tmp_path):
    state = TuneState(tmp_path / "state.jsonl", "key", resume=True)
    state.add(Trial("big", Candidate(), HUNG, "no end", None, 5.0, 5.0))
    again = TuneState(tmp_path / "state.jsonl", "key", resume=True)
    assert again.find("big", Candidate(), 5.0).outcome == HUNG
    assert again.find("big", Candidate(), 6.0) is None
    assert again.find("small", Candidate(), 5.0) is None


def test_given_a_state_of_something_else_or_cut_off_when_read_then_the_rest_is_found(tmp_path):
    path = tmp_path / "state.jsonl"
    TuneState(path, "other", resume=True).add(Trial("big", Candidate(), CRASHED, "x"))
    TuneState(path, "key", resume=True).add(Trial("big", precision("bf16"), CRASHED, "x"))
    with path.open("a") as file:
        file.write('{"key": "key", "trial": {"ti')
    state = TuneState(path, "key", resume=True)
    assert list(state.of_tier("big")) == [precision("bf16")]
    state.add(Trial("big", precision("fp16"), CRASHED, "x"))
    assert set(TuneState(path, "key", resume=True).of_tier("big")) == {precision("bf16"), precision("fp16")}
    assert not TuneState(path, "key", resume=False).of_tier("big")


def test_given_many_states_when_another_is_opened_then_the_oldest_are_removed(tmp_path):
    folder = tmp_path / "tune"
    folder.mkdir()
    for number in range(70):
        (folder / f"{number}.jsonl").touch()
        os.utime(folder / f"{number}.jsonl", (number, number))
    assert default_path(tmp_path, "new") == folder / "new.jsonl"
    assert sorted(int(path.stem) for path in folder.iterdir()) == list(range(6, 70))


def test_given_an_adapter_when_asked_then_the_facts_are_those_of_all_tiers():
    facts = ask_facts(Subject(ADAPTER, {"sizes": True}, "cpu"), ("big", "small"))
    assert facts.ranges == ((2, 32),)
    assert facts.left_out["channels_last"] == "no two-dimensional convolution"
    assert facts.cuda is False
    assert facts.identity != ask_facts(Subject(ADAPTER, {"sizes": True}, "cpu"), ("big",)).identity


def test_given_an_adapter_that_cannot_be_used_when_asked_then_the_reason_is_said():
    with pytest.raises(AdapterError, match="colour"):
        ask_facts(Subject(ADAPTER, {"colour": 1}, "cpu"), ("big",))
    with pytest.raises(AdapterError, match="'huge'"):
        ask_facts(Subject(ADAPTER, {}, "cpu"), ("big", "huge"))


def run(*arguments):
    """The command in a process of its own."""
    command = [sys.executable, "-m", "torchperf_ros.cli", "tune", "--seconds", "0.05", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def _processes_of(word):
    """Ids of this process's children's processes whose command line has the word."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if word in path.read_text() and f"PPid:\t{os.getpid()}\n" in (path.parent / "status").read_text():
                found.append(path.parent.name)
    return found


def test_given_one_that_crashes_when_tuned_then_the_table_says_so_and_the_node_takes_the_file(tmp_path):
    out, figures = tmp_path / "tuned.yaml", tmp_path / "figures.json"
    done = run(
        "--adapter", ADAPTER, "--tiers", "big,small", "--engine", "eager", "--budget-ms", 2000,
        "--options", '{"crash_in": "bf16"}', "-o", out, "--json", figures,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (stage,) = read_params_file(out).stages
    assert (stage.name, stage.adapter, stage.output) == ("tiny", ADAPTER, "tiny_output")
    assert (stage.tiers, stage.engine, stage.budget_ms) == (("big", "small"), "eager", 2000.0)
    assert stage.options == {"crash_in": "bf16"}
    report = json.loads(figures.read_text())
    assert report["complete"] is True
    outcomes = {
        one["candidate"]["options"]["precision"]: one["outcome"]
        for one in report["tiers"]["big"]["ranking"]
        if one["candidate"]["threads"] == report["reference_threads"]
    }
    assert outcomes["fp32"] == MEASURED
    if "bf16" not in report["left_out"]:
        assert outcomes["bf16"] == CRASHED
        assert "SIGSEGV" in done.stdout


def test_given_a_run_that_was_killed_when_run_again_then_it_goes_on(tmp_path):
    state = tmp_path / "state.jsonl"
    arguments = ["--adapter", ADAPTER, "--tiers", "big", "--engine", "eager", "--state", str(state)]
    command = [sys.executable, "-m", "torchperf_ros.cli", "tune", "--seconds", "0.05", *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True) as process:
        give_up_at = time.monotonic() + PATIENCE_S
        while not (state.exists() and state.read_text().endswith("\n")) and time.monotonic() < give_up_at:
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    kept = state.read_text()
    assert kept
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    assert state.read_text().startswith(kept)
    assert "from an earlier run" in done.stdout


def test_given_ctrl_c_when_tuning_then_what_was_measured_is_shown_and_kept(tmp_path):
    state, out = tmp_path / "state.jsonl", tmp_path / "tuned.yaml"
    command = [sys.executable, "-m", "torchperf_ros.cli", "tune", "--adapter", ADAPTER, "--tiers", "big",
               "--engine", "eager", "--options", '{"hang_in": "bf16"}', "--state", str(state), "-o", str(out),
               "--seconds", "0.05"]  # fmt: skip
    facts = ask_facts(Subject(ADAPTER, {}, "cpu"), ("big",))
    if "bf16" in facts.left_out:
        pytest.skip(facts.left_out["bf16"])
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        give_up_at = time.monotonic() + PATIENCE_S
        while not state.exists() and time.monotonic() < give_up_at:
            time.sleep(0.05)
        time.sleep(1.0)  # until the next one has begun
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert "Ctrl-C" in said
    assert "eager, " in said
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["--adapter", "--params"]),
        (["--adapter", "nonsense"], ["'nonsense'", "module:Class"]),
        (["--adapter", ADAPTER, "--budget-ms", "-3"], ["--budget-ms", "-3", "above 0"]),
        (["--adapter", ADAPTER, "--max-error", "nan"], ["--max-error", "nan"]),
        (["--adapter", ADAPTER, "--engine", "jit"], ["'jit'", "eager, compile, aoti"]),
        (["--adapter", ADAPTER, "--options", "[]"], ["options", "[]"]),
        (["--adapter", ADAPTER, "--device", "tpu"], ["'tpu'", "cuda:N"]),
        (["--adapter", ADAPTER, "--tiers", "a,,b"], ["tiers"]),
        (["--adapter", ADAPTER, "--tiers", "big", "--tier", "huge"], ["'huge'", "big"]),
        (["--adapter", ADAPTER, "-o", "/nowhere/tuned.yaml"], ["/nowhere/tuned.yaml", "existing folder"]),
        (["--params", "/nowhere/params.yaml"], ["/nowhere/params.yaml", "cannot be read"]),
        (["--params", "config/perception.yaml"], ["--stage", "perception, planning"]),
        (["--params", "config/perception.yaml", "--stage", "map"], ["'map'", "perception, planning"]),
    ],
)
def test_given_bad_input_when_tuned_then_one_line_says_what_would_be_right(arguments, words, monkeypatch):
    monkeypatch.chdir(ROOT)
    result = CliRunner().invoke(cli.app, ["tune", *arguments])
    assert result.exit_code == 2, result.output
    assert result.output.startswith("torchperf: ")
    assert len(result.output.strip().splitlines()) == 1
    for word in words:
        assert word in result.output


def test_given_an_adapter_that_is_not_there_when_tuned_then_the_status_is_2():
    done = run("--adapter", "no_such_module:Adapter")
    assert done.returncode == 2
    assert "no_such_module" in done.stderr
    assert "Traceback" not in done.stderr


def test_given_help_when_asked_then_neither_torch_nor_rich_s_tables_are_loaded_by_the_other_commands():
    code = "import sys; from torchperf_ros import cli; assert 'torch' not in sys.modules, 'torch'"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


FOUND = Candidate(BuildOptions("compile", "max-autotune", precision="bf16", channels_last=True), threads=4)


def test_given_a_base_when_written_then_the_node_takes_the_whole_with_only_the_tuned_stage_changed(tmp_path):
    base = tmp_path / "base.yaml"
    base.write_text(
        """
/**/perf:
  ros__parameters:
    stages: [perception, lanes]
    metrics_port: 0
    cpu_affinity: [0, 1]
    perception: {budget_ms: 33.0, fallback: [hold_last], tiers: [full, fast]}
    lanes:
      adapter: 'my_robot.lanes:Lanes'
      options: '{"on": "it''s"}'
      output: lanes
      tiers: ['on', fast]
      shapes: bucket
      common_shapes: ['1x3x8x8']
      packages: [/p/a.pt2, /p/b.pt2]
""",
        encoding="utf-8",
    )
    target = target_of_file(base, "perception", {"budget_ms": 1500.0}, None)
    text = tuned_parameters(target.node, target.stage, FOUND, {"full": "bf16"}, 3, ["a remark"])
    out = tmp_path / "tuned.yaml"
    out.write_text(text, encoding="utf-8")
    before, after = read_params_file(base), read_params_file(out)
    assert text.startswith("# a remark\n")
    assert (after.metrics_port, after.cpu_affinity, after.worker_threads) == (0, (0, 1), 4)
    assert after.stages[1] == before.stages[1]
    tuned = after.stages[0]
    assert (tuned.engine, tuned.compile_mode, tuned.channels_last) == ("compile", "max-autotune", True)
    assert (tuned.tiers, tuned.precision) == (("full", "fast"), ("bf16", "fp32"))
    assert (tuned.budget_ms, tuned.hang_ms, tuned.fallback) == (1500.0, 1500.0, before.stages[0].fallback)


def test_given_ready_packages_when_tuned_then_they_are_refused(tmp_path):
    base = tmp_path / "base.yaml"
    base.write_text("perf: {ros__parameters: {perception: {packages: [/p/a.pt2]}}}", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"/p/a\.pt2"):
        target_of_file(base, "perception", {}, None)


@pytest.mark.parametrize(
    ("adapter", "stage", "expected"),
    [
        ("torchperf_ros.models.camera:CameraAdapter", None, ("perception", "detections", 2)),
        ("torchperf_ros.models.planner:PlannerAdapter", None, ("planning", "trajectory", 2)),
        ("my_robot.lanes:LaneNetAdapter", None, ("lane_net", "lane_net_output", 1)),
        ("my_robot.lanes:LaneNetAdapter", "perception", ("perception", "detections", 2)),
        ("my_robot.lanes:LaneNetAdapter", "lanes", ("lanes", "lanes_output", 1)),
    ],
)
def test_given_an_adapter_when_written_then_stage_and_output_are_what_one_would_expect(
    adapter, stage, expected, tmp_path
):
    target = target_of_adapter(adapter, stage, ["full", "fast"], {"output": None}, "auto")
    out = tmp_path / "tuned.yaml"
    out.write_text(tuned_parameters(target.node, target.stage, FOUND, {}, 4, []), encoding="utf-8")
    node = read_params_file(out)
    name, output, count = expected
    (tuned,) = [one for one in node.stages if one.name == name]
    assert (tuned.adapter, tuned.output, len(node.stages)) == (adapter, output, count)
    assert node.worker_threads == 0


def test_given_what_is_the_default_when_written_then_the_tuned_stage_says_it_all_the_same():
    target = target_of_adapter("torchperf_ros.models.camera:CameraAdapter", None, ["full"], {}, "auto")
    text = tuned_parameters(target.node, target.stage, Candidate(BuildOptions("aoti")), {}, 1, [])
    for name in ("adapter", "output", "tiers", "engine", "compile_mode", "precision", "channels_last", "shapes"):
        assert f"\n      {name}: " in text
