"""What the machine says of itself, from files as the kernel writes them; once from the real ones."""

import math
import os
from types import SimpleNamespace

import pytest

from torchperf_ros.api.alert import Level
from torchperf_ros.observe.telemetry.machine import Gpu, JetsonGpu, MachineSignals, Nvml, gpu_source
from torchperf_ros.observe.watch.watch import MachineWatch

NODE, WORKER, HOG, QUIET = 100, 101, 200, 300


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


class Kernel:
    """A /proc and a /sys of two processors, whose time passes when a test lets it."""

    def __init__(self, folder):
        self.proc, self.sys = folder / "proc", folder / "sys"
        self.ticks = [0] * 8  # user nice system idle iowait irq softirq steal
        names = {NODE: ("node", 1), WORKER: ("python", NODE), HOG: ("stress (ng)", 1), QUIET: ("quiet", 1)}
        self.processes = {pid: [name, parent, 0, 0] for pid, (name, parent) in names.items()}
        self.memory(1000, 600)
        self.pass_second()

    def memory(self, total_mib, available_mib):
        text = f"MemTotal: {total_mib * 1024} kB\nMemFree: 1 kB\nMemAvailable: {available_mib * 1024} kB\n"
        write(self.proc / "meminfo", text + "SwapTotal: 2048 kB\nSwapFree: 1024 kB\nHugePages_Total: 0\n")

    def pressure(self, name, some, full):
        rest = "avg60=0.00 avg300=0.00 total=1\n"
        write(self.proc / "pressure" / name, f"some avg10={some} {rest}full avg10={full} {rest}")

    def zone(self, number, name, celsius, **trips):
        folder = self.sys / "class" / "thermal" / f"thermal_zone{number}"
        write(folder / "type", f"{name}\n")
        write(folder / "temp", f"{round(1000 * celsius)}\n")
        for index, (kind, at) in enumerate(trips.items()):
            write(folder / f"trip_point_{index}_type", f"{kind}\n")
            write(folder / f"trip_point_{index}_temp", f"{1000 * at}\n")

    def pass_second(self, steal=0, **used):
        """A second of both processors, 200 ticks, of which each process (p100=...) used so many."""
        for word, ticks in used.items():
            self.processes[int(word[1:])][2] += ticks
        busy = sum(used.values())
        passed = [busy, 0, 0, 200 - busy - steal, 0, 0, 0, steal]
        self.ticks = [before + more for before, more in zip(self.ticks, passed, strict=True)]
        text = " ".join(map(str, self.ticks))
        write(self.proc / "stat", f"cpu  {text} 0 0\ncpu0 1 1 1 1\ncpu1 1 1 1 1\nintr 5\nctxt 7\n")
        for pid, (name, parent, ticks, reaped) in self.processes.items():
            rest = [0] * 40
            rest[0], rest[10], rest[12], rest[18] = parent, ticks, reaped, 5
            write(self.proc / str(pid) / "stat", f"{pid} ({name}) S {' '.join(map(str, rest))}\n")

    def signals(self):
        return MachineSignals(NODE, self.proc, self.sys)


@pytest.fixture
def kernel(tmp_path):
    return Kernel(tmp_path)


def test_given_a_second_when_read_then_others_are_who_is_not_of_the_nodes_family(kernel):
    signals = kernel.signals()
    kernel.pass_second(p100=10, p101=50, p200=100, steal=20)
    machine = signals.read()
    assert (signals.cpus, signals.memory_total_mib) == (2, 1000)
    assert (machine["cpu_percent"], machine["others_cpu_percent"], machine["steal_percent"]) == (90, 60, 10)
    assert (machine["memory_available_mib"], machine["swap_used_mib"]) == (600, 1)
    kernel.pass_second()
    assert signals.read()["others_cpu_percent"] == 0.0


def test_given_a_worker_that_ends_when_its_time_goes_to_its_parent_then_it_is_not_of_others(kernel):
    signals = kernel.signals()
    kernel.pass_second(p101=80)
    assert signals.read()["others_cpu_percent"] == 0.0
    kernel.processes[NODE][3] = 120  # what it had used, with another 40 ticks of this second
    del kernel.processes[WORKER]
    (kernel.proc / str(WORKER) / "stat").unlink()
    kernel.ticks[0] += 40
    kernel.pass_second()
    assert signals.read()["others_cpu_percent"] == 0.0


def test_given_others_when_looked_through_then_the_largest_are_named_and_interpreters_by_what_they_run(
    kernel,
):
    signals = kernel.signals()
    for pid, words in (
        (400, ["python3", "-W", "x", "-m", "build.all"]),
        (401, ["python3", "-O", "x", "/a/job.py"]),
    ):
        kernel.processes[pid] = ["python3", 1, 0, 0]
        write(kernel.proc / str(pid) / "cmdline", "\0".join(words) + "\0")
    kernel.pass_second()
    signals.scan()
    kernel.pass_second(p100=10, p200=90, p300=1, p400=30, p401=20)
    assert signals.scan() == [
        ("stress (ng)", 0.45),
        ("python3 -m build.all", 0.15),
        ("python3 job.py", 0.1),
    ]


def test_given_temperatures_and_pressure_when_read_then_they_are_told_by_name(kernel):
    kernel.zone(0, "cpu-thermal", 61.5, active=50, passive=95, critical=105)
    kernel.zone(1, "gpu-thermal", 50, critical=-274)
    kernel.pressure("memory", 20.0, 5.0)
    kernel.pressure("cpu", 40.0, 0.0)
    signals = kernel.signals()
    machine = signals.read()
    assert (machine["cpu-thermal_c"], machine["gpu-thermal_c"]) == (61.5, 50.0)
    assert signals.too_hot_c == {"cpu-thermal": 95.0}
    assert (machine["memory_pressure_percent"], machine["cpu_pressure_percent"]) == (5.0, 40.0)
    assert math.isnan(machine["io_pressure_percent"])


def test_given_this_machine_when_read_then_it_says_what_can_be():
    signals = MachineSignals(os.getpid())
    sum(range(2_000_000))
    machine = signals.read()
    assert signals.cpus >= 1
    assert 0 <= machine["memory_available_mib"] <= signals.memory_total_mib
    assert not machine["cpu_percent"] > 100.0001
    assert isinstance(signals.scan(), list)


# -- what of it is told


class Judged:
    """A watch over that machine; each second is judged as it passes."""

    def __init__(self, kernel, gpu=None):
        self.kernel, self.second = kernel, 0
        self.watch = MachineWatch(kernel.signals(), gpu or Gpu("none"))

    def judge(self, missed=0, harmed=False, **used):
        self.kernel.pass_second(**used)
        self.second += 1
        self.watch.read(float(self.second))
        return {found.name: found for found in self.watch.judge(float(self.second), missed, harmed=harmed)}


def test_given_others_when_deadlines_are_missed_then_the_load_is_told_with_names_and_else_it_is_not(kernel):
    judged = Judged(kernel)
    for _ in range(4):
        assert judged.judge(p200=142, p101=20) == {}  # nobody suffers
    found = judged.judge(missed=12, p200=142, p101=20)["machine: load"]
    text = (
        "other processes took 71% of the CPU (2 cores) while 12 frames had no own result in time: stress"
        " (ng) 71%"
    )
    assert found.message == text
    assert found.level is Level.WARN
    assert found.values["processes"] == "stress (ng) 71%"
    assert "machine: load" in judged.judge(missed=0, p200=142)
    assert judged.judge(missed=5, p101=190) == {}  # the node's own work


def test_given_misses_while_a_new_worker_starts_when_judged_then_others_are_not_blamed(kernel):
    judged = Judged(kernel)
    judged.judge()
    kernel.processes[102] = ["python", NODE, 0, 0]
    assert judged.judge(missed=5, p102=150) == {}
    assert judged.judge(missed=5, p102=150) == {}


def test_given_slower_answers_when_others_are_busy_then_that_is_the_cause(kernel):
    judged = Judged(kernel)
    judged.judge(p200=10)
    assert (
        "while answers took longer than usual"
        in judged.judge(harmed=True, p200=100)["machine: load"].message
    )


def test_given_memory_that_runs_out_when_it_lasts_then_it_is_told_and_worse_is_an_error(kernel):
    judged = Judged(kernel)
    kernel.memory(1000, 40)
    assert judged.judge() == {}
    found = judged.judge()["machine: memory"]
    assert (found.level, found.message) == (Level.WARN, "4.0% of the memory is left (40 MiB), since 1 s")
    kernel.memory(1000, 10)
    assert judged.judge()["machine: memory"].level is Level.ERROR
    kernel.memory(1000, 500)
    assert judged.judge() == {}
    kernel.pressure("memory", 60.0, 30.0)
    judged.judge()
    assert "waited for memory 30% of the time" in judged.judge()["machine: memory"].message


def test_given_a_zone_at_its_limit_when_it_lasts_then_it_is_told(kernel):
    kernel.zone(0, "gpu-thermal", 80, passive=95)
    judged = Judged(kernel)
    judged.judge()
    kernel.zone(0, "gpu-thermal", 97, passive=95)
    judged.judge()
    found = judged.judge()["machine: temperature of gpu-thermal"]
    assert found.message.startswith("gpu-thermal 97 C, slowed down from 95 C on")


class Card(Gpu):
    """A card that says what a test has it say."""

    def set(self, temperature_c, clock_mhz, used_mib, throttled=""):
        self.throttled = throttled
        values = {"temperature_c": temperature_c, "clock_mhz": clock_mhz, "memory_used_mib": used_mib}
        self.read = lambda: {f"gpu_{name}": value for name, value in (values | TOTAL).items()}
        return self


TOTAL = {"memory_total_mib": 8000.0}


def test_given_a_card_that_is_throttled_when_it_lasts_then_it_is_reported_with_the_reason(kernel):
    card = Card("a card").set(60.0, 1500.0, 4000.0)
    judged = Judged(kernel, card)
    assert judged.judge() == judged.judge() == {}
    card.set(84.0, 900.0, 7900.0, "thermal")
    assert judged.judge() == {}
    found = judged.judge()
    assert found["machine: gpu"].message.startswith("throttled (thermal), 84 C, 900 MHz")
    assert found["machine: gpu memory"].message.startswith("1.2% of the card's memory is left (100 MiB)")
    assert judged.watch.values["gpu_clock_mhz"] == 900.0


class NVMLError(Exception):
    """As pynvml has it."""


def refuses(*_):
    raise NVMLError


def nvml(cards):
    """The functions of pynvml that are asked, for cards that lack one of them."""
    return SimpleNamespace(
        NVMLError=NVMLError,
        NVML_TEMPERATURE_GPU=0,
        NVML_CLOCK_SM=1,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: cards,
        nvmlDeviceGetUUID=lambda card: f"GPU-{card}{card}{card}-abc",
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda card: f"card {card}",
        nvmlDeviceGetTemperature=lambda card, sensor: 84,
        nvmlDeviceGetClockInfo=refuses,
        nvmlDeviceGetUtilizationRates=lambda card: SimpleNamespace(gpu=50),
        nvmlDeviceGetMemoryInfo=lambda card: SimpleNamespace(used=1 << 30, total=1 << 33),
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda card: 0x20 | 0x4 | 0x1,
    )


def test_given_a_card_by_nvml_when_read_then_what_it_does_not_say_is_nan_and_a_power_cap_is_no_reason():
    source = Nvml(nvml(cards=2), 1, {})
    assert source.word == "card 1"
    card = source.read()
    assert (card["gpu_temperature_c"], card["gpu_used_percent"], card["gpu_memory_used_mib"]) == (
        84.0,
        50.0,
        1024.0,
    )
    assert math.isnan(card["gpu_clock_mhz"])
    assert (source.throttled, card["gpu_throttled"]) == ("thermal", 1.0)


@pytest.mark.parametrize(
    ("visible", "index", "card"),
    [
        (None, 1, 1),
        ("2,0", 0, 2),
        ("2, 0", 1, 0),
        ("GPU-222", 0, 2),
        ("0,GPU-11", 1, 1),
        ("MIG-7", 0, "MIG-7"),
    ],
)
def test_given_visible_devices_when_opened_then_it_is_the_card_that_cuda_means(visible, index, card):
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert Nvml(nvml(cards=3), index, environment).word == f"card {card}"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("VISIBLE_DEVICES", "0", "has no device 1"),
        ("VISIBLE_DEVICES", "0,GPU-9", "no card has that UUID"),
        ("DEVICE_ORDER", "FASTEST_FIRST", "there are 3 cards"),
    ],
)
def test_given_a_card_that_cannot_be_known_when_opened_then_the_error_says_why(name, value, said):
    with pytest.raises(LookupError, match=said):
        Nvml(nvml(cards=3), 1, {f"CUDA_{name}": value})


def test_given_no_card_when_asked_for_once_then_one_word_says_why(tmp_path):
    assert gpu_source("cpu").word == "not used"
    source = gpu_source("auto", tmp_path)
    if source.word.startswith("none:"):
        assert source.read() == {}


def test_given_a_jetson_when_asked_for_then_its_card_is_read_from_sysfs(tmp_path):
    folder = tmp_path / "class" / "devfreq" / "17000000.ga10b"
    write(folder / "cur_freq", "612000000\n")
    write(folder / "device" / "load", "425\n")
    source = gpu_source("auto", tmp_path)
    assert isinstance(source, JetsonGpu)
    assert source.read() == {"gpu_clock_mhz": 612.0, "gpu_used_percent": 42.5}
    assert folder.name in source.word
