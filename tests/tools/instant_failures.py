"""Pytest plugin that prints each failure to stderr immediately.

Loaded by ``-p tests.tools.instant_failures``. When a test fails on one rank, the others wait in its
collective until faulthandler ends the job, before pytest prints its summary with the tracebacks. So
the plugin prints each one immediately, past pytest's capture. When mpidist ends the job within a
test, the reason goes to the file of that capture and ends with it: the plugin prints the reason,
the test's name and what was captured.

Each failure is recorded for the summary of a run of several stages, too (``failures``).

After a test has hung, a job can be started again for the remaining tests: ``MPIDIST_TESTS_BEGUN``
names a file to which rank 0 appends the id of each test that begins, ``MPIDIST_TESTS_DONE`` a file
with the ids of tests to skip.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import NoReturn

import pytest

from mpidist.comm.mpi import runtime
from tests.tools import failures

# Duplicated at import, because pytest loads plugins named by -p before it redirects descriptor 2.
_STDERR = os.dup(2)
# Not for the tests of tests, whose jobs fail on purpose.
_FAILURES = os.environ.pop(failures.FILE, None)
_RANK = next(
    (os.environ[name] for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK") if name in os.environ), "0"
)


def _write(text: str) -> None:
    """Write in one call, so that the lines of ranks are not interleaved."""
    left = memoryview(text.encode(errors="backslashreplace"))
    while left:
        left = left[os.write(_STDERR, left) :]


def _write_failed(report: pytest.CollectReport | pytest.TestReport) -> None:
    failures.record(_FAILURES, report.nodeid, _reason(report))
    sections = [
        f"----- {title}\n{text.rstrip()}\n" for title, text in report.sections if text.strip()
    ]
    _write(
        f"\n{report.when} failed in {report.nodeid} on rank "
        f"{_RANK}\n{report.longreprtext.rstrip()}\n{''.join(sections)}"
    )


def _reason(report: pytest.CollectReport | pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    return report.longreprtext if crash is None else str(crash.message).partition("\n")[0]


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        # pytest-xdist: the process that started this one gets the reports, and prints them.
        config.pluginmanager.unregister(name="tests.tools.instant_failures")
        return
    abort = runtime.abort
    config.add_cleanup(lambda: setattr(runtime, "abort", abort))

    def abort_visibly(message: str, *code: int) -> NoReturn:
        if not os.path.sameopenfile(2, _STDERR):
            test = os.environ.get("PYTEST_CURRENT_TEST", "no test")
            captured = ""
            with contextlib.suppress(Exception):
                captured = "".join(
                    config.pluginmanager.getplugin("capturemanager").read_global_capture()
                )
            _write(f"\nthe job is ended in {test} on rank {_RANK}: {message}\n{captured}")
            failures.record(_FAILURES, test.rpartition(" (")[0], message)
        abort(message, *code)
        raise SystemExit  # not reached

    runtime.abort = abort_visibly


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        _write_failed(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _write_failed(report)


def pytest_runtest_logstart(nodeid: str) -> None:
    if _RANK == "0" and (begun := os.environ.get("MPIDIST_TESTS_BEGUN")):
        with open(begun, "a", encoding="utf-8") as file:
            file.write(f"{nodeid}\n")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Two files, because a rank may read after rank 0 has begun to write.
    done = os.environ.get("MPIDIST_TESTS_DONE", "")
    if not os.path.exists(done):
        return
    names = set(Path(done).read_text(encoding="utf-8").splitlines())
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in names])
    items[:] = [item for item in items if item.nodeid not in names]
