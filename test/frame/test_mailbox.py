from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from torchperf_ros.frame.frame import Frame, Mailbox, Origin


class MailboxMachine(RuleBasedStateMachine):
    """Any order of putting, taking and clearing: no frame is lost, doubled or handed out after a newer one."""

    def __init__(self):
        super().__init__()
        self.mailbox = Mailbox()
        self.put = 0
        self.taken = []
        self.now_ns = self.superseded = self.stale = 0
        self.waiting = None

    @rule(left_ns=st.integers(-5, 5))
    def put_one(self, left_ns):
        self.superseded += self.waiting is not None
        self.waiting = Frame(self.put, b"", 0, 0.0, self.now_ns, self.now_ns + left_ns, Origin(self.now_ns, 0.0))
        self.mailbox.put(self.waiting)
        self.put += 1

    @rule(step_ns=st.integers(0, 4))
    def take_one(self, step_ns):
        self.now_ns += step_ns
        frame = self.mailbox.take(self.now_ns)
        expected = self.waiting if self.waiting is not None and self.waiting.deadline_ns > self.now_ns else None
        assert frame is expected
        self.stale += self.waiting is not None and frame is None
        self.waiting = None
        if frame is not None:
            self.taken.append(frame.seq)

    @rule()
    def clear(self):
        self.mailbox.clear()
        self.superseded += self.waiting is not None
        self.waiting = None

    @invariant()
    def every_frame_is_accounted_for_once(self):
        assert self.mailbox.waiting is self.waiting
        assert (self.mailbox.superseded, self.mailbox.stale) == (self.superseded, self.stale)
        assert self.put == len(self.taken) + self.superseded + self.stale + (self.waiting is not None)
        assert self.taken == sorted(set(self.taken))


TestMailboxMachine = MailboxMachine.TestCase
TestMailboxMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
