"""Ranks of MPI in the place of processes that a suite's tests spawn; a pytest plugin.

``torch.multiprocessing.spawn`` starts an MPI job of as many ranks, each of which calls the same
function, found by its name as ``spawn`` itself finds it. torch's ``MultiProcessTestCase`` runs each
of its tests in such a job.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import sys
import tempfile
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.multiprocessing

from tests.peers import jobs

_LIMIT_S = 100.0
# Ranks that are started for one call: the functions are found again by these.
_CALL = """\
import pickle, sys
from tests.peers import spawned
with open(sys.argv[1], "rb") as file:
    path = pickle.load(file)
    sys.path[:] = path
    call = pickle.load(file)
spawned.called(*call)
"""


def job(ranks: int, function: Callable[..., Any], *args: Any) -> jobs.Ended:
    """Call a function in each rank of a job, with the rank before its arguments."""
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        file = Path(folder) / "call"
        file.write_bytes(pickle.dumps(sys.path) + pickle.dumps((function, args)))
        record = Path(os.environ.get("PEERS_RECORD", f"{folder}/record"))
        variables = {**os.environ, **jobs.environment(jobs.OURS, record)}
        command = [*jobs.launcher(ranks), sys.executable, "-c", _CALL, str(file)]
        return jobs.run([command], Path.cwd(), variables, _LIMIT_S)


def called(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Call a function in this rank of the job."""
    function(int(os.environ["RANK"]), *args)


def spawn(
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> None:
    """Run a job in the place of torch's processes.

    Raises:
        RuntimeError: The job has failed, or has not ended in time.
    """
    end = job(nprocs, fn, *args)
    if end.status is None:
        raise RuntimeError(f"the ranks did not end within {_LIMIT_S:g} s\n{end.output}")
    if end.status != 0:
        raise RuntimeError(end.output)


def run_test(rank: int, kind: Any, method: str, file_name: str) -> None:
    """Run one test of a ``MultiProcessTestCase`` in this rank, as torch's process does."""
    ours, theirs = torch.multiprocessing.Pipe()
    try:
        kind._run(rank, method, file_name, theirs)
    finally:
        # torch's process sends the traceback of a failure, and closes its end after any test: then
        # there is something to receive, which is the end.
        with contextlib.suppress(EOFError):
            if ours.poll():
                print(ours.recv(), flush=True)


class _Jobs:
    """Methods that replace those of torch's ``MultiProcessTestCase``."""

    def spawn_processes(self: Any) -> None:
        """Start nothing: the job starts when it is joined."""
        self.processes = []

    def join_processes(self: Any, function: object) -> None:
        """Run the test as a job."""
        common: Any = importlib.import_module("torch.testing._internal.common_distributed")
        end = job(self.world_size, run_test, type(self), self._testMethodName, self.file_name)
        skips = {skip.exit_code: skip.message for skip in common.TEST_SKIPS.values()}
        if end.status in skips:
            raise unittest.SkipTest(skips[end.status])
        if end.status != 0:
            raise AssertionError(end.output or "the ranks did not end in time")


def pytest_configure(config: Any) -> None:
    """Start jobs in the place of processes."""
    theirs: Any = torch.multiprocessing
    theirs.spawn = spawn
    common: Any = importlib.import_module("torch.testing._internal.common_distributed")
    common.MultiProcessTestCase._spawn_processes = _Jobs.spawn_processes
    common.MultiProcessTestCase._join_processes = _Jobs.join_processes
