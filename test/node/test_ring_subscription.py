"""Triggers that are taken into the stage's memory, with a real publisher and the receiver's thread."""

import ctypes
import itertools
import threading

import pytest

pytest.importorskip("rclpy")

from rclpy.callback_groups import ReentrantCallbackGroup
from rclpy.executors import SingleThreadedExecutor
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy
from rclpy.serialization import serialize_message
from rclpy.waitable import NumberOfEntities, Waitable
from std_msgs.msg import String

from torchperf_ros.node import ring_subscription
from torchperf_ros.node.ring_subscription import Receiver, RingSubscription, TakeError, Taker, checked_taker

from ..stage.conftest import wait_until
from .perf_process import DOMAIN_ID

_TOPICS = itertools.count()


class Stream:
    """A publisher and a subscription of one node, with slots in a buffer of 200 bytes."""

    def __init__(self, node, taker, reliability=ReliabilityPolicy.RELIABLE):
        qos = QoSProfile(depth=10, durability=DurabilityPolicy.TRANSIENT_LOCAL, reliability=reliability)
        topic = f"/taken_{next(_TOPICS)}"
        self.node, self.memory = node, bytearray(200)
        self.has_slot, self.taken, self.failures = True, [], []
        self.publisher = node.create_publisher(String, topic, qos)
        self.subscription = node.create_subscription(String, topic, self.take, qos, raw=True)
        self.own = RingSubscription(node, taker, self.failures.append, self.subscription, self.slot)

    def slot(self):
        return memoryview(self.memory) if self.has_slot else None

    def take(self, data, _info):
        self.taken.append((type(data), bytes(data)))
        if data is not None and b"boom" in bytes(data):
            raise ValueError("boom")

    def tell(self, text):
        """Publish a text, and take it; what came, and whether the memory holds it."""
        data, count = bytes(serialize_message(String(data=text))), len(self.taken)
        self.publisher.publish(data)
        wait_until(lambda: len(self.taken) > count, lambda: "what was published")
        assert [taken for _, taken in self.taken[count:]] == [data]
        return self.taken[-1][0], self.memory[: len(data)] == data


class Received:
    """Streams of one node with the thread that receives for them."""

    def __init__(self, *streams):
        self.streams, self.failed = streams, []
        node = streams[0].node
        self.receiver = Receiver(node.context, [one.own for one in streams], lambda: self.failed.append(1))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.receiver.close()
        for one in self.streams:
            one.node.destroy_subscription(one.subscription)


@pytest.fixture
def stream(stranger):
    made = Stream(stranger, checked_taker(DOMAIN_ID))
    with Received(made):
        yield made


def test_given_a_slot_when_messages_come_then_they_are_in_it_and_else_they_come_as_bytes(stream):
    assert stream.tell("into the slot") == (memoryview, True)
    stream.has_slot = False
    assert stream.tell("not into the slot") == (bytes, False)
    stream.has_slot = True
    assert stream.tell("larger than the slot " * 20) == (bytes, False)
    assert stream.tell("into the slot again") == (memoryview, True)
    assert stream.failures == []


class Failing:
    """A function of rcl that reports an error."""

    def __call__(self, *_):
        return 1


def test_given_an_error_of_rcl_when_a_message_comes_then_it_is_said_and_those_that_follow_come_by_rclpy(
    stranger, monkeypatch
):
    load = ctypes.CDLL

    def load_with_an_error(name):
        library = load(name)
        if name == "librcl.so":
            library.rcl_take_serialized_message = Failing()
        return library

    monkeypatch.setattr(ctypes, "CDLL", load_with_an_error)
    stream = Stream(stranger, Taker())
    with Received(stream):
        stream.publisher.publish(String(data="first"))
        wait_until(lambda: stream.failures, lambda: "the error")
        assert stream.failures == ["rcl_take_serialized_message returned 1 and 0 bytes"]
        # what was not taken is there still
        wait_until(lambda: stream.taken, lambda: "what was not taken")
        assert stream.tell("by rclpy") == (bytes, False)
        assert len(stream.failures) == 1


def test_given_two_triggers_when_one_fails_in_its_stage_then_both_are_received_on(stranger):
    first, second = (Stream(stranger, Taker()) for _ in range(2))
    with Received(first, second) as both:
        first.tell("boom")
        wait_until(lambda: both.failed, lambda: "the error")
        assert first.tell("well again") == (memoryview, True)
        assert second.tell("never ill") == (memoryview, True)
        assert len(both.failed) == 1


class Rounds(Waitable):
    """Counts how often an executor begins to wait."""

    def __init__(self, node):
        super().__init__(ReentrantCallbackGroup())
        self.count = 0
        node.add_waitable(self)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        """Nothing to let go of."""

    def get_num_entities(self):
        return NumberOfEntities()

    def add_to_wait_set(self, _):
        self.count += 1

    def is_ready(self, _):
        return False


@pytest.mark.parametrize("reliability", [ReliabilityPolicy.BEST_EFFORT, ReliabilityPolicy.RELIABLE])
def test_given_a_trigger_when_messages_come_then_the_nodes_executor_sleeps_on(stranger, reliability):
    stream = Stream(stranger, Taker(), reliability)
    executor, rounds = SingleThreadedExecutor(context=stranger.context), Rounds(stranger)
    executor.add_node(stranger)
    with Received(stream):
        stream.tell("the first")
        waiting = threading.Thread(target=executor.spin_once, kwargs={"timeout_sec": 1.0})
        waiting.start()
        wait_until(lambda: rounds.count, lambda: "the executor waits")
        for number in range(30):
            stream.tell(f"number {number}")
        woken = rounds.count
        waiting.join()
    executor.shutdown()
    stranger.remove_waitable(rounds)
    assert woken < 20


SWAPPED = type(
    "_Array",
    (ctypes.Structure,),
    {
        "_fields_": (
            ("buffer", ctypes.c_void_p),
            ("capacity", ctypes.c_size_t),
            ("length", ctypes.c_size_t),
            ("allocator", ring_subscription._Allocator),
            ("guard", ctypes.c_uint64),
        )
    },
)


def not_there(name):
    msg = f"{name}: cannot open shared object file"
    raise OSError(msg)


@pytest.mark.parametrize(
    ("owner", "name", "value", "check", "why"),
    [
        (ring_subscription, "_Array", SWAPPED, Taker, "laid out in another way"),
        (ctypes, "CDLL", not_there, Taker, "rcl is not found"),
        (
            Taker,
            "take",
            lambda *_: b"something else",
            lambda: checked_taker(DOMAIN_ID),
            "was not taken as rclpy takes it",
        ),
    ],
    ids=["structs of another layout", "no library", "not as rclpy takes it"],
)
def test_given_what_is_not_as_the_taker_needs_it_when_checked_then_it_is_refused(
    monkeypatch, owner, name, value, check, why
):
    monkeypatch.setattr(owner, name, value)
    with pytest.raises(TakeError, match=why):
        check()
