import gc

import pytest


@pytest.fixture(scope="module", autouse=True)
def settled_model():
    """As the fork server leaves a worker's memory: what was there before is neither collected nor listed again."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
