"""Pytest plugin that writes each failure to standard error the moment it is reported: ``-p tests.told_at_once``.

When a test fails on one rank alone, the others wait in its collective until faulthandler ends the job, before pytest prints its
summary with the tracebacks. So the plugin writes them as they come, past pytest's capture.
"""

from __future__ import annotations

import os

import pytest

# Duplicated at import: pytest loads plugins named by -p before it redirects descriptor 2.
_STDERR = os.dup(2)
_RANK = next((os.environ[name] for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK") if name in os.environ), "0")


def _write(report: pytest.CollectReport | pytest.TestReport) -> None:
    """Write a failed report's traceback and captured output: one write, so that a job's ranks do not mix their lines."""
    sections = [f"----- {title}\n{text.rstrip()}\n" for title, text in report.sections if text.strip()]
    text = f"\n{report.when} failed in {report.nodeid} on rank {_RANK}\n{report.longreprtext.rstrip()}\n{''.join(sections)}"
    left = memoryview(text.encode(errors="backslashreplace"))
    while left:
        left = left[os.write(_STDERR, left) :]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        _write(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _write(report)
