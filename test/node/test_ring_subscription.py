"""Triggers that are taken straight into memory of the stage's, with a real publisher and executor."""

import ctypes
import itertools

import pytest

pytest.importorskip("rclpy")

from rclpy.executors import SingleThreadedExecutor
from rclpy.qos import DurabilityPolicy, QoSProfile
from rclpy.serialization import serialize_message
from std_msgs.msg import String

from torchperf_ros.node import ring_subscription
from torchperf_ros.node.ring_subscription import RingSubscription, TakeError, Taker, checked_taker

from .perf_process import DOMAIN_ID

pytestmark = pytest.mark.ros
_TOPICS = itertools.count()


class Stream:
    """A publisher and a subscription of one node, with slots in a buffer of 200 bytes."""

    def __init__(self, node, taker):
        qos = QoSProfile(depth=10, durability=DurabilityPolicy.TRANSIENT_LOCAL)
        topic = f"/taken_{next(_TOPICS)}"
        self.memory = bytearray(200)
        self.has_slot, self.taken, self.failures = True, [], []
        self.publisher = node.create_publisher(String, topic, qos)
        subscription = node.create_subscription(String, topic, self.take, qos, raw=True)
        self.subscription = subscription
        self.waitable = RingSubscription(node, subscription, taker, self.slot, self.failures.append)
        self.executor = SingleThreadedExecutor(context=node.context)
        self.executor.add_node(node)

    def slot(self):
        return memoryview(self.memory) if self.has_slot else None

    def take(self, data):
        self.taken.append((type(data), bytes(data)))

    def tell(self, text):
        """Publish a text, and take it; what came, and whether the memory holds it."""
        data, count = bytes(serialize_message(String(data=text))), len(self.taken)
        self.publisher.publish(data)
        for _ in range(200):
            self.executor.spin_once(timeout_sec=0.05)
            if len(self.taken) > count:
                break
        assert [taken for _, taken in self.taken[count:]] == [data]
        return self.taken[-1][0], self.memory[: len(data)] == data


@pytest.fixture
def stream(stranger):
    made = Stream(stranger, checked_taker(DOMAIN_ID))
    yield made
    made.executor.shutdown()


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
    stream.publisher.publish(String(data="lost"))
    for _ in range(200):
        stream.executor.spin_once(timeout_sec=0.05)
        if stream.failures:
            break
    assert stream.failures == ["rcl_take_serialized_message returned 1 and 0 bytes"]
    stream.subscription.handle.take_message(String, True)  # which was not taken
    assert stream.tell("by rclpy") == (bytes, False)
    stream.executor.shutdown()


def test_given_structs_of_another_layout_when_checked_then_it_is_refused(monkeypatch):
    swapped = type(
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
    monkeypatch.setattr(ring_subscription, "_Array", swapped)
    with pytest.raises(TakeError, match="laid out in another way"):
        Taker()


def test_given_a_library_that_is_not_there_when_checked_then_it_is_refused(monkeypatch):
    def load(name):
        msg = f"{name}: cannot open shared object file"
        raise OSError(msg)

    monkeypatch.setattr(ctypes, "CDLL", load)
    with pytest.raises(TakeError, match="rcl is not found"):
        Taker()


def test_given_messages_that_are_not_taken_as_rclpy_does_when_checked_then_it_is_refused(monkeypatch):
    monkeypatch.setattr(Taker, "take", lambda *_: b"something else")
    with pytest.raises(TakeError, match="was not taken as rclpy takes it"):
        checked_taker(DOMAIN_ID)
