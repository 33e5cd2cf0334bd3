"""A stage's trigger, taken from the middleware straight into the stage's ring.

rclpy copies a message into memory of its own and then into `bytes`, and the stage copies these into its
ring. `rcl_take_serialized_message` takes a message into memory that the caller owns: of a 1280x720 image
that saves two of four copies, 0.7 of 1.7 ms of processor time. It is called by ctypes, which lets other
threads run meanwhile.
"""

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import rclpy
from rclpy.callback_groups import MutuallyExclusiveCallbackGroup
from rclpy.context import Context
from rclpy.impl.implementation_singleton import rclpy_implementation
from rclpy.node import Node
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy
from rclpy.serialization import serialize_message
from rclpy.subscription import Subscription

from torchperf_ros.api.clock import NS_PER_S
from torchperf_ros.api.errors import TorchperfError

_TAKE_FAILED = 401  # RCL_RET_SUBSCRIPTION_TAKE_FAILED: there is no message any more
_CHECKED_BYTES, _CHECK_S = 1000, 1.0
_INFO_WORDS = 32  # `rmw_message_info_t` has 8 of them, the first of which is the time of publication
_LOOK_NS = NS_PER_S // 10  # whether to end
_AGAIN_S = 0.1
_OTHER_DOMAINS = (101, 100)  # the last of those whose ports no system gives to others
_POINTERS = ("allocate", "deallocate", "reallocate", "zero_allocate", "state")
Slot = Callable[[], memoryview | None]
_Reallocate = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


class TakeError(TorchperfError):
    """Messages cannot be taken into memory of one's own; the message says why."""


class _Allocator(ctypes.Structure):
    """`rcutils_allocator_t`."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in _POINTERS)


class _Array(ctypes.Structure):
    """`rcutils_uint8_array_t`, which is also `rcl_serialized_message_t`."""

    _fields_ = (
        ("buffer", ctypes.c_void_p),
        ("length", ctypes.c_size_t),
        ("capacity", ctypes.c_size_t),
        ("allocator", _Allocator),
        ("guard", ctypes.c_uint64),
    )


class Taker:
    """Takes messages by `rcl_take_serialized_message`; one thread at a time.

    Attributes:
        info: of the message that was taken last; the first word is when it was published, in ns.
    """

    def __init__(self) -> None:
        """Find the functions, and make sure that the structs are laid out as they are here.

        Raises:
            TakeError: another version of rcl, or none that can be found.
        """
        try:
            rcl, self._rcutils, self._libc = (
                ctypes.CDLL("librcl.so"),
                ctypes.CDLL("librcutils.so"),
                ctypes.CDLL(None),
            )
            self._take = rcl.rcl_take_serialized_message
            self._rcutils.rcutils_get_default_allocator.restype = _Allocator
            self._init, default = (
                self._rcutils.rcutils_uint8_array_init,
                self._rcutils.rcutils_get_default_allocator(),
            )
        except (OSError, AttributeError) as error:
            raise TakeError(f"rcl is not found: {error}") from error
        self._take.argtypes = (ctypes.c_void_p,) * 4
        self._libc.malloc.restype, self._libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
        self._libc.free.argtypes = (ctypes.c_void_p,)
        self._init.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
        array = _Array(guard=_CHECKED_BYTES)
        done = self._init(ctypes.byref(array), _CHECKED_BYTES, ctypes.byref(default))
        found = (done, array.length, array.capacity, array.guard, bytes(array.allocator))
        self._rcutils.rcutils_uint8_array_fini(ctypes.byref(array))
        if found != (0, 0, _CHECKED_BYTES, _CHECKED_BYTES, bytes(default)):
            raise TakeError(f"rcl's structs are laid out in another way: {found[:4]}")
        self._array = _Array(allocator=default)
        self.info = (ctypes.c_int64 * _INFO_WORDS)()
        self._larger = _Reallocate(lambda _old, size, _state: self._libc.malloc(size))
        self._array.allocator.reallocate = ctypes.cast(self._larger, ctypes.c_void_p).value

    def take(self, handle: Any, slot: memoryview) -> memoryview | bytes | None:  # noqa: ANN401 - rclpy's
        """The next message.

        The part of the slot that it takes, or bytes if it is larger; None if there is none.

        Raises:
            TakeError: rcl reports an error.
        """
        array, own = self._array, ctypes.addressof(ctypes.c_char.from_buffer(slot))
        array.buffer, array.length, array.capacity = own, 0, len(slot)
        code = self._take(handle.pointer, ctypes.byref(array), self.info, None)
        larger = array.buffer if array.buffer != own else None
        try:
            if code == _TAKE_FAILED:
                return None
            if code or not array.buffer or array.length > array.capacity:
                raise TakeError(f"rcl_take_serialized_message returned {code} and {array.length} bytes")
            return slot[: array.length] if larger is None else ctypes.string_at(larger, array.length)
        finally:
            if code:
                self._rcutils.rcutils_reset_error()
            if larger:
                self._libc.free(larger)


def checked_taker(own_domain_id: int) -> Taker:
    """A taker that has taken two messages just as rclpy did, one of them larger than its slot.

    They pass in another domain than our own: topics that come and go at once can stay in other processes'
    lists.

    Raises:
        TakeError: it has not.
    """
    taker, context = Taker(), Context()
    rclpy.init(
        args=[], context=context, domain_id=next(each for each in _OTHER_DOMAINS if each != own_domain_id)
    )
    try:
        node = Node(
            "taken",
            context=context,
            use_global_arguments=False,
            enable_rosout=False,
            start_parameter_services=False,
        )
        _compare(node, taker)
        node.destroy_node()
    finally:
        context.try_shutdown()
    return taker


def _compare(node: Node, taker: Taker) -> None:
    from std_msgs.msg import String

    qos = QoSProfile(
        depth=4, reliability=ReliabilityPolicy.RELIABLE, durability=DurabilityPolicy.TRANSIENT_LOCAL
    )
    publisher, slot = node.create_publisher(String, "taken", qos), memoryview(bytearray(_CHECKED_BYTES))
    two = [node.create_subscription(String, "taken", lambda _: None, qos, raw=True) for _ in range(2)]
    for length in (_CHECKED_BYTES // 2, 2 * _CHECKED_BYTES):
        data = serialize_message(String(data="".join(chr(32 + n % 90) for n in range(length))))
        publisher.publish(data)
        mine = _soon(lambda: taker.take(two[0].handle, slot))
        theirs = _soon(lambda: two[1].handle.take_message(String, True))
        if (
            mine is None
            or theirs is None
            or (bytes(mine), taker.info[0]) != (theirs[0], theirs[1]["source_timestamp"])
        ):
            raise TakeError(f"a message of {len(data)} bytes was not taken as rclpy takes it")


def _soon(take: Callable[[], Any]) -> Any:  # noqa: ANN401 - what `take` gives
    """What it gives that is not None, which may take a moment on a machine that is full."""
    until = time.monotonic() + _CHECK_S
    while (found := take()) is None and time.monotonic() < until:
        time.sleep(0.001)
    return found


class RingSubscription:
    """Takes the messages of a raw subscription into slots, and hands them to its callback."""

    def __init__(
        self,
        node: Node,
        taker: Taker,
        failed: Callable[[str], None],
        subscription: Subscription,
        slot: Slot,
    ) -> None:
        """Take the subscription over: its callback gets bytes or a part of a slot, and the message's info.

        `slot` gives the memory for the next message, None if there is none now; `failed` is called with the
        reason when messages can only be taken by rclpy any more.
        """
        self.handle: Any = subscription.handle
        self._subscription, self._slot, self._failed = subscription, slot, failed
        self._taker: Taker | None = taker
        # A group that is busy for ever: no executor looks at what is in it.
        subscription.callback_group = group = MutuallyExclusiveCallbackGroup()
        group.add_entity(subscription)
        group.beginning_execution(subscription)
        # Who waits for its events wakes up with each message, and two wait sets may not share a reader. The
        # events report publishers that are less reliable than the subscription, or of another type, which
        # `InputWatch` reports.
        for handler in subscription.event_handlers:
            node.remove_waitable(handler)
            handler.destroy()
        subscription.event_handlers.clear()

    def receive(self) -> None:
        """Take the message that has come, if any, into the stage's slot if it has one, and hand it on."""
        slot = None if self._taker is None else self._slot()
        if slot is None or self._taker is None:
            if (found := self.handle.take_message(self._subscription.msg_type, True)) is not None:
                self._subscription.callback(*found)
            return
        try:
            taken = self._taker.take(self.handle, slot)
        except TakeError as error:
            self._taker = None
            self._failed(str(error))
        else:
            if taken is not None:
                self._subscription.callback(taken, {"source_timestamp": self._taker.info[0]})


class Receiver:
    """The thread that waits for the triggers of all stages, in the place of rclpy's executor.

    For each message the executor visits everything that the node has, in Python: 0.4 ms with one camera, and
    more with each. This thread waits for triggers only.
    """

    def __init__(
        self,
        context: Context,
        subscriptions: Sequence[RingSubscription],
        failed: Callable[[], None],
    ) -> None:
        """Start it; `failed` is called where a message could not be handed on, with the exception at hand."""
        self._context, self._failed, self._open = context, failed, True
        self._handles = contextlib.ExitStack()  # they are not destroyed while the thread waits for them
        # Those that are waited for, and by what; replaced as a whole.
        self._waits_for: tuple[tuple[RingSubscription, ...], Any] = (), None
        for one in subscriptions:
            self.add(one)
        self._thread = threading.Thread(target=self._run, name="receiver", daemon=True)
        self._thread.start()

    def add(self, one: RingSubscription) -> None:
        """Wait for this one, too, from the next wait on; no message of the others is lost by that."""
        self._handles.enter_context(one.handle)
        every = (*self._waits_for[0], one)
        wait_set = rclpy_implementation.WaitSet(len(every), 0, 0, 0, 0, 0, self._context.handle)
        self._waits_for = every, wait_set

    def _run(self) -> None:
        while self._open:
            try:
                self._wait()
            except Exception:  # the thread's boundary: the middleware failed, which may have ended
                self._failed()
                time.sleep(_AGAIN_S)

    def _wait(self) -> None:
        """Wait for messages, and hand on what has come."""
        subscriptions, wait_set = self._waits_for
        wait_set.clear_entities()
        for one in subscriptions:
            wait_set.add_subscription(one.handle)
        wait_set.wait(_LOOK_NS)
        for index, one in enumerate(subscriptions):
            if wait_set.is_ready("subscription", index):
                try:
                    one.receive()
                except Exception:  # one that fails must not keep the others' from their stages
                    self._failed()

    def close(self) -> None:
        """End the thread; then the subscriptions can be destroyed."""
        self._open = False
        self._thread.join()
        self._handles.close()
