import json
import re

from hypothesis import given
from hypothesis import strategies as st

from torchperf_ros.observe.telemetry.machine import (
    cpu_model,
    installed_mib,
    machine_facts,
    machine_now,
)


def proc(folder, cpu="Cortex-X9", kib=16_000_000):
    folder.mkdir()
    (folder / "cpuinfo").write_text(f"processor\t: 0\nmodel name\t: {cpu}\n", encoding="utf-8")
    (folder / "meminfo").write_text(f"MemTotal:       {kib} kB\nMemFree: 1 kB\n", encoding="utf-8")
    return folder


def test_given_this_machine_when_described_then_the_facts_are_json_and_the_same_every_time():
    facts, now = machine_facts(), machine_now("cpu")
    assert facts == machine_facts()
    assert facts.items() <= now.items()
    assert json.loads(json.dumps(now)) == now
    assert re.fullmatch("[0-9a-f]{16}", facts["fingerprint"])
    assert facts["cpu"]
    assert min(facts["cores"], facts["memory_mib"]) >= 1


def test_given_another_kernel_or_other_hardware_when_fingerprinted_then_only_the_hardware_counts(tmp_path):
    facts = machine_facts(proc=proc(tmp_path / "old", kib=16_300_000))
    assert facts == machine_facts(proc=proc(tmp_path / "new", kib=15_700_000))
    assert facts["memory_mib"] == 16 * 1024
    others = [proc(tmp_path / "cpu", cpu="Cortex-X1"), proc(tmp_path / "memory", kib=30_000_000)]
    prints = [machine_facts(proc=other)["fingerprint"] for other in others]
    prints.append(machine_facts("NVIDIA H100", tmp_path / "old")["fingerprint"])
    assert len({facts["fingerprint"], *prints}) == 4


def test_given_an_arm_board_when_its_processor_is_asked_for_then_the_boards_name_is_told(tmp_path):
    (tmp_path / "device-tree").mkdir()
    (tmp_path / "device-tree" / "model").write_bytes(b"NVIDIA Jetson AGX Orin\0")
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nCPU part\t: 0xd42\n", encoding="utf-8")
    assert cpu_model(tmp_path) == "NVIDIA Jetson AGX Orin"


@given(st.floats(min_value=2.0, max_value=1e8))
def test_given_any_memory_when_rounded_then_it_is_a_size_up_and_less_than_half_as_much_again(seen_mib):
    size = installed_mib(seen_mib)
    assert seen_mib <= size < seen_mib * 1.5 + 1
    assert installed_mib(size) == size


def test_given_a_process_whose_parent_was_killed_when_it_has_ended_then_what_it_used_is_own_work(
    python,
):
    """In a process of its own, which becomes the one that takes in orphans."""
    burn = "import time; print(flush=True)\nwhile time.process_time() < 0.5: pass"
    start = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    code = f"""
        import subprocess, sys
        from torchperf_ros.observe.telemetry.machine import ProcessorShare
        share = ProcessorShare()
        parent = subprocess.Popen([sys.executable, "-c", {start!r}, {burn!r}], stdout=subprocess.PIPE)
        parent.stdout.readline()
        parent.kill()
        parent.wait()
        parent.stdout.read()  # until the one that burns has ended
        others, stolen = share.taken()
        print(share._signals._own_ticks() >= 50, 0.0 <= others <= 1.0, 0.0 <= stolen <= 1.0)
    """
    assert python(code).split() == ["True"] * 3
