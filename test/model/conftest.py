import gc

import pytest


@pytest.fixture(scope="package", autouse=True)
def settled():
    """As the fork server leaves a worker's memory: what was there before is neither collected nor listed again."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
