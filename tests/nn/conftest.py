"""Workers for tests of remote modules, as in ``tests/rpc``, with the autograd engine registered."""

from tests.autograd.conftest import engine
from tests.rpc.conftest import to, workers

__all__ = ["engine", "to", "workers"]
