"""Publishing bytes without what rclpy does around it."""

import pytest

pytest.importorskip("rclpy")

from rclpy.node import Node
from std_msgs.msg import Float64, String

from torchperf_ros.node.endpoints import OUTPUT_QOS, RawPublisher
from torchperf_ros.telemetry.latency_record import float64_bytes

pytestmark = pytest.mark.ros


def test_given_bytes_when_published_raw_then_they_arrive_and_rclpy_does_nothing_around_it(graph, stranger, monkeypatch):
    heard = graph.listen("/raw/number", Float64)
    publisher = RawPublisher(stranger.create_publisher(Float64, "/raw/number", OUTPUT_QOS))
    assert publisher.topic_name == "/raw/number"
    graph.wait_for(lambda: publisher.publisher.get_subscription_count() > 0, "a subscription")
    monkeypatch.setattr("rclpy.publisher.Publisher.publish", None)
    publisher.publish(float64_bytes(1.5))
    graph.wait_for(lambda: heard, "the number")
    assert [message.data for message in heard] == [1.5]


def test_given_a_publisher_that_is_destroyed_when_publishing_then_it_raises(stranger: Node):
    publisher = RawPublisher(stranger.create_publisher(String, "/raw/gone", OUTPUT_QOS))
    stranger.destroy_publisher(publisher.publisher)
    with pytest.raises(Exception, match="invalid|destroy"):
        publisher.publish(b"\0\1\0\0")
