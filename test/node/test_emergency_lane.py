"""The emergency lane in a real ROS graph.

It stops the vehicle whatever the workers do, until a person clears it.
"""

import math
import os
import signal
import time

import psutil
import pytest

pytest.importorskip("rclpy")

from builtin_interfaces.msg import Time
from nav_msgs.msg import Odometry, Path
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy, qos_profile_sensor_data
from rosgraph_msgs.msg import Clock
from sensor_msgs.msg import Image, LaserScan
from std_msgs.msg import Bool
from std_srvs.srv import Trigger

from torchperf_ros.api.outcome import Fallback, Outcome
from torchperf_ros.node.emergency_lane import EmergencyLane
from torchperf_ros.node.emergency_process import StopArea
from torchperf_ros.node.node import PerfNode
from torchperf_ros.node.versions import VersionsOnDemand
from torchperf_ros.safety.kept_latch import latch_file
from torchperf_ros.settings.config import node_config

from .perf_process import odometry

SPEED, DECELERATION = 10.0, 6.0
LANE = {
    "sensors": ["scan LaserScan x 3.5 z 0.5 timeout 0", "button Bool timeout 0"],
    "start_s": 600.0,
    "odometry_timeout_ms": 60_000.0,
    "scans": 2,
    "deceleration": DECELERATION,
}


def scan(distance_m=math.inf, *, beams=41):
    """A scan of the 80 degrees ahead: something that fills all of it at a distance, or nothing."""
    step = math.radians(80) / (beams - 1)
    message = LaserScan(
        angle_min=-math.radians(40),
        angle_max=math.radians(40),
        angle_increment=step,
        range_min=0.1,
        range_max=60.0,
        ranges=[float(distance_m)] * beams,
    )
    message.header.frame_id = "laser"
    return message


def braked_m(path):
    """How far a path leads."""
    xs = [pose.pose.position.x for pose in path.poses]
    assert xs == sorted(xs)
    return xs[-1] - xs[0]


BRAKED_M = pytest.approx(SPEED**2 / (2 * DECELERATION), abs=0.01)


class Vehicle:
    """A node with a planner and the lane, its sensors, and what it says."""

    def __init__(self, graph, start_node, obedient, orders, *, namespace=None, **parameters):
        stage = obedient(
            orders, adapter="ObedientPlanner", output="plan", backup="standby", hold_last_ms=60_000.0
        )
        given = {f"emergency.{name}": value for name, value in LANE.items()}
        self.node = start_node(
            {"stages": ["camera"], "camera": stage, **given, **parameters}, namespace=namespace
        )
        self.plans = graph.listen(f"{self.node.namespace}/plan", Path)
        self.node.wait_until_ready("camera")
        kinds = {"scan": LaserScan, "button": Bool, "odom": Odometry, "image": Image}
        self.topics = {name: self.node.publisher(name, kind) for name, kind in kinds.items()}
        self.clear()

    def send(self, topic, message):
        self.topics[topic].publish(message)

    def see(self, distance_m, times=2, **how):
        for _ in range(times):
            self.send("scan", scan(distance_m, **how))

    def clear(self):
        answer = self.node.call(Trigger, "clear_emergency", Trigger.Request())
        return answer.success, answer.message

    def all_is_well(self):
        """Have every sensor say so."""
        self.send("odom", odometry(SPEED))
        self.see(math.inf, times=1)
        self.send("button", Bool(data=False))

    def unlatch(self):
        """Clear the latch, as soon as the lane has heard that all is well."""

        def cleared():
            self.all_is_well()
            return self.clear() == (True, "cleared: the last stage's outputs are published again")

        self.node.wait_for(cleared, "the latch to be cleared")

    def drive(self):
        """Have it watch, at speed."""
        sent_s, reports = 0.0, self.node.reports  # of before: they say what was

        def watches():
            nonlocal sent_s
            if time.monotonic() - sent_s > 1.0:  # again: the lane's process may not have been there yet
                sent_s = time.monotonic()
                self.all_is_well()
            now = self.lane()
            said = now.get("state"), now.get("speed"), now.get("button pressed")
            watches = said == ("watching", f"{SPEED:.3f}", "no") and now["scan age_ms"] != "nan"
            return watches and self.node.reports > reports + 1

        self.node.wait_for(watches, "the lane to watch")
        self.plans.clear()
        self.node.anomalies.clear()

    def lane(self):
        return self.node.values("emergency")

    def lane_says(self, **what):
        """The lane's values as soon as they say this."""
        return self.node.wait_for(
            lambda: (now := self.lane()) and all(now[key] == value for key, value in what.items()) and now,
            str(what),
        )

    def next_plan(self):
        seen = len(self.plans)
        return self.node.wait_for(lambda: self.plans[seen:], "a path")[0]


@pytest.fixture(scope="module")
def refused(start_node, obedient):
    """A node whose lane would publish paths where its stage publishes points.

    It starts beside the other one.
    """
    return start_node({"stages": ["camera"], "camera": obedient(), "emergency.sensors": ["scan"]})


@pytest.fixture(scope="module")
def running(refused, graph, start_node, obedient, orders):
    return Vehicle(graph, start_node, obedient, orders)


@pytest.fixture
def vehicle(running):
    """The vehicle at speed, with nothing in its way and nothing latched."""
    if running.node.state() == "active":
        assert running.node.change_state("deactivate")
    running.all_is_well()
    running.node.wait_for(lambda: running.clear()[0], "nothing to be latched")
    assert running.node.change_state("activate")
    running.drive()
    return running


def test_given_an_obstacle_in_two_scans_then_the_stop_path_leads_to_standstill_until_it_is_cleared(
    vehicle, image
):
    vehicle.see(5.0, times=1)
    vehicle.see(math.inf)
    vehicle.see(5.0)
    path = vehicle.next_plan()
    assert path.header.frame_id == "odom"
    xs = [pose.pose.position.x for pose in path.poses]
    assert xs[0] >= 100.0
    assert xs[-1] - xs[0] == pytest.approx(SPEED**2 / (2 * DECELERATION), abs=0.01)
    assert xs == sorted(xs)
    begin, end = (
        pose.header.stamp.sec + pose.header.stamp.nanosec / 1e9 for pose in (path.poses[0], path.poses[-1])
    )
    assert end - begin == pytest.approx(SPEED / DECELERATION, abs=0.01)
    assert begin == pytest.approx(time.time(), abs=30.0)

    said = vehicle.lane_says(state="latched", triggers_obstacle="1")
    assert "scan shows 13 points" in said["reason"]
    assert float(said["reaction_ms"]) > 0
    assert vehicle.node.statuses["perf: emergency"][0] == 2
    vehicle.node.wait_for(lambda: vehicle.node.values("node")["health"] == "SAFE_STOP", "the node's health")
    told = vehicle.node.wait_for(
        lambda: [
            s for array in vehicle.node.anomalies for s in array.status if s.name == "node: emergency stop"
        ],
        "the alert",
    )
    assert "scan shows" in told[0].message

    # a frame is answered meanwhile, with the stop and not with its own result
    vehicle.plans.clear()
    withheld = int(vehicle.lane()["withheld"])
    row = vehicle.node.answer(vehicle.topics["image"], image())
    assert (row["outcome"], row["fallback"]) == (Outcome.ON_TIME, Fallback.STOP)
    vehicle.node.wait_for(lambda: int(vehicle.lane()["withheld"]) > withheld, "the output to be withheld")
    assert {plan.header.frame_id for plan in vehicle.plans} == {"odom"}
    assert len(vehicle.plans) > 2  # again and again

    done, why = vehicle.clear()
    assert not done
    assert why == "refused: scan still shows 13 points in the vehicle's way"
    vehicle.unlatch()
    assert vehicle.clear() == (True, "nothing was latched")
    vehicle.node.next_report()
    assert vehicle.lane()["state"] == "watching"
    assert vehicle.node.values("node")["health"] != "SAFE_STOP"
    vehicle.plans.clear()
    vehicle.node.answer(vehicle.topics["image"], image(width=48))
    vehicle.node.wait_for(lambda: vehicle.plans, "the plan")
    assert [(plan.header.frame_id, len(plan.poses)) for plan in vehicle.plans] == [("camera", 2)]


def test_given_messages_that_cannot_be_used_then_each_is_counted_with_a_reason_and_nothing_else_is_disturbed(
    vehicle, image
):
    before = int(vehicle.lane()["scan refused"])
    lengths = [scan(math.inf, beams=beams) for beams in (2, 400, 7)]
    broken = b"\0\1\0\0" + b"\xff" * 92
    for message in (
        scan(0.0),
        scan(0.0),
        scan(math.nan),
        scan(-1.0),
        b"\0\1\0\0" + bytes(8),
        *lengths,
        broken,
    ):
        vehicle.send("scan", message)
        assert vehicle.clear() == (
            True,
            "nothing was latched",
        )  # the lane takes what has arrived before it answers
    vehicle.send("odom", broken)
    said = vehicle.lane_says(**{"scan refused": str(before + 6), "odom refused": "1"})
    assert said["scan problem"].startswith("96 bytes are no sensor_msgs/LaserScan")
    assert (said["state"], said["errors"]) == ("watching", "0")
    assert vehicle.node.answer(vehicle.topics["image"], image())["outcome"] == Outcome.ON_TIME
    vehicle.node.wait_for(lambda: vehicle.plans, "the plan")
    assert all(plan.header.frame_id == "camera" for plan in vehicle.plans)


def test_given_a_lane_on_the_topic_of_another_type_when_configured_then_it_is_refused(refused):
    why = (
        "parameter emergency.output: 'point' is not allowed, as the last stage publishes"
        " geometry_msgs/msg/Point"
    )
    refused.wait_for(lambda: why in refused.errors, "the reason")
    assert refused.state() == "unconfigured"
    assert "Traceback" not in refused.errors  # of the lane's process, which was given no setup


def test_given_a_lane_that_is_killed_when_it_was_latched_then_another_one_is_latched_and_nothing_else_goes_out(
    vehicle, image
):
    vehicle.see(5.0)
    braking = vehicle.next_plan()
    (lane,) = vehicle.node.lanes()
    lane.kill()
    vehicle.node.graph.wait_for_end(lane)
    vehicle.plans.clear()
    assert vehicle.node.answer(vehicle.topics["image"], image())["fallback"] == Fallback.STOP
    said = vehicle.lane_says(state="latched", restarts="1")
    assert said["reason"].startswith("scan shows 13 points")
    assert int(said["pid"]) != lane.pid
    vehicle.node.prints("signal SIGKILL")
    vehicle.node.wait_for(lambda: len(vehicle.plans) > 3, "stop paths")
    assert all(plan == braking or braked_m(plan) == 0.0 for plan in vehicle.plans)
    vehicle.node.wait_for(lambda: braked_m(vehicle.plans[-1]) == 0.0, "the vehicle to stand")
    assert not vehicle.clear()[0]  # no sensor has been heard
    vehicle.unlatch()
    assert vehicle.lane_says(state="watching")


def test_given_an_area_when_paths_are_written_to_it_then_another_process_reads_the_last_or_that_nothing_is_latched():
    written = StopArea()
    read = StopArea(os.dup(written.fd))
    assert read.read() is None
    for number in range(40):
        path = bytes([number]) * (1000 + number)
        written.write(path)
        assert read.read() == path
    successor = StopArea(os.dup(written.fd))
    successor.write(None)
    assert (read.read(), successor.read()) == (None, None)
    successor.close()
    read.close()
    written.close()


class Alerts(list):
    """What the lane tells."""

    found = list.append


@pytest.fixture
def own_lane(graph):
    """Start a lane of a node in this process, with further options; gives that node and the lane."""
    from rclpy.node import Node
    from rclpy.parameter import Parameter

    started = []

    def start(name, *, simulated=False, overdue_ms=lambda: 0.0, **changed):
        given = {f"emergency.{key}": value for key, value in {**LANE, **changed}.items()}
        times = [Parameter("use_sim_time", value=True)] if simulated else []
        node = Node(name, context=graph.context, use_global_arguments=False, parameter_overrides=times)
        lane = EmergencyLane(node_config(given, {}))
        lane.connect(node, f"{name}_plan", "nav_msgs/msg/Path", Alerts(), overdue_ms)
        graph.executor.add_node(node)
        started.append((node, lane))
        return node, lane

    yield start
    for node, lane in started:
        lane.close()
        graph.executor.remove_node(node)
        node.destroy_node()


def says(lane, **what):
    """Whether the lane's status says this."""
    values = lane.status().values
    return all(values.get(key.replace("__", " ")) == value for key, value in what.items())


def test_given_simulated_time_when_the_lane_stops_the_vehicle_then_the_path_begins_at_that_time(
    graph, own_lane
):
    _, lane = own_lane("simulated", simulated=True)
    lane.activate()
    plans = graph.listen("simulated_plan", Path)
    topics = {
        name: graph.node.create_publisher(kind, name, 10)
        for name, kind in (("/clock", Clock), ("button", Bool))
    }
    graph.wait_for(lambda: all(topic.get_subscription_count() for topic in topics.values()), "the lane")
    graph.acquaint(Trigger, "simulated/clear_emergency", Trigger.Request())
    topics["/clock"].publish(Clock(clock=Time(sec=4711, nanosec=250_000_000)))
    assert graph.wait_for(lambda: says(lane, clock_s="4711.250"), "the clock")
    topics["button"].publish(Bool(data=True))
    path = graph.wait_for(lambda: list(plans), "a stop path")[0]
    assert (path.header.stamp.sec, path.header.stamp.nanosec) == (4711, 250_000_000)


def test_given_a_node_whose_stage_no_longer_answers_when_its_callbacks_still_run_then_it_hangs_all_the_same(
    graph, own_lane
):
    late_ms = [0.0]
    _, lane = own_lane("stuck", overdue_ms=lambda: late_ms[0])
    lane.activate()
    graph.wait_for(lambda: says(lane, state="watching"), "the lane to watch")
    late_ms[0] = 600.0
    graph.wait_for(lambda: says(lane, state="latched", triggers_silent="1"), "it to latch")
    assert lane.values()["reason"].startswith("the node hangs: it has not answered for 2.")


def test_given_a_node_that_a_person_ends_when_a_disk_hangs_then_the_lane_watches_no_more_by_then(
    graph, own_lane, monkeypatch
):
    _, lane = own_lane("ended")
    lane.activate()
    node = PerfNode(context=graph.context, use_global_arguments=False)
    node._lane = lane
    monkeypatch.setattr(
        VersionsOnDemand, "end", lambda _: graph.wait_for(lambda: says(lane, state="inactive"), "it")
    )
    node.close()
    node.destroy_node()


def test_given_a_lane_that_was_left_alone_when_it_has_stopped_the_vehicle_then_a_late_answer_is_withheld(
    graph, own_lane
):
    _, lane = own_lane("left")
    lane.activate()
    process = psutil.Process(int(lane.status().values["pid"]))
    lane.leave()
    graph.wait_for_end(process)  # 10 s, as there is no odometry
    assert lane.latched


KEPT = QoSProfile(depth=1, durability=DurabilityPolicy.TRANSIENT_LOCAL)
BUTTONS = {
    "kept": KEPT,
    "reliable": QoSProfile(depth=1),
    "unreliable": qos_profile_sensor_data,
    "kept_unreliable": QoSProfile(
        depth=1, durability=DurabilityPolicy.TRANSIENT_LOCAL, reliability=ReliabilityPolicy.BEST_EFFORT
    ),
}


def test_given_buttons_that_are_published_in_every_way_when_pressed_then_each_is_heard_and_counts_once(
    graph, own_lane
):
    """One that keeps its state is pressed before there is a lane.

    The lane's process dies while others are pressed.
    """
    buttons = {
        name: graph.node.create_publisher(Bool, f"button_{name}", qos) for name, qos in BUTTONS.items()
    }
    names = [f"button_{name}" for name in BUTTONS]
    buttons["kept"].publish(Bool(data=True))
    _, lane = own_lane("pressed", sensors=[f"{name} Bool timeout 0" for name in names])
    for name, button in buttons.items():
        least = 2 if name in {"kept", "reliable"} else 1
        graph.wait_for(
            lambda button=button, least=least: button.get_subscription_count() >= least,
            f"the lane to hear {name}",
        )
    graph.client(Trigger, "pressed/clear_emergency")
    graph.acquaint(Trigger, "pressed/clear_emergency", Trigger.Request())
    graph.wait_for(
        lambda: says(lane, button_kept__pressed="yes", state="inactive"), "the one that was pressed before"
    )
    lane.activate()
    graph.wait_for(lambda: says(lane, state="latched", reason="button_kept is true"), "it to latch")
    for name, button in buttons.items():
        button.publish(Bool(data=True))
        graph.wait_for(lambda: says(lane, **{f"button_{name}__pressed": "yes"}), f"{name} to be heard")  # noqa: B023
    graph.acquaint(
        Trigger, "pressed/clear_emergency", Trigger.Request()
    )  # the lane has taken the copies too
    values = lane.status().values
    assert [values[f"{name} messages"] for name in names] == ["2", "1", "1", "1"]

    kill_lane(lane)
    graph.wait_for(lambda: says(lane, restarts="1", state="latched"), "another process")
    assert all(says(lane, **{f"{name}__pressed": "yes"}) for name in names)
    graph.acquaint(Trigger, "pressed/clear_emergency", Trigger.Request())
    refused = "; ".join(f"{name} is true" for name in names)
    answer = graph.call(Trigger, "pressed/clear_emergency", Trigger.Request())
    assert (answer.success, answer.message.partition("; odom")[0]) == (False, f"refused: {refused}")


def kill_lane(lane):
    """Kill its process."""
    os.kill(int(lane.status().values["pid"]), signal.SIGKILL)


def test_given_no_descriptors_when_the_lane_is_to_be_replaced_then_it_is_tried_again_until_there_are_some(
    vehicle,
):
    """Without descriptors the node can make neither the socket nor the pipe that a process needs."""
    node, (lane,) = vehicle.node, vehicle.node.lanes()
    before = int(vehicle.lane()["restarts"])
    limits = node.process.rlimit(psutil.RLIMIT_NOFILE)
    node.process.rlimit(psutil.RLIMIT_NOFILE, (3, limits[1]))
    try:
        lane.kill()
        node.wait_for(lambda: int(vehicle.lane()["failed_starts"] or 0) > 1, "the node to try twice")
        level, text, _ = node.statuses["perf: emergency"]
        assert level == 2
        assert text.startswith("cannot be started: [Errno 24] Too many open files; tried ")
        assert node.values("node")["health"] == "SAFE_STOP"
        assert not node.lanes()
    finally:
        node.process.rlimit(psutil.RLIMIT_NOFILE, limits)
    vehicle.lane_says(state="watching", restarts=str(before + 1))
    assert len(node.lanes()) == 1
    node.graph.acquaint(Trigger, f"{node.name}/clear_emergency", Trigger.Request())


def test_given_a_node_that_hangs_when_it_drives_then_the_lane_stops_the_vehicle_and_it_stays_so_when_it_goes_on(
    vehicle, image
):
    vehicle.node.process.suspend()
    try:
        began_s = time.monotonic()
        path = vehicle.node.graph.wait_for(lambda: list(vehicle.plans), "a stop path")[0]
        assert time.monotonic() - began_s > 1.5  # a moment is none
    finally:
        vehicle.node.process.resume()
    assert braked_m(path) == BRAKED_M
    assert vehicle.lane_says(state="latched")["reason"].startswith(
        "the node hangs: it has not answered for 2."
    )
    assert vehicle.node.answer(vehicle.topics["image"], image())["fallback"] == Fallback.STOP
    vehicle.unlatch()
    assert vehicle.lane_says(state="watching")["restarts"] == vehicle.lane()["restarts"]


def test_given_signals_that_end_others_when_the_lane_and_the_node_get_them_then_the_lane_watches_on(
    vehicle,
):
    (lane,) = vehicle.node.lanes()
    assert os.getsid(lane.pid) == lane.pid
    for number in (
        signal.SIGHUP,
        signal.SIGINT,
        signal.SIGQUIT,
        signal.SIGTERM,
        signal.SIGUSR1,
        signal.SIGUSR2,
    ):
        lane.send_signal(number)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        vehicle.node.process.send_signal(number)
    vehicle.node.wait_for(
        lambda: "SIGUSR2 means nothing to this node" in vehicle.node.errors, "the node's word"
    )
    vehicle.node.next_report()
    assert vehicle.lane()["state"] == "watching"
    assert vehicle.node.lanes() == [lane]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGHUP, 0), (signal.SIGQUIT, -signal.SIGQUIT)])
def test_given_a_terminal_that_ends_when_the_node_drives_then_its_lane_stops_the_vehicle(
    graph, start_node, obedient, orders, tmp_path, number, status
):
    """The whole group gets the signal, as from a terminal that closes, or by Ctrl-\\ in it."""
    vehicle = Vehicle(graph, start_node, obedient, orders, recorder=True, evidence_dir=str(tmp_path))
    vehicle.drive()
    lanes = vehicle.node.lanes()
    os.killpg(os.getpgid(vehicle.node.process.pid), number)
    assert braked_m(graph.wait_for(lambda: list(vehicle.plans), "a stop path")[0]) == BRAKED_M
    assert vehicle.node.process.wait(200) == status
    graph.wait_for(lambda: braked_m(vehicle.plans[-1]) == 0.0, "the vehicle to stand")
    vehicle.send("odom", odometry(speed=0.0))
    graph.wait_for_end(*lanes)
    died = lambda: [path for path in tmp_path.iterdir() if "node-died" in path.name]  # noqa: E731
    if status:
        graph.wait_for(died, "what the recorder keeps of it")
    else:
        assert not died()


def test_given_every_worker_dead_when_an_obstacle_is_seen_then_the_vehicle_stops(vehicle):
    """After those whose frames need workers: it takes seconds until there are others."""
    vehicle.node.wait_for(lambda: len(vehicle.node.workers()) == 2, "both workers")
    lanes = vehicle.node.lanes()
    # those they are forked from, too
    children = [child for child in vehicle.node.children() if child not in lanes]
    for process in children:
        process.kill()
    vehicle.node.graph.wait_for_end(*children)
    vehicle.see(5.0)
    assert vehicle.next_plan().header.frame_id == "odom"
    assert not vehicle.node.workers()
    vehicle.unlatch()


def test_given_a_lane_that_does_not_answer_then_the_node_says_so_and_another_one_takes_its_place(vehicle):
    (lane,) = vehicle.node.lanes()
    restarts = int(vehicle.lane()["restarts"])
    lane.suspend()
    vehicle.node.wait_for(lambda: vehicle.lane()["state"] == "gone", "the node to notice")
    assert vehicle.node.statuses["perf: emergency"][0] == 2
    vehicle.lane_says(state="watching", restarts=str(restarts + 1))
    assert vehicle.node.lanes() != [lane]
    # the next test's request would be lost with a process that does not know its client yet
    vehicle.node.graph.acquaint(Trigger, f"{vehicle.node.name}/clear_emergency", Trigger.Request())


def test_given_a_node_that_is_killed_when_it_drove_then_its_lane_stops_the_vehicle_and_ends_when_that_stands(
    vehicle,
):
    (lane,) = vehicle.node.lanes()
    vehicle.node.process.kill()
    path = vehicle.node.graph.wait_for(lambda: list(vehicle.plans), "a stop path")[0]
    assert (path.header.frame_id, braked_m(path)) == ("odom", BRAKED_M)
    vehicle.send("odom", odometry(speed=0.0))
    vehicle.node.graph.wait_for_end(lane)


def test_given_a_node_that_is_killed_when_its_button_is_pressed_then_its_successor_is_latched_until_that_is_released(
    graph, start_node, obedient, orders, image
):
    first = Vehicle(graph, start_node, obedient, orders)
    first.drive()
    first.node.process.suspend()  # so that it dies before it has read what the lane says of it
    first.send("button", Bool(data=True))
    first.next_plan()
    file = latch_file(first.node.name)
    graph.wait_for(file.exists, "the latch on disk")
    lanes = first.node.lanes()
    first.node.process.kill()
    first.send("odom", odometry(speed=0.0))
    graph.wait_for_end(*lanes)
    first.node.clear_away()  # its clients: the next node of this name has to be acquainted with its own

    vehicle = Vehicle(graph, start_node, obedient, orders, namespace=first.node.namespace)
    said = vehicle.lane_says(state="latched")
    assert said["reason"].startswith("button is true (since 20")
    assert vehicle.node.answer(vehicle.topics["image"], image())["fallback"] == Fallback.STOP
    assert all(braked_m(plan) == 0.0 for plan in vehicle.plans)
    done, why = vehicle.clear()
    assert not done
    assert "button has not been heard yet: press and release it" in why
    vehicle.send("button", Bool(data=True))
    vehicle.unlatch()
    graph.wait_for(lambda: not file.exists(), "the latch to be gone from the disk")

    file.write_bytes(b"damaged")
    assert vehicle.node.change_state("deactivate")
    assert vehicle.node.change_state("cleanup")
    assert vehicle.node.change_state("configure")
    assert "is damaged" in vehicle.lane_says(state="latched")["reason"]
    file.unlink()
