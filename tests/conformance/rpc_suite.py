"""PyTorch's own RPC tests on mpidist.rpc."""

from __future__ import annotations

import concurrent.futures
import contextlib
from unittest import mock

import torch.distributed as dist
import torch.testing._internal.common_utils as common_utils
import torch.testing._internal.distributed.rpc.faulty_agent_rpc_test as faulty_test
import torch.testing._internal.distributed.rpc.rpc_test as rpc_test

from mpidist.rpc import api
from tests.conformance import suite
from tests.conformance.faulty_agent import FaultyOptions, faults


class OnRpc(suite.OnMpidist):
    """Settings of both suites."""

    modules = (rpc_test, faulty_test)
    more = {name: getattr(api, name) for name in ("_thread_local_var", "_wait_all")}  # noqa: RUF012

    @contextlib.contextmanager
    def surroundings(self):
        """Restore the test's module afterwards."""
        fresh = mock.patch.dict(rpc_test.__dict__, {"VALUE_FUTURE": concurrent.futures.Future()})
        with fresh, faults(), PREPARED.get(self._testMethodName, contextlib.nullcontext)():
            yield


class RpcSuite(OnRpc, rpc_test.RpcTest, common_utils.TestCase):
    """Generic tests of RPC."""


class CudaSuite(OnRpc, rpc_test.TensorPipeAgentCudaRpcTest, common_utils.TestCase):
    """Tests of device maps and of futures with CUDA tensors."""


class FaultySuite(OnRpc, faulty_test.FaultyAgentRpcTest, common_utils.TestCase):
    """Tests that delay or drop messages."""

    def setup_fault_injection(self, faulty_messages, messages_to_delay):
        self.messages_to_fail = faulty_messages if faulty_messages is not None else []
        self.messages_to_delay = (
            messages_to_delay
            if messages_to_delay is not None
            else {"PYTHON_CALL": 1.5, "SCRIPT_CALL": 1.5}
        )

    @property
    def rpc_backend_options(self) -> FaultyOptions:
        return FaultyOptions(
            self.init_method, suite.TIMEOUT_S, self.messages_to_fail, self.messages_to_delay
        )


def _nothing_deleted():
    return mock.patch.object(api, "_delete_all_user_and_unforked_owner_rrefs")


def _as_torchs(self, init_method):
    dist.rpc.RpcBackendOptions.__init__(self)
    self.init_method = init_method


def _options_of_torchs():
    # The class inherits from torch's options, and calls the initializer of the currently bound
    # class.
    return mock.patch.object(rpc_test.FooBackendOptions, "__init__", _as_torchs)


# In the first two tests the suite patches torch's module object; patch mpidist's in the same way.
PREPARED = {
    "test_rref_leak": _nothing_deleted,
    "test_ignore_rref_leak": _nothing_deleted,
    "test_cannot_infer_backend_from_options": _options_of_torchs,
}
