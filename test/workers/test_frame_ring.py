import mmap
import os
import resource
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from torchperf_ros.api.errors import FrameOverwritten, ProtocolError
from torchperf_ros.workers.frame_ring import FrameReader, FrameRing, InputBytes, RingExtra, record_size

inputs_of_a_record = st.lists(
    st.builds(
        InputBytes,
        st.integers(0, 2**32 - 1),
        st.integers(-(2**63), 2**63 - 1),
        st.floats(allow_nan=False),
        st.binary(max_size=40),
        st.integers(0, 2**32 - 1),
    ),
    max_size=4,
)


def plain(inputs):
    return [(item.index, item.stamp_ns, item.age_ms, item.waited_us, bytes(item.data)) for item in inputs]


def page_faults():
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


def test_given_memory_made_ready_when_frames_are_written_then_none_of_them_waits_for_the_kernel():
    frame = [InputBytes(0, 0, 0.0, os.urandom(2_000_000))]
    ring = FrameRing(5 * 2_000_000)
    ring.make_ready(2_100_000)
    for _ in range(9):  # round and round
        before = page_faults()
        ring.write(1, frame)
        assert page_faults() - before < 50
        ring.make_ready()
    ring.close()


@pytest.fixture
def ring():
    made = FrameRing(1024)
    yield made
    made.close()


@settings(deadline=None)
@given(seq=st.integers(0, 2**64 - 1), inputs=inputs_of_a_record)
def test_given_any_inputs_when_written_then_they_are_read_as_they_were(seq, inputs):
    ring = FrameRing(1024)
    offset, length = ring.write(seq, inputs)
    assert length == record_size([len(item.data) for item in inputs])
    assert plain(FrameReader(ring.fd).read(offset, length, seq)) == plain(inputs)
    ring.close()


def test_given_a_record_when_read_then_its_data_are_views_and_not_copies(ring):
    offset, length = ring.write(0, [InputBytes(0, 1, 2.0, b"pixels")])
    (item,) = FrameReader(ring.fd).read(offset, length, 0)
    assert isinstance(item.data, memoryview)
    assert item.data.readonly


def test_given_a_record_when_newer_ones_reach_it_then_reading_it_and_asking_for_it_say_so(ring):
    reader = FrameReader(ring.fd)
    offset, length = ring.write(0, [InputBytes(0, 0, 0.0, bytes(400))])
    ring.write(1, [InputBytes(0, 0, 0.0, bytes(400))])
    reader.check(offset, 0)
    ring.write(2, [InputBytes(0, 0, 0.0, bytes(100))])
    for ask in (lambda: reader.check(offset, 0), lambda: reader.read(offset, length, 0)):
        with pytest.raises(FrameOverwritten, match="frame 0 was overwritten"):
            ask()


@pytest.mark.parametrize(
    ("less", "seq", "said"), [(0, 4, "holds frame 3, not 4"), (8, 3, "lengths beyond")]
)
def test_given_another_frame_or_a_shorter_length_when_read_then_it_is_refused(ring, less, seq, said):
    offset, length = ring.write(3, [InputBytes(0, 0, 0.0, bytes(64))])
    with pytest.raises(ProtocolError, match=said):
        FrameReader(ring.fd).read(offset, length - less, seq)


def test_given_a_record_just_as_large_as_the_ring_when_written_then_it_is_read(ring):
    data = bytes(1024 - record_size([0]))
    for seq in range(3):
        offset, length = ring.write(seq, [InputBytes(0, 0, 0.0, data)])
        assert len(FrameReader(ring.fd).read(offset, length, seq)[0].data) == len(data)


def test_given_a_writer_that_comes_round_while_a_record_is_parsed_then_it_counts_as_overwritten(ring):
    """The writer passes between the reader's first look and its parsing, which finds another frame."""
    reader = FrameReader(ring.fd)
    ring.write(0, [InputBytes(0, 0, 0.0, bytes(400))])
    offset, length = ring.write(1, [InputBytes(0, 0, 0.0, bytes(16))])
    look = reader.check
    passes = iter([True])

    def look_and_be_passed(offset, seq):
        look(offset, seq)
        if next(passes, False):
            for newer in (2, 3, 4):
                ring.write(newer, [InputBytes(0, 0, 0.0, b"\xff" * 600)])

    reader.check = look_and_be_passed
    with pytest.raises(FrameOverwritten):
        reader.read(offset, length, 1)


@pytest.mark.parametrize(("at", "value"), [(0, 0), (4, 2), (16, 4096)])
def test_given_memory_that_is_no_ring_of_this_version_when_mapped_then_it_is_refused(ring, at, value):
    os.pwrite(ring.fd, struct.pack("<I", value), at)
    with pytest.raises(ProtocolError, match="not a frame ring of version 1"):
        FrameReader(ring.fd)


def test_given_a_ring_when_used_then_it_says_how_much_memory_it_touched(ring):
    assert ring.used_bytes == 0
    _, length = ring.write(0, [InputBytes(0, 0, 0.0, bytes(100))])
    assert ring.used_bytes == length
    for seq in range(1, 20):
        ring.write(seq, [InputBytes(0, 0, 0.0, bytes(100))])
    assert ring.used_bytes == 6 * length  # where a seventh would not fit


def test_given_a_ring_when_closed_then_its_descriptor_is_gone_and_a_reader_keeps_its_memory():
    ring = FrameRing(1024)
    offset, length = ring.write(0, [InputBytes(0, 0, 0.0, b"kept")])
    reader = FrameReader(ring.fd)
    ring.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(ring.fd)
    assert bytes(reader.read(offset, length, 0)[0].data) == b"kept"


def test_given_a_writer_at_any_moment_of_its_writing_when_a_record_has_changed_then_asking_for_it_says_so(
    ring,
):
    reader = FrameReader(ring.fd)
    offset, length = ring.write(0, [InputBytes(0, 0, 0.0, b"\x55" * 400)])
    views = reader.read(offset, length, 0)
    before = plain(views)
    looks = []

    class Peeking(InputBytes):
        """Looks at the old record whenever the writer asks for the new one's bytes."""

        @property
        def data(self):
            changed = plain(views) != before or os.pread(ring.fd, 16, mmap.PAGESIZE + offset) != header
            try:
                reader.check(offset, 0)
            except FrameOverwritten:
                looks.append((changed, "gone"))
            else:
                looks.append((changed, "there"))
            return b"\xaa" * 400

        @data.setter
        def data(self, value):
            pass

    header = os.pread(ring.fd, 16, mmap.PAGESIZE + offset)
    ring.write(1, [InputBytes(0, 0, 0.0, bytes(400))])
    ring.write(2, [Peeking(n, 0, 0.0, b"") for n in range(2)])
    assert (True, "gone") in looks
    assert (True, "there") not in looks


def test_given_bytes_in_the_slot_when_written_then_they_stay_where_they_are_and_are_read_beside_the_others(
    ring,
):
    reader = FrameReader(ring.fd)
    assert ring.slot(2) is None  # the length of records is not known yet
    old = [(*ring.write(seq, [InputBytes(0, 0, 0.0, bytes([seq]) * 200)]), seq) for seq in range(3)]
    slot = ring.slot(2)
    assert len(slot) >= 150
    assert not reader.holds(old[0][0])  # its bytes may change from now on
    slot[:150] = b"\xaa" * 150
    views = [InputBytes(0, 5, 1.0, slot[:150]), InputBytes(1, 4, 2.0, b"other")]
    offset, length = ring.write(3, views)
    first, other = reader.read(offset, length, 3)
    assert (bytes(first.data), bytes(other.data)) == (b"\xaa" * 150, b"other")
    slot[0] = 0xBB  # the very same memory
    assert first.data[0] == 0xBB
    assert reader.read(*old[2][:2], 2)[0].data == bytes([2]) * 200
    slot.release()
    views.clear()


def write_some(ring, count, length=100):
    return [(*ring.write(seq, [InputBytes(0, 0, 0.0, bytes([seq]) * length)]), seq) for seq in range(count)]


def there(reader, records):
    """Of which records all bytes are still there."""
    held = [
        (seq, reader.read(offset, length, seq)) for offset, length, seq in records if reader.holds(offset)
    ]
    return [seq for seq, (item,) in held if bytes(item.data) == bytes([seq]) * 100]


def test_given_a_ring_that_keeps_seconds_when_more_comes_than_it_has_room_for_then_it_grows_as_far_as_it_may():
    ring, other, extra = FrameRing(1024, 8192), FrameRing(1024, 8192), RingExtra(2048)
    reader = FrameReader(ring.fd)
    ring.keep(1000.0, extra)
    other.keep(1000.0, extra)
    records = write_some(ring, 15)  # of 160 bytes each
    assert there(reader, records) == list(range(15))
    records = write_some(ring, 40)
    assert there(reader, records)[-1] == 39
    assert len(there(reader, records)) >= (1024 + 2048) // 160 - 1
    assert ring.used_bytes <= 1024 + 2048
    write_some(other, 40)
    assert ring.used_bytes + other.used_bytes <= 2 * 1024 + 2048
    for each in (ring, other):
        each.close()


def test_given_a_ring_that_keeps_seconds_when_what_it_holds_is_older_then_it_does_not_grow(monkeypatch):
    now_ns = [0]
    monkeypatch.setattr("torchperf_ros.workers.frame_ring.monotonic_ns", lambda: now_ns[0])
    ring = FrameRing(1024, 8192)
    ring.keep(1.0, RingExtra(8192))
    reader = FrameReader(ring.fd)
    records = []
    for seq in range(100):  # five a second
        now_ns[0] += 200_000_000
        records.append((*ring.write(seq, [InputBytes(0, 0, 0.0, bytes([seq]) * 100)]), seq))
        assert there(reader, records[-5:]) == list(range(seq + 1))[-5:]
    assert ring.used_bytes <= 1024
    ring.close()


def test_given_rounds_of_three_records_when_a_slot_is_given_out_then_the_two_records_before_it_are_there():
    ring = FrameRing(1 << 20, records=3)
    reader, written = FrameReader(ring.fd), []
    for seq in range(12):
        slot = ring.slot(1)
        data = b"x" * 80_000 if slot is None else slot[:80_000]
        written.append(ring.write(seq, [InputBytes(0, 0, 0.0, data)])[0])
        assert ring.slot(1) is not None
        assert all(map(reader.holds, written[-2:])) or seq < 4  # the first one comes without a slot
    assert ring.used_bytes <= 3.4 * 80_100
    ring.close()


class RingMachine(RuleBasedStateMachine):
    """Any sequence of records.

    Each is read as it was written, or known to be gone, and the newest is always there.
    """

    CAPACITY = 512
    SCALE = 1  # of what lengths are drawn

    def __init__(self):
        super().__init__()
        self.ring = self.make_ring()
        self.reader = FrameReader(self.ring.fd)
        self.written = []
        self.views = []
        self.slots = False

    def make_ring(self):
        return FrameRing(self.CAPACITY)

    def stays_for(self, seq):
        """How many bytes may be written, from a record on, before it is gone."""
        return self.CAPACITY - 2 * self.CAPACITY // 3

    @rule(lengths=st.lists(st.integers(0, 150), min_size=1, max_size=3), fill=st.integers(0, 255))
    def write(self, lengths, fill):
        seq, lengths = len(self.written), [length * self.SCALE for length in lengths]
        inputs = [InputBytes(n, seq, 0.5, bytes([fill]) * length) for n, length in enumerate(lengths)]
        if record_size(lengths) > self.CAPACITY:
            with pytest.raises(ValueError, match="does not fit"):
                self.ring.write(seq, inputs)
            return
        self.written.append((*self.ring.write(seq, inputs), plain(inputs)))

    @rule(share=st.floats(0.0, 1.0), fill=st.integers(0, 255), others=st.integers(0, 2), use=st.booleans())
    def write_slot(self, share, fill, others, use):
        slot = self.ring.slot(3)
        if slot is None:
            return
        length = min(round(share * len(slot)), 150 * self.SCALE)
        self.slots = True  # which take more room than their records
        slot[:] = bytes([fill]) * len(slot)
        seq, first = len(self.written), slot[:length]
        inputs = [
            InputBytes(0, seq, 0.5, first),
            *(InputBytes(n + 1, seq, 0.5, b"o" * 40) for n in range(others)),
        ]
        if use and record_size([length, *[40] * others]) + 200 < self.CAPACITY:
            expected = plain(inputs)
            self.written.append((*self.ring.write(seq, inputs), expected))

    @precondition(lambda self: self.written)
    @rule(back=st.integers(0, 5))
    def read(self, back):
        seq = max(0, len(self.written) - 1 - back)
        offset, length, expected = self.written[seq]
        try:
            views = self.reader.read(offset, length, seq)
        except FrameOverwritten:
            newer = sum(length for _, length, _ in self.written[seq:])
            assert seq < len(self.written) - 1 or self.slots
            assert self.slots or newer > self.stays_for(seq)  # nothing goes while there is room
        else:
            assert plain(views) == expected
            self.views.append((seq, views))

    @precondition(lambda self: self.views)
    @rule(number=st.integers(0, 10))
    def look_again(self, number):
        seq, views = self.views[number % len(self.views)]
        offset, _, expected = self.written[seq]
        copy = plain(views)
        try:
            self.reader.check(offset, seq)
        except FrameOverwritten:
            return
        assert copy == expected

    def teardown(self):
        self.views.clear()
        self.ring.close()


TestRingMachine = RingMachine.TestCase
TestRingMachine.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


class GrowingRingMachine(RingMachine):
    """The same of one that grows."""

    def make_ring(self):
        ring = FrameRing(self.CAPACITY, 4 * self.CAPACITY)
        ring.keep(1000.0, RingExtra(2 * self.CAPACITY))
        return ring


class ShortRoundsRingMachine(RingMachine):
    """The same of one whose round ends after three of the longest records so far."""

    CAPACITY = 512 * 1024
    SCALE = 400

    def make_ring(self):
        return FrameRing(self.CAPACITY, records=3)

    def stays_for(self, seq):
        longest = max(length for _, length, _ in self.written[: seq + 1])
        return min(self.CAPACITY, max(3 * longest, 65_536)) - longest

    @invariant()
    def takes_no_more_memory_than_it_needs(self):
        longest = max((length for _, length, _ in self.written), default=0)
        assert self.slots or self.ring.used_bytes <= max(3 * (longest + longest // 8 + 8), 65_536)


TestShortRoundsRingMachine = ShortRoundsRingMachine.TestCase
TestShortRoundsRingMachine.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)

TestGrowingRingMachine = GrowingRingMachine.TestCase
TestGrowingRingMachine.settings = TestRingMachine.settings


def test_given_short_rounds_when_records_are_put_into_slots_then_memory_is_taken_for_what_they_hold():
    """Slots are larger than the longest record by an eighth, which records of one size never fill."""
    length, records = 1 << 20, 3
    ring = FrameRing(8 << 20, 0, records)
    ring.write(0, [InputBytes(0, 0, 0.0, bytes(length))])
    for seq in range(1, 12):
        ring.make_ready()
        slot = ring.slot(1)
        slot[:length] = bytes(length)
        ring.write(seq, [InputBytes(0, 0, 0.0, slot[:length])])
    touched = os.fstat(ring.fd).st_blocks * 512
    # The first record, without a slot, has the later rounds begin theirs an eighth further on.
    assert records * length < touched < (records + 0.25) * length + (64 << 10)
