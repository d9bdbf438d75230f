"""Jobs that tests start: one that does not end is ended with its ranks, and its output is shown."""

from __future__ import annotations

import subprocess

import pytest

from tests import support


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
