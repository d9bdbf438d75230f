"""train_digits.py as a user runs it: stopped and resumed with equal numbers; wrong input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time

import numpy as np
import pytest

from tests.tools.support import ROOT, VARIABLES, launcher, python, started

pytestmark = pytest.mark.slow
PROGRAM = str(ROOT / "examples" / "train_digits.py")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    draw = np.random.default_rng(0)
    labels = draw.integers(0, 3, 90)
    path = tmp_path_factory.mktemp("data") / "data.npz"
    np.savez(path, images=draw.random((90, 8, 8)) + labels[:, None, None], labels=labels)
    return path


def run(ranks, *options):
    start = launcher(ranks) if ranks > 1 else []
    return started([*start, *python(), PROGRAM, *map(str, options)], timeout_s=100)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_that_is_stopped_and_started_again_has_the_same_numbers(tmp_path, data):
    common = [
        "--data",
        data,
        "--optimizer",
        "oss",
        "--hook",
        "powersgd",
        "--epochs",
        3,
        "--batch",
        6,
    ]
    straight = run(2, *common, "--metrics", tmp_path / "straight.json")
    assert straight.returncode == 0, straight.stderr
    again = [
        *common,
        "--metrics",
        tmp_path / "again.json",
        "--checkpoint",
        tmp_path / "run",
        "--save-every",
        4,
    ]
    stopped = run(2, *again, "--max-steps", 11)
    assert stopped.returncode == 75 and "stopped after step 11" in stopped.stdout, (
        stopped.stdout + stopped.stderr
    )
    with (tmp_path / "again.json").open("ab") as file:
        # Left by a killed run.
        file.write(b'{"step": 12, "epoch": 2, "loss": 0.5}\n\xff\0\n{"step": 1')
    done = run(2, *again)
    assert done.returncode == 0 and "step-11: step 11" in done.stdout, done.stdout + done.stderr
    assert lines(tmp_path / "again.json") == lines(tmp_path / "straight.json")
    assert done.stdout.splitlines()[-1] == straight.stdout.splitlines()[-1]


def test_a_signal_has_it_save_and_ask_to_be_started_again(tmp_path, data):
    command = [
        *python(),
        PROGRAM,
        "--data",
        str(data),
        "--epochs",
        "20000",
        "--checkpoint",
        str(tmp_path / "run"),
    ]
    metrics = tmp_path / "metrics.json"
    with subprocess.Popen(
        [*command, "--metrics", str(metrics)],
        env={**os.environ, **VARIABLES},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            deadline = time.monotonic() + 60
            while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
                time.sleep(0.05)
            process.send_signal(signal.SIGUSR1)
            text, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    step = lines(metrics)[-1]["step"]
    assert process.returncode == 75 and f"stopped after step {step} (SIGUSR1)" in text, text
    assert [path.name for path in (tmp_path / "run").iterdir() if path.name == f"step-{step}"]


@pytest.mark.parametrize(
    ("ranks", "options", "code", "problem"),
    [
        # The same parser explains those of tests/integration/test_examples.py.
        pytest.param(
            2,
            ["--epochs", "none"],
            2,
            "argument --epochs: must be a whole number above 0, not none",
            marks=pytest.mark.long,
        ),
        (
            2,
            ["--data", "{folder}/few.npz"],
            2,
            "1 samples, 1 of them to train with, are too few for 2 rank(s)",
        ),
        (1, ["--data", "{folder}/missing.npz"], 2, "missing.npz cannot be read as an .npz file"),
        (1, ["--data", "{data}", "--checkpoint", "{data}"], 1, "checkpoint.load from"),
    ],
)
def test_wrong_input_is_explained_once(tmp_path, data, ranks, options, code, problem):
    np.savez(tmp_path / "few.npz", images=np.ones((1, 8, 8)), labels=np.arange(1))
    done = run(ranks, *(text.format(folder=tmp_path, data=data) for text in options))
    assert (
        done.returncode == code
        and done.stderr.count(problem) == 1
        and "Traceback" not in done.stderr
    ), done.stderr
