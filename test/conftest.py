"""For all tests: Ctrl-C works, and what nodes and drives write down goes to a folder of the tests' own."""

import signal

import pytest


def pytest_configure():
    """Let Ctrl-C reach what tests start, also where they run in the background, which ignores it."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def own_state(tmp_path_factory):
    """`XDG_STATE_HOME` for this process and all that it starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield
