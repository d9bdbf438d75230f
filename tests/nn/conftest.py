"""Workers for the tests of remote modules: as for those of RPC."""

from tests.rpc.conftest import to, workers

__all__ = ["to", "workers"]
