from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from torchperf_ros.frame.frame import Frame, Mailbox, Origin


def test_given_a_waiting_frame_when_a_newer_comes_then_the_newer_is_taken_and_the_older_counted(make_frame):
    mailbox = Mailbox()
    mailbox.put(make_frame(0))
    mailbox.put(make_frame(1))
    taken = mailbox.take(now_ns=0)
    assert taken is not None
    assert taken.seq == 1
    assert (mailbox.superseded, mailbox.stale) == (1, 0)


def test_given_an_empty_mailbox_when_taken_from_then_nothing_is_counted():
    mailbox = Mailbox()
    assert mailbox.take(now_ns=10**18) is None
    mailbox.clear()
    assert (mailbox.superseded, mailbox.stale) == (0, 0)


def test_given_a_frame_whose_deadline_is_now_when_taken_then_it_is_stale_and_gone(make_frame):
    mailbox = Mailbox()
    mailbox.put(make_frame(deadline_ns=5))
    assert mailbox.take(now_ns=5) is None
    assert mailbox.take(now_ns=0) is None
    assert (mailbox.superseded, mailbox.stale) == (0, 1)


def test_given_a_frame_with_a_nanosecond_left_when_taken_then_it_gets_its_turn(make_frame):
    mailbox = Mailbox()
    mailbox.put(make_frame(deadline_ns=6))
    assert mailbox.take(now_ns=5) is not None
    assert mailbox.stale == 0


def test_given_a_waiting_frame_when_cleared_then_it_is_superseded_once(make_frame):
    mailbox = Mailbox()
    mailbox.put(make_frame())
    mailbox.clear()
    mailbox.clear()
    assert mailbox.take(now_ns=0) is None
    assert mailbox.superseded == 1


class MailboxMachine(RuleBasedStateMachine):
    """Any order of putting, taking and clearing: no frame is lost, doubled or handed out after a newer one."""

    def __init__(self):
        super().__init__()
        self.mailbox = Mailbox()
        self.put = 0
        self.taken = []
        self.now_ns = 0
        self.waiting = None

    @rule(left_ns=st.integers(-5, 5))
    def put_one(self, left_ns):
        self.waiting = Frame(self.put, b"", 0, 0.0, self.now_ns, self.now_ns + left_ns, Origin(self.now_ns, 0.0))
        self.mailbox.put(self.waiting)
        self.put += 1

    @rule(step_ns=st.integers(0, 4))
    def take_one(self, step_ns):
        self.now_ns += step_ns
        frame = self.mailbox.take(self.now_ns)
        expected = self.waiting if self.waiting is not None and self.waiting.deadline_ns > self.now_ns else None
        assert frame is expected
        self.waiting = None
        if frame is not None:
            self.taken.append(frame.seq)

    @rule()
    def clear(self):
        self.mailbox.clear()
        self.waiting = None

    @invariant()
    def every_frame_is_accounted_for_once(self):
        waiting = self.waiting is not None
        assert self.put == len(self.taken) + self.mailbox.superseded + self.mailbox.stale + waiting
        assert self.taken == sorted(set(self.taken))


TestMailboxMachine = MailboxMachine.TestCase
TestMailboxMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
