# fixtures for these tests, too
from ..engines.conftest import restored_threads, settled_engines  # noqa: F401
