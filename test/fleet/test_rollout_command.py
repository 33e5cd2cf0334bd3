"""The commands, from a key to a roll-back, on files as people have them."""

import datetime
import json
import math
import re
import shutil
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from torchperf_ros.fleet.plan import RolloutStep, bucket_percent, plan_text, read_plan_file, utc_now
from torchperf_ros.fleet.records import RecordWriter
from torchperf_ros.fleet.signature import read_public_key, read_signed
from torchperf_ros.fleet.status import next_move
from torchperf_ros.tools.main import app

from .conftest import minute

VEHICLES, MINUTES = 24, 150
NEW = ("new", "--stage", "perception", "--version", "7")


def run(*words, status=0):
    done = CliRunner().invoke(app, ["rollout", *map(str, words)], env={"COLUMNS": "200"})
    assert done.exit_code == status, done.output
    return done.output


@pytest.fixture(scope="module")
def signed(tmp_path_factory):
    """Keys, and a plan that was signed a day and a half ago."""
    folder = tmp_path_factory.mktemp("signed")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        (folder / "detector.pt2").write_bytes(b"abc")
        run("keygen")
        given = ("--set", "engine=eager", "--set", "packages=[detector.pt2]", "--file", "detector.pt2")
        run(*NEW, "-o", "plan.yaml", *given)
        plan = read_plan_file(folder / "plan.yaml")
        begun = utc_now() - datetime.timedelta(hours=36)
        (folder / "plan.yaml").write_text(plan_text(replace(plan, issued=begun, step_since=begun)))
        run("sign", "plan.yaml")
    (folder / "drive.yaml").write_text(plan_text(replace(plan, unit="drive")))
    return folder


@pytest.fixture
def desk_folder(signed, tmp_path, monkeypatch):
    """A copy of it, where the commands run."""
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(signed, tmp_path, dirs_exist_ok=True)


def read(folder):
    return read_signed(
        (folder / "plan.json").read_bytes(), read_public_key(folder / "rollout.key.pub"), "x"
    )


def bring_home(folder, factor=1.0, rolled_back=0, step=0, vehicles=VEHICLES, of=("", ""), node=""):
    """What vehicles wrote in the last hours.

    The candidate's times are the base's by a factor, and a bit of noise.
    """
    now_s = utc_now().timestamp()
    for number in range(vehicles):
        home = folder / "home" / f"car-{number}" / node / "_".join(of)
        log = RecordWriter(home, {"vehicle": f"car-{number}", "gpu": "orin"})
        for at in range(MINUTES):
            noise = 1 + 0.01 * ((7 * number + 3 * at) % 11 - 5)
            log.minute(
                replace(
                    minute("shadow", t_s=now_s - 3600 - 60 * (MINUTES - at)),
                    step=step,
                    drive=f"{node}{at // 30}",
                    base_sum_ms=1800 * 20.0,
                    candidate_sum_ms=1800 * 20.0 * factor * noise,
                    base_p99_ms=30.0,
                    candidate_p99_ms=30.0 * factor * noise,
                    base_misses=2,
                    candidate_misses=2,
                    compared=60,
                    agreed=60,
                    score=0.98 if at % 2 else math.nan,
                    refused=at == 7,
                    deaths=0,
                    stage=of[0],
                    rollout=of[1],
                )
            )
        if not number:
            log.event("refused", "", 1, "plan plan.json: has serial 1")
        if number < rolled_back:
            log.event("rolled_back", "7", 1, "worker_deaths 2 is over its limit 1", *of)
    return folder / "home"


def test_given_a_candidate_that_is_as_good_when_advanced_then_the_next_plan_is_signed_only_with_write(
    desk_folder,
):
    home = bring_home(desk_folder)
    before = read(desk_folder)
    assert before.files == {
        "detector.pt2": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    }
    shown = run("status", home, "--plan", "plan.json", "--json", "out.json", "--html", "out.html")
    assert "advance: every figure is within its margin" in shown
    assert "- car-0 refused the plan: plan plan.json: has serial 1" in shown
    figures = json.loads((desk_folder / "out.json").read_text())
    assert (figures["vehicles"], figures["move"]) == (VEHICLES, "advance")
    first = {name: figures["steps"][0][name] for name in ("refused", "deaths", "score")}
    assert first == {"refused": VEHICLES, "deaths": 0, "score": pytest.approx(0.98)}
    assert figures["steps"][1]["score"] is None
    assert re.search(r"^> 0 +1 +shadow +24 +60.0 +0.0 +24 +0 +0.980 *$", shown, re.M)
    assert "plans refused" in (desk_folder / "out.html").read_text()
    assert {one["metric"]: one["verdict"] for one in figures["findings"]} == dict.fromkeys(
        ("latency", "p99", "misses", "disagreement"), "equivalent"
    )
    assert "in margins" in (desk_folder / "out.html").read_text()
    assert "nothing was written" in run("advance", "plan.json", home)
    assert read(desk_folder) == before
    run("advance", "plan.json", home, "--write")
    after = read(desk_folder)
    assert (after.serial, after.step, after.share) == (before.serial + 1, 1, 1.0)
    assert "step 1 has lasted 0.0 h; it has to last 24 h" in run("advance", "plan.json", home, status=1)
    assert "step 2 of 5" in run("advance", "plan.json", home, "--force")


def test_given_a_worse_candidate_when_advanced_then_it_is_refused_and_rollback_takes_it_back(desk_folder):
    home = bring_home(desk_folder, factor=1.06)
    assert "rollback: latency is worse: +6" in run("status", home, "--plan", "plan.json", status=1)
    assert "does not advance; --force goes on all the same" in run("advance", "plan.json", home, status=1)
    assert read(desk_folder).state == "running"
    assert "wrote plan" not in run("rollback", "plan.json", "--key", "rollout.key.pub", status=2)
    run("rollback", "plan.json", "--write")
    assert (read(desk_folder).state, read(desk_folder).revoked) == ("rolled_back", ("7",))
    shown = " ".join(run("advance", "plan.json", home, "--force", status=1).split())
    assert (
        "the roll-out is rolled back; another try of this version needs a plan of another `name`" in shown
    )


@pytest.mark.parametrize(
    "other", [("planning", "planning-7"), ("perception", "the first try"), ("planning", "perception-7")]
)
def test_given_another_stage_or_roll_out_of_the_version_when_looked_at_then_it_is_left_out_and_named(
    desk_folder, other
):
    """Its candidate is worse, has broken a guard, and drove at other steps."""
    home = bring_home(desk_folder, factor=1.5, rolled_back=9, step=1, of=other)
    bare = run("advance", "plan.json", home, status=1)
    assert "hold: no vehicle brought anything home of version 7: no data is no verdict" in bare
    assert "step 0 has 0.0 h of driving with the candidate; it needs 10 h" in bare
    bring_home(desk_folder, of=("perception", "perception-7"))
    shown = run("status", home, "--plan", "plan.json", "--json", "out.json")
    assert "advance: every figure is within its margin" in shown
    left_out = (
        f"{VEHICLES * MINUTES} minutes of version 7 of other roll-outs: {other[1]} of stage {other[0]}"
    )
    assert left_out in " ".join(shown.split())
    figures = json.loads((desk_folder / "out.json").read_text())
    assert (figures["vehicles"], figures["rolled_back"]) == (VEHICLES, {})
    assert [step["vehicles"] for step in figures["steps"][:2]] == [VEHICLES, 0]


def test_given_a_hard_guard_that_broke_when_forced_then_it_is_still_refused(desk_folder):
    home = bring_home(desk_folder, rolled_back=2)
    shown = run("advance", "plan.json", home, "--force", "--write", status=1)
    shown = " ".join(shown.split())
    assert (
        "2 of 24 vehicles rolled it back, as car-0: worker_deaths 2 is over its limit 1; another" in shown
    )
    assert "needs a plan of another `name`, with the version under `again`" in shown
    assert "--force goes on" not in shown
    assert read(desk_folder).step == 0


@pytest.mark.parametrize("words", [(), ("home",)])
def test_given_a_plan_that_asks_for_nothing_when_advanced_without_a_record_then_no_data_is_no_verdict(
    desk_folder, words
):
    (desk_folder / "home").mkdir()
    plan = replace(read(desk_folder), steps=(RolloutStep(1), RolloutStep(100)), serial=2**31)
    (desk_folder / "plan.yaml").write_text(plan_text(plan))
    run("sign", "plan.yaml")
    for step in (0, 1):
        shown = run("advance", "plan.json", *words, "--write", status=1)
        assert "hold: no vehicle brought anything home of version 7: no data is no verdict" in shown
        assert (read(desk_folder).step, read(desk_folder).state) == (step, "running")
        run("advance", "plan.json", "--write", "--force")  # who owns the plan may know more
    assert (read(desk_folder).step, read(desk_folder).state) == (1, "done")


def test_given_too_few_vehicles_when_a_step_asks_for_nothing_then_it_is_only_passed_and_done_needs_a_verdict(
    desk_folder,
):
    plan = replace(read(desk_folder), steps=(RolloutStep(1), RolloutStep(100)), serial=2**31)
    (desk_folder / "plan.yaml").write_text(plan_text(plan))
    run("sign", "plan.yaml")
    few = bring_home(desk_folder, vehicles=3)
    shown = run("advance", "plan.json", few, "--write")
    assert "step 0 asks for no time and no exposure; there is no verdict" in shown
    shown = run("advance", "plan.json", few, "--write", status=1)
    assert "hold: not enough data: a verdict needs 10 vehicles, 3 brought some home" in shown
    shown = run("advance", "plan.json", bring_home(desk_folder), "--write")
    assert "every figure is within its margin" in shown
    assert read(desk_folder).state == "done"
    assert "rollback: 2 of" in run(
        "status", bring_home(desk_folder, rolled_back=2), "--plan", "plan.json", status=1
    )


def test_given_two_nodes_of_each_vehicle_and_a_clock_that_is_behind_when_looked_at_then_all_of_them_count(
    desk_folder,
):
    for node in ("front", "rear"):
        home = bring_home(desk_folder, node=node)
    refused = f"plan.json: is not valid yet: issued {read(desk_folder).issued:%Y-%m-%d %H:%M} UTC"
    RecordWriter(home / "past", {"vehicle": "past"}, clock=lambda: 0.0).event("refused", "", 1, refused)
    shown = run("status", home, "--plan", "plan.json")
    assert f"{2 * VEHICLES * MINUTES // 30}" in shown
    assert f"- past refused the plan: {refused}" in shown


@pytest.mark.parametrize("how", ["hold", "rollback"])
def test_given_another_operator_meanwhile_when_advance_has_judged_then_it_writes_nothing_over_that(
    desk_folder, monkeypatch, how
):
    def meanwhile(plan, standing):
        run(how, "plan.json")
        return next_move(plan, standing)

    monkeypatch.setattr("torchperf_ros.fleet.status.next_move", meanwhile)
    assert "was changed meanwhile" in run(
        "advance", "plan.json", bring_home(desk_folder), "--write", status=1
    )
    assert read(desk_folder).state == {"hold": "held", "rollback": "rolled_back"}[how]


def test_given_a_plan_that_no_vehicle_could_follow_when_signed_then_it_is_refused_and_nothing_is_written(
    desk_folder,
):
    draft = read_plan_file(desk_folder / "plan.yaml")
    (desk_folder / "plan.json").unlink()
    hour = datetime.timedelta(hours=1)
    for expires, said in ((utc_now() - hour, "is over, and vehicles refuse it"), (utc_now() + hour, "")):
        plan = replace(draft, issued=utc_now() - 2 * hour, step_since=utc_now() - 2 * hour, expires=expires)
        (desk_folder / "old.yaml").write_text(plan_text(plan))
        assert said in run("sign", "old.yaml", status=2 if said else 0)
        assert (desk_folder / "old.json").exists() is not bool(said)
    package = desk_folder / "detector.pt2"
    for change, said in (
        (lambda: package.write_bytes(b"abd"), "has SHA-256"),
        (package.unlink, "cannot be read (No such file or directory)"),
        (package.mkdir, "cannot be read (is a folder and no file)"),
    ):
        change()
        assert f"its file detector.pt2: {said}" in run("sign", "plan.yaml", status=2)
    assert not (desk_folder / "plan.json").exists()
    package.rmdir()
    package.write_bytes(b"abc")
    run("sign", "plan.yaml")


def test_given_a_vehicle_when_checked_then_its_role_is_said_for_signed_plans_and_drafts(desk_folder):
    name = next(f"car-{n}" for n in range(9999) if bucket_percent("perception-7", f"car-{n}") < 1)
    assert run("check", "plan.json", "--fact", f"vehicle={name}").startswith(
        f"shadow: vehicle {name} is in bucket 0."
    )
    assert run("check", "plan.yaml", "--fact", f"vehicle={name}").startswith("shadow: ")
    (desk_folder / "detector.pt2").write_bytes(b"abcd")
    assert "none: file" in run("check", "plan.json", "--fact", f"vehicle={name}")
    (desk_folder / "detector.pt2").write_bytes(b"abc")
    before_ns = desk_folder.stat().st_mtime_ns
    assert run("check", "plan.yaml", "--fact", f"vehicle={name}").startswith("shadow: ")
    # A file that comes and goes would change the time of the folder.
    assert desk_folder.stat().st_mtime_ns == before_ns


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ((*NEW, "-o", "b.yaml", "--set", "engine=warp"), "'warp' is not allowed"),
        ((*NEW, "-o", "plan.yaml"), "is there already; remove it, or name another file"),
        (("keygen",), "is there already"),
        (("keygen", "none/key"), "key none/key: cannot be written (No such file or directory)"),
        (
            (*NEW, "-o", "b.yaml", "--set", "engine=eager", "--file", "none.pt2"),
            "--file none.pt2: cannot be read (No",
        ),
        (("sign", "plan.yaml", "--key", "none"), "key none: cannot be read (No such file or directory)"),
        (
            ("check", "none.json", "--fact", "vehicle=car"),
            "plan none.json: cannot be read (No such file or directory)",
        ),
        (
            ("status", "home", "--plan", "plan.json", "--key", "none.pub"),
            "key none.pub: cannot be read (No such file",
        ),
        (("sign", "plan.json"), "would replace the input plan.json"),
        (("sign", "plan.yaml", "--key", "rollout.key.pub"), "is no private key"),
        (("check", "plan.json", "--fact", "vehicle= "), "the vehicle has no id"),
        (
            ("check", "plan.json", "--fact", "vehicle=car", "--fact", "colour=red"),
            "fact 'colour' is not known",
        ),
        (("check", "plan.json", "--fact", "vehicle=car", "--key", "plan.json"), "is no private key"),
        (("status", "none", "--plan", "plan.json"), "none: is not there"),
        (("hold", "plan.yaml", "--write"), "is not signed; `torchperf rollout sign plan.yaml` comes first"),
        (("simulate", "plan.yaml", "--candidate", "slow"), "there are same: no difference"),
        (("simulate", "plan.yaml", "--runs", "none.parquet"), "cannot be read"),
        (("simulate", "plan.json"), "plan plan.json: is no .yaml; simulate takes a plan as"),
        (("simulate", "drive.yaml"), "plan drive.yaml: draws by drive, which is not simulated"),
        (
            ("check", "plan.json", "--vehicle", "car"),
            "--vehicle: there is no such option any more; write `--f",
        ),
        (
            ("simulate", "plan.yaml", "--candidate", "worse=101"),
            "'worse=101': 101 is not allowed; it has to be 0",
        ),
        (("candidate", "fly"), "action 'fly' does not exist; allowed: start, serve, back, end"),
        (("candidate", "start"), "start needs the candidate's file"),
        (("candidate", "start", "none.yaml"), "candidate none.yaml is not there"),
        (("candidate", "serve", "plan.yaml"), "serve takes no file"),
    ],
)
def test_given_input_that_cannot_be_used_when_run_then_one_line_says_what_and_the_status_is_2(
    desk_folder, words, match
):
    shown = run(*words, status=2)
    assert match in shown
    assert shown.count("\n") == 1


def test_given_a_plan_when_simulated_then_both_ways_are_shown_drawn_and_written(desk_folder):
    words = ("--candidate", "crashing", "--vehicles", "1500", "--svg", "out.svg")
    shown = run("simulate", "plan.yaml", *words)
    assert re.search("in steps +all at once", shown)
    had = re.search(r"vehicles that had it, % +([0-9.]+) +([0-9.]+)", shown)
    assert float(had[1]) < 3 < float(had[2])
    assert "</svg>" in (desk_folder / "out.svg").read_text()


@pytest.mark.parametrize(
    ("content", "status", "said"),
    [
        ({"kind": "regress", "status": 0, "verdict": "nothing is worse"}, 0, "gate gate.json: open"),
        (
            {"kind": "regress", "status": 1, "verdict": "1 worse: p99"},
            1,
            "gate.json: nothing is signed: 1 worse: p99",
        ),
        ({"targets": [{"what": "a", "value": 1, "relation": "<=", "limit": 2, "met": True}]}, 0, "open"),
        (
            {"targets": [{"what": "hits", "value": None, "relation": "<=", "limit": 2, "met": False}]},
            1,
            "nothing is signed: hits is None, the target <= 2",
        ),
        ({"scenario": "cut_in", "seed": 3, "collision": False}, 0, "open"),
        (
            {"scenario": "cut_in", "seed": 3, "collision": True},
            1,
            "nothing is signed: cut_in, seed 3: a collision",
        ),
        ({"targets": []}, 1, "it has no targets"),
        ({"figures": {}}, 2, "is no JSON of `torchperf compare -o`"),
        ([], 2, "is no JSON of"),
    ],
)
def test_given_a_gate_when_signed_then_nothing_is_unless_it_is_open(desk_folder, content, status, said):
    (desk_folder / "plan.json").unlink()
    (desk_folder / "gate.json").write_text(json.dumps(content))
    output = run("sign", "plan.yaml", "--gate", "gate.json", status=status)
    assert said in " ".join(output.split())
    assert (desk_folder / "plan.json").exists() is (status == 0)


def test_given_a_plan_that_was_rolled_back_when_its_draft_is_signed_again_then_the_older_serial_replaces_nothing(
    desk_folder,
):
    run("rollback", "plan.json", "--write")
    before = (desk_folder / "plan.json").read_bytes()
    said = run("sign", "plan.yaml", status=2)
    assert "is older than" in said
    assert "write a greater serial into plan.yaml" in said
    assert (desk_folder / "plan.json").read_bytes() == before
    run("sign", "plan.yaml", "-o", "other.json")
    draft = replace(read_plan_file(desk_folder / "plan.yaml"), serial=2**31, version="8")
    for changes in ({}, {"revoked": ("7",)}, {"again": ("7",)}):
        (desk_folder / "next.yaml").write_text(plan_text(replace(draft, **changes)))
        said = run("sign", "next.yaml", "-o", "plan.json", status=0 if changes else 2)
        assert changes or "plan.json takes 7 back, and a vehicle that was away" in said
