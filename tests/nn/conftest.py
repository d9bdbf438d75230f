"""Workers for the tests of remote modules: as for those of RPC, with the engine registered."""

from tests.autograd.conftest import engine
from tests.rpc.conftest import to, workers

__all__ = ["engine", "to", "workers"]
