"""PyTorch's own tests of distributed autograd on mpidist.autograd."""

from __future__ import annotations

import contextlib
from unittest import mock

import torch.testing._internal.common_utils as common_utils
import torch.testing._internal.distributed.rpc.dist_autograd_test as autograd_test

from tests.conformance import suite
from tests.conformance.faulty_agent import FaultyOptions, faults


class OnAutograd(suite.OnMpidist):
    """What all of them need."""

    modules = (autograd_test,)

    @contextlib.contextmanager
    def surroundings(self):
        """Undo what a test does to its module."""
        fresh = {"rpc_done": [False] * 4, "ctx_ids": [-1] * 4, "known_context_ids": set()}
        with (
            mock.patch.dict(autograd_test.__dict__, fresh),
            PREPARED.get(self._testMethodName, contextlib.nullcontext)(),
        ):
            yield


class AutogradSuite(OnAutograd, autograd_test.DistAutogradTest, common_utils.TestCase):
    """The generic tests."""


class SparseSuite(OnAutograd, autograd_test.TensorPipeAgentDistAutogradTest, common_utils.TestCase):
    """The tests with sparse tensors."""


class FaultySuite(OnAutograd, autograd_test.FaultyAgentDistAutogradTest, common_utils.TestCase):
    """The tests with messages that are dropped."""

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


# It ends its process, so that nothing waits for a pass that torch cannot stop.
PREPARED = {"test_clean_context_during_backward": lambda: contextlib.suppress(SystemExit)}
