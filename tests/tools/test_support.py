"""Jobs that tests start: one that does not end is ended with its ranks, and its output is shown."""

from __future__ import annotations

import ast
import re
import subprocess

import pytest
import torch

from tests.tools import support
from tests.tools.support import ROOT


class Endless:
    """A process that does not end by itself; ``obeys``: it ends when it is asked to."""

    args = ("a", "job")
    returncode = None

    def __init__(self, obeys):
        self.obeys, self.signals = obeys, []

    def communicate(self, timeout):
        if self.obeys and self.signals:
            return "what it printed", "its stacks"
        raise subprocess.TimeoutExpired(self.args, timeout)

    def terminate(self):
        self.signals.append("SIGTERM")

    def kill(self):
        self.signals.append("SIGKILL")


@pytest.mark.parametrize(
    ("obeys", "signals", "shown"),
    [
        (True, ["SIGTERM"], "what it printed\nits stacks"),
        (False, ["SIGTERM", "SIGKILL"], "did not end when it was asked to"),
    ],
)
def test_a_job_past_its_limit_is_asked_to_end_and_its_output_is_shown(
    monkeypatch, obeys, signals, shown
):
    process = Endless(obeys)
    monkeypatch.setattr(support.subprocess, "Popen", lambda *args, **options: process)
    with pytest.raises(pytest.fail.Exception) as failed:
        support.started(["a", "job"], timeout_s=3)
    assert "not ended after 3 s: ['a', 'job']" in str(failed.value) and shown in str(failed.value)
    assert process.signals == signals


def test_a_job_is_ended_when_its_test_is_interrupted(monkeypatch):
    process = Endless(True)

    def communicate(timeout):
        if not process.signals:
            raise KeyboardInterrupt
        return "", ""

    process.communicate = communicate
    monkeypatch.setattr(support.subprocess, "Popen", lambda *args, **options: process)
    with pytest.raises(KeyboardInterrupt):
        support.started(["a", "job"], timeout_s=3)
    assert process.signals == ["SIGTERM"]


def limits_of_jobs(text):
    """Yield line and limit, in seconds, of each process that a file starts with a literal one."""
    starts = {"run", "started", "job", "check_call", "check_output", "communicate", "wait"}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and (
            getattr(node.func, "attr", None) in starts or getattr(node.func, "id", None) in starts
        ):
            for keyword in node.keywords:
                if keyword.arg in ("timeout", "timeout_s") and isinstance(
                    keyword.value, ast.Constant
                ):
                    yield node.lineno, keyword.value.value


def test_limits_are_found():
    text = "started(x, timeout_s=300)\nsubprocess.run(x, timeout=4)\njob(2, x, timeout_s=limit)"
    assert list(limits_of_jobs(text)) == [(1, 300), (2, 4)]


def test_a_job_ends_before_faulthandler_ends_its_test():
    """Else the test's process ends without a word of the job's, and leaves its ranks running."""
    settings = (ROOT / "setup.cfg").read_text() + (ROOT / "Makefile").read_text()
    usual = int(re.search(r"faulthandler_timeout = (\d+)", settings)[1])
    slow = int(re.search(r"-o faulthandler_timeout=(\d+) -m 'slow", settings)[1])
    late = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "timeout" not in text:
            continue
        limit = slow if "mark.slow" in text else usual
        late += [
            f"{path.relative_to(ROOT)}:{line}: {found} s of {limit}"
            for line, found in limits_of_jobs(text)
            if found + support.END_S >= limit and "slurm" not in path.parts
        ]
    assert not late, "\n".join(late)


def test_the_cpu_shows_a_value_that_the_host_would_wait_for():
    values, count = torch.ones(2), torch.tensor(3)
    with support.without_host_waits(values.device):
        assert int(count) == 3 and values.add(1).shape == (2,)
        for read in (
            lambda: values[0].item(),
            lambda: bool(values.sum()),
            lambda: float(values[1]),
        ):
            with pytest.raises(AssertionError, match="the host would wait"):
                read()
