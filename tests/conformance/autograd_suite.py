"""PyTorch's own tests of distributed autograd, from the installed wheel, on mpidist.autograd: as ``rpc_suite`` does it."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from unittest import mock

import torch.testing._internal.common_utils as common_utils
import torch.testing._internal.distributed.rpc.dist_autograd_test as autograd_test

import mpidist.autograd as dist_autograd
import mpidist.rpc as rpc
from tests.conformance import rpc_suite
from tests.conformance.faulty_agent import FaultyOptions


class AutogradSuite(rpc_suite.OnMpidist, autograd_test.DistAutogradTest, common_utils.TestCase):
    """The generic tests."""


class SparseSuite(rpc_suite.OnMpidist, autograd_test.TensorPipeAgentDistAutogradTest, common_utils.TestCase):
    """The tests with sparse tensors."""


class FaultySuite(rpc_suite.OnMpidist, autograd_test.FaultyAgentDistAutogradTest, common_utils.TestCase):
    """The tests with messages that are dropped."""

    @property
    def rpc_backend_options(self) -> FaultyOptions:
        return FaultyOptions(self.init_method, rpc_suite.TIMEOUT_S, ["CLEANUP_AUTOGRAD_CONTEXT_REQ"], {})


def bound() -> types.ModuleType:
    """Return what the suite gets for ``torch.distributed.autograd``."""
    module = types.ModuleType("mpidist.autograd")
    module.__getattr__ = lambda name: getattr(dist_autograd, name)  # type: ignore[method-assign]
    return module


@contextlib.contextmanager
def ours_in_place_of_torchs() -> Iterator[None]:
    """Bind the suite's names to ours, and its global state as in a new process."""
    fresh = {"rpc_done": [False] * 4, "ctx_ids": [-1] * 4, "known_context_ids": set()}
    names = {"rpc": rpc_suite.bound(), "RRef": rpc.RRef, "dist_autograd": bound()}
    with mock.patch.dict(autograd_test.__dict__, fresh | names):
        yield


def run(suite, name: str, group) -> None:
    """Run one test on all ranks.

    Collective: over ``group``.
    """
    with ours_in_place_of_torchs(), PREPARED.get(name, contextlib.nullcontext)():
        rpc_suite.run(suite, name, group)


# It ends its process, so that nothing waits for a pass that torch cannot stop.
PREPARED = {"test_clean_context_during_backward": lambda: contextlib.suppress(SystemExit)}
