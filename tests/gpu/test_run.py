"""Dry runs of ``make gpu``: what is missing, the plan, and a run that is cut off."""

import contextlib
import json
import os
import signal
import subprocess
import sys

import pytest

from tests.gpu.plan import CUT_SHORT, OK
from tests.tools.support import ROOT, launcher, started

GPU = [sys.executable, "-m", "tests.gpu"]


@pytest.fixture
def variables(tmp_path):
    """Return the settings of a dry run that leaves nothing outside the test's folder."""
    return {
        **{"PY": sys.executable, "DEVICE": "cpu", "WHEELS": str(tmp_path), "PARALLEL": "0"},
        **{"OUT": str(tmp_path / "out"), "LAST": str(tmp_path / "last.json")},
        **{"TMPDIR": str(tmp_path), "BUDGET_S": "90"},
    }


def summary(folder):
    """Return the verdict of each step."""
    lines = (folder / "out" / "summary.txt").read_text().splitlines()
    verdicts = ("ok", "skipped", "FAILED", "CUT", "NOT", "UNKNOWN")
    return {line.split()[0]: line.split()[1] for line in lines if line[33:].startswith(verdicts)}


def recorded(folder):
    steps = json.loads((folder / "out" / "steps.json").read_text())["cpu"]
    assert steps == json.loads((folder / "last.json").read_text())["cpu"]
    return {name: (run["outcome"], run["call"]) for name, run in steps.items()}


def test_without_torch_nothing_is_started(tmp_path, variables):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    python.chmod(0o755)
    done = started(GPU, timeout_s=60, env={**variables, "PY": str(python)})
    text = (tmp_path / "out" / "summary.txt").read_text()
    assert done.returncode == 2 and text in done.stdout, done.stdout + done.stderr
    assert "missing: torch (pip install torch)" in text
    assert "missing: pytest (pip install pytest)" in text
    assert "start:" not in text


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"BUDGET_S": "soon"}, "make gpu: BUDGET_S must be a positive number; got 'soon'"),
        ({"LAST": str(ROOT / "setup.cfg")}, "setup.cfg is no record of make gpu, remove it"),
    ],
)
def test_a_wrong_setting_is_named(variables, settings, words):
    done = started(GPU, timeout_s=60, env={**variables, **settings})
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_short_dry_run_and_the_next(tmp_path, variables):
    launcher(2)  # or skip
    record = {"cpu": {"one-process": {"outcome": OK, "seconds": 5000, "call": 3}}}
    (tmp_path / "last.json").write_text(json.dumps(record))
    settings = {**variables, "STEPS": "machine start:* one-process memcheck"}
    done = started(GPU, timeout_s=80, env=settings)
    assert done.returncode == 0, done.stdout + done.stderr
    head, *_, end = (tmp_path / "out" / "summary.txt").read_text().splitlines()
    assert head.startswith("cpu: ") and end.startswith("0 of 4 steps failed, 1 not run; ")
    assert "no time for 1 of them: one-process" in done.stdout
    assert "one-process                      NOT RUN   it takes about 5000 s" in done.stdout
    assert summary(tmp_path) == {
        **{"machine": "ok", "start:aware": "skipped", "start:plain": "ok"},
        **{"memcheck": "skipped", "one-process": "NOT"},
    }
    # What was not run keeps its last run; what was skipped has none.
    assert recorded(tmp_path) == {
        **{"machine": (OK, 4), "start:plain": (OK, 4), "one-process": (OK, 3)},
    }
    assert "rank 1 of 2 Open MPI" in (tmp_path / "out" / "logs.txt").read_text()

    (tmp_path / "last.json").unlink()
    done = started(GPU, timeout_s=80, env={**settings, "STEPS": "one-process"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert summary(tmp_path) == {"one-process": "ok"}
    assert recorded(tmp_path) == {"one-process": (OK, 1)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGTERM, id="term", marks=pytest.mark.long),
        pytest.param(signal.SIGKILL, id="kill"),
    ],
)
def test_a_run_that_is_cut_off_loses_nothing_that_has_ended(tmp_path, variables, number):
    launcher(2)  # or skip
    fifo = tmp_path / "begun"
    os.mkfifo(fifo)
    python = tmp_path / "python"
    # The step of one process begins, and does not end.
    python.write_text(
        f"""#!/bin/sh
        case "$*" in *test_pack.py*) echo begun; echo $$ >{fifo}; exec tail -f /dev/null;; esac
        exec "{sys.executable}" "$@"
        """
    )
    python.chmod(0o755)
    steps = "machine start:plain one-process bench-kernels"
    run = subprocess.Popen(
        GPU,
        cwd=ROOT,
        env={**os.environ, **variables, "PY": str(python), "STEPS": steps},
        stdout=subprocess.DEVNULL,
    )
    step = None
    try:
        step = int(fifo.read_text())
        run.send_signal(number)
        status = run.wait(60)
        found = summary(tmp_path)
        ended = {"machine": (OK, 1), "start:plain": (OK, 1)}
        assert found["start:plain"] == "ok" and found["bench-kernels"] == "NOT"
        logs = (tmp_path / "out" / "logs.txt").read_text()
        assert "rank 1 of 2 Open MPI" in logs
        if number == signal.SIGKILL:
            assert found["one-process"] == "UNKNOWN" and recorded(tmp_path) == ended
        else:
            assert status == 128 + signal.SIGTERM and found["one-process"] == "CUT"
            assert recorded(tmp_path) == {**ended, "one-process": (CUT_SHORT, 1)}
            assert "===== one-process\nbegun\n" in logs
            with pytest.raises(ProcessLookupError):  # the step has ended, too
                os.kill(step, 0)
    finally:
        run.kill()
        run.wait()
        if step is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(step, signal.SIGKILL)
