import os

import psutil

from torchperf_ros.telemetry.memory import ProportionalMemory


def pretend(proc, pid, kib):
    (proc / str(pid)).mkdir(exist_ok=True)
    text = f"55e1-7ffc ---p 00000000 00:00 0 [rollup]\nRss:  {2 * kib} kB\nPss:  {kib} kB\nPss_Dirty: 1 kB\n"
    (proc / str(pid) / "smaps_rollup").write_text(text)


def test_given_this_process_when_read_then_it_is_what_the_system_says():
    (size,) = ProportionalMemory().sample([os.getpid()], 0.0).values()
    assert 0.8 < size / psutil.Process().memory_full_info().pss < 1.25


def test_given_several_processes_when_sampled_each_second_then_one_is_read_at_a_time_and_each_seldom(tmp_path):
    for pid in (1, 2, 3):
        pretend(tmp_path, pid, 100 * pid)
    memory = ProportionalMemory(tmp_path, every_s=10.0)
    assert [len(memory.sample([1, 2, 3], float(second))) for second in range(4)] == [1, 2, 3, 3]
    pretend(tmp_path, 1, 500)
    assert memory.sample([1, 2, 3], 9.0)[1] == 100 << 10
    assert memory.sample([1, 2, 3], 10.0) == {1: 500 << 10, 2: 200 << 10, 3: 300 << 10}


def test_given_a_process_that_cannot_be_read_or_is_gone_when_sampled_then_the_others_are_told(tmp_path):
    pretend(tmp_path, 2, 7)
    memory = ProportionalMemory(tmp_path)
    assert memory.sample([1, 2], 0.0) == {}
    assert memory.sample([1, 2], 1.0) == {2: 7 << 10}
    assert memory.sample([1], 2.0) == {}
    assert memory.sample([], 3.0) == {}
