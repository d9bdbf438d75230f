"""Suite of torch's tests from the installed wheel; each test runs on every rank of the job.

Nothing is copied: the names of torch's modules are bound to mpidist's (``binding``).
"""

from __future__ import annotations

import contextlib
import faulthandler
import inspect
import logging
import os
import tempfile
import traceback
import types
from collections.abc import Collection, Mapping
from typing import Any
from unittest import mock

import torch.distributed as dist
import torch.testing._internal.dist_utils as dist_utils

import mpidist.rpc as rpc
from mpidist.rpc import api
from tests.conformance.binding import ours_in_place_of_torchs
from tests.conformance.cuda_on_host import cuda_on_host
from tests.tools.support import agree

TIMEOUT_S = 15.0


class OnMpidist:
    """Surroundings of a test; the first base class of a suite, before torch's class."""

    # Modules of torch's suite in addition to dist_utils.
    modules: tuple[types.ModuleType, ...] = ()
    # Further names and their objects, where ``binding`` has no rule.
    more: Mapping[str, Any] = {}
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

    def surroundings(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context manager in which a test runs."""
        return contextlib.nullcontext()

    def __reduce__(self):
        # A test may send its own methods to other workers.
        return construct, (type(self), self._testMethodName, self.rank, self.size, self.file_name)


def construct(suite, name, rank, size, file_name):
    """Construct a test."""
    test = suite(name)
    test.rank, test.size, test.file_name = rank, size, file_name
    return test


def names_of(suite) -> list[str]:
    """Return the names of a suite's own tests."""
    source = suite.__bases__[1]
    return [
        name
        for name, _ in inspect.getmembers(source, inspect.isfunction)
        if name.startswith("test_")
    ]


def needed_devices(suite, name: str) -> int:
    """Return the number of CUDA devices below which torch's decorator skips a test."""
    found = inspect.getclosurevars(getattr(suite, name)).nonlocals.get("x", 0)
    return found if isinstance(found, int) else 0


def run(suite, name: str, group, *, on_host: bool = False) -> None:
    """Run one test on all ranks.

    Collective: over ``group``.

    Args:
        on_host: Run the body behind torch's decorator of CUDA tests, with CUDA's names on the host.
    """
    file_name = group.broadcast_object(tempfile.mktemp() if group.rank == 0 else None)
    test = construct(suite, name, group.rank, group.size, file_name)
    faulthandler.dump_traceback_later(100, exit=True)
    leaks = api._ignore_rref_leak
    # Remove pytest's handlers, because torch runs each test in its own process.
    no_log = mock.patch.object(logging.getLogger(), "handlers", [])
    try:
        with (
            ours_in_place_of_torchs((dist_utils, *suite.modules), suite.more),
            no_log,
            test.surroundings(),
            cuda_on_host() if on_host else contextlib.nullcontext(),
        ):
            if on_host:
                getattr(suite, name).__wrapped__(test)
            else:
                getattr(test, name)()
    finally:
        api._ignore_rref_leak = leaks
        faulthandler.cancel_dump_traceback_later()
        if dist.is_initialized():
            dist.destroy_process_group()
        if api._is_current_rpc_agent_set():
            rpc.shutdown(graceful=False)


def run_on_all(suite, name: str, group, *, on_host: bool = False) -> None:
    """Run a test, which passes if it passes on all ranks."""
    text = ""
    try:
        run(suite, name, group, on_host=on_host)
    except BaseException:
        text = traceback.format_exc()
    agree(group, not text, text)


def selected(names: list[str], long: Collection[str] = ()) -> list[str]:
    """Return a fixed third of the tests, equal on all ranks; all with MPIDIST_CONFORMANCE=all.

    Args:
        names: All that apply.
        long: Those that the third leaves out because they wait for seconds, or compute for them.
    """
    if os.environ.get("MPIDIST_CONFORMANCE") == "all":
        return names
    return [name for name in names[::3] if name not in long]
