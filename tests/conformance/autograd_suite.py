"""PyTorch's own tests of distributed autograd on mpidist.autograd."""

from __future__ import annotations

import contextlib
from unittest import mock

import torch.testing._internal.common_utils as common_utils
import torch.testing._internal.distributed.rpc.dist_autograd_test as autograd_test

from tests.conformance import suite
from tests.conformance.faulty_agent import FaultyOptions, faults


class OnAutograd(suite.OnMpidist):
    """Settings of all suites of distributed autograd."""

    modules = (autograd_test,)

    @contextlib.contextmanager
    def surroundings(self):
        """Restore the test's module afterwards."""
        fresh = {"rpc_done": [False] * 4, "ctx_ids": [-1] * 4, "known_context_ids": set()}
        with (
            mock.patch.dict(autograd_test.__dict__, fresh),
            PREPARED.get(self._testMethodName, contextlib.nullcontext)(),
        ):
            yield


class AutogradSuite(OnAutograd, autograd_test.DistAutogradTest, common_utils.TestCase):
    """Generic tests."""


class SparseSuite(OnAutograd, autograd_test.TensorPipeAgentDistAutogradTest, common_utils.TestCase):
    """Tests with sparse tensors."""


class CudaSuite(OnAutograd, autograd_test.CudaDistAutogradTest, common_utils.TestCase):
    """Tests of one device."""


class DeviceMapsSuite(
    OnAutograd, autograd_test.TensorPipeCudaDistAutogradTest, common_utils.TestCase
):
    """Tests of device maps in the backward pass, with a device for each of four workers."""


class FaultySuite(OnAutograd, autograd_test.FaultyAgentDistAutogradTest, common_utils.TestCase):
    """Tests with dropped messages."""

    @property
    def rpc_backend_options(self) -> FaultyOptions:
        return FaultyOptions(
            self.init_method, suite.TIMEOUT_S, ["CLEANUP_AUTOGRAD_CONTEXT_REQ"], {}
        )

    @contextlib.contextmanager
    def surroundings(self):
        """Drop the messages."""
        with super().surroundings(), faults():
            yield


# The test ends its process, because torch cannot stop a pass.
PREPARED = {"test_clean_context_during_backward": lambda: contextlib.suppress(SystemExit)}
