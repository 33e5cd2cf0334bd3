"""For all tests: what nodes and drives write down goes to a folder of the tests' own, not to the user's."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def own_state(tmp_path_factory):
    """`XDG_STATE_HOME` for this process and all that it starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield
