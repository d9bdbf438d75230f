"""PyTorch's own RPC tests, from the installed wheel, on mpidist.rpc: its modules' names for torch's RPC are bound to ours.

Nothing of the suite is copied: a test runs by its name, on every rank of the job, with the job's ranks as workers.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import faulthandler
import inspect
import logging
import sys
import tempfile
import types
from collections.abc import Iterator
from unittest import mock

import torch.distributed as dist
import torch.testing._internal.common_utils as common_utils
import torch.testing._internal.dist_utils as dist_utils
import torch.testing._internal.distributed.rpc.faulty_agent_rpc_test as faulty_test
import torch.testing._internal.distributed.rpc.rpc_test as rpc_test

import mpidist.autograd as dist_autograd
import mpidist.rpc as rpc
from mpidist.rpc import api
from tests.conformance.faulty_agent import FaultyOptions, faults

TIMEOUT_S = 15.0


def bound() -> types.ModuleType:
    """Return what the suite's modules get for ``torch.distributed.rpc``."""
    module = types.ModuleType("mpidist.rpc")
    module.__getattr__ = lambda name: getattr(rpc, name)  # type: ignore[method-assign]
    return module


@contextlib.contextmanager
def ours_in_place_of_torchs() -> Iterator[None]:
    """Bind the names by which the suite reaches torch's RPC to ours."""
    with contextlib.ExitStack() as stack:
        for module in (rpc_test, faulty_test, dist_utils):
            stack.enter_context(mock.patch.object(module, "rpc", bound()))
            for name in (
                "RRef",
                "WorkerInfo",
                "_get_debug_info",
                "_rref_context_get_debug_info",
                "_delete_all_user_and_unforked_owner_rrefs",
            ):
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, getattr(rpc, name)))
        stack.enter_context(mock.patch.object(rpc_test, "dist_autograd", dist_autograd))
        for name in ("_thread_local_var", "_wait_all"):
            stack.enter_context(mock.patch.object(rpc_test, name, getattr(api, name)))
        # The suite imports these modules within functions, the second to set its switch for leaks.
        stack.enter_context(mock.patch.object(dist, "autograd", dist_autograd))
        stack.enter_context(mock.patch.dict(sys.modules, {"torch.distributed.autograd": dist_autograd}))
        stack.enter_context(mock.patch.object(dist.rpc, "api", api))
        stack.enter_context(mock.patch.dict(sys.modules, {"torch.distributed.rpc.api": api}))
        yield


@contextlib.contextmanager
def as_in_a_new_process() -> Iterator[None]:
    """Undo what a test does to its module, and leave out pytest's log handlers: torch runs each in processes of its own."""
    fresh = mock.patch.dict(rpc_test.__dict__, {"VALUE_FUTURE": concurrent.futures.Future()})
    with fresh, mock.patch.object(logging.getLogger(), "handlers", []):
        yield


class OnMpidist:
    """What a test needs to know of its surroundings."""

    rank: int
    size: int
    file_name: str

    @property
    def world_size(self) -> int:
        return self.size

    @property
    def rpc_backend(self) -> rpc.BackendType:
        return rpc.BackendType.MPI

    @property
    def rpc_backend_options(self) -> rpc.RpcBackendOptions:
        return rpc.RpcBackendOptions(init_method=self.init_method, rpc_timeout=TIMEOUT_S)

    def get_shutdown_error_regex(self) -> str:
        return "has left RPC"

    def get_timeout_error_regex(self) -> str:
        return "RPC ran for more than"

    def __reduce__(self):
        # A test may send its own methods to other workers.
        return made, (type(self), self._testMethodName, self.rank, self.size, self.file_name)


class RpcSuite(OnMpidist, rpc_test.RpcTest, common_utils.TestCase):
    """The generic tests of RPC."""


class FaultySuite(OnMpidist, faulty_test.FaultyAgentRpcTest, common_utils.TestCase):
    """The tests that delay or drop messages."""

    def setup_fault_injection(self, faulty_messages, messages_to_delay):
        self.messages_to_fail = faulty_messages if faulty_messages is not None else []
        self.messages_to_delay = messages_to_delay if messages_to_delay is not None else {"PYTHON_CALL": 1.5, "SCRIPT_CALL": 1.5}

    @property
    def rpc_backend_options(self) -> FaultyOptions:
        return FaultyOptions(self.init_method, TIMEOUT_S, self.messages_to_fail, self.messages_to_delay)


def made(suite, name, rank, size, file_name):
    """Make a test."""
    test = suite(name)
    test.rank, test.size, test.file_name = rank, size, file_name
    return test


def names_of(suite) -> list[str]:
    """Return the names of a suite's own tests."""
    source = suite.__mro__[2]
    return [name for name, _ in inspect.getmembers(source, inspect.isfunction) if name.startswith("test_")]


def run(suite, name: str, group) -> None:
    """Run one test on all ranks.

    Collective: over ``group``.
    """
    file_name = group.broadcast_object(tempfile.mktemp() if group.rank == 0 else None)
    test = made(suite, name, group.rank, group.size, file_name)
    faulthandler.dump_traceback_later(100, exit=True)
    leaks = api._ignore_rref_leak
    try:
        with ours_in_place_of_torchs(), as_in_a_new_process(), faults(), PREPARED.get(name, contextlib.nullcontext)():
            getattr(test, name)()
    finally:
        api._ignore_rref_leak = leaks
        faulthandler.cancel_dump_traceback_later()
        if dist.is_initialized():
            dist.destroy_process_group()
        if api._is_current_rpc_agent_set():
            rpc.shutdown(graceful=False)


def _nothing_deleted():
    return mock.patch.object(api, "_delete_all_user_and_unforked_owner_rrefs")


def _as_torchs(self, init_method):
    dist.rpc.RpcBackendOptions.__init__(self)
    self.init_method = init_method


def _options_of_torchs():
    # The class is derived from torch's options, and calls the initializer of what the name stands for now.
    return mock.patch.object(rpc_test.FooBackendOptions, "__init__", _as_torchs)


# The suite patches torch's own module by its object in the first two; the same is done to ours.
PREPARED = {
    "test_rref_leak": _nothing_deleted,
    "test_ignore_rref_leak": _nothing_deleted,
    "test_cannot_infer_backend_from_options": _options_of_torchs,
}
