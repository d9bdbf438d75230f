"""Supervision of the process that reads untrusted bytes: its crashes, and cases that never end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.bytes_fuzz.board import Board

ROOT = Path(__file__).resolve().parents[2]
INTERPRETER = (sys.executable,)  # of the reading process
# A case counts as hung that has used more of a core than this, or that waits for longer: on busy
# cores the other processes' work is no part of it.
CASE_S = 10.0
_WAIT_S = 60.0
_START_S = 120.0  # until the first case, for imports on busy cores
_LOOK_S = 0.05
_STACK_S = 1.0  # for the stacks of a hung process

Result = dict[str, Any]


def results(
    targets: Sequence[str], counts: Sequence[int], seed: int, case: bytes | None = None
) -> Iterator[Result]:
    """Read cases of targets in child processes; yield each target's result.

    A result has ``target`` and either ``count``, ``drawn`` and ``seconds``, or ``error`` and
    ``case`` (hex). After a crash, a hang or a wrong result, a new process continues with the next
    target.
    """
    board = Board()
    first = 0
    try:
        while first < len(targets):
            for result in _watched(board, targets, counts, seed, first, case):
                first = result["place"] + 1
                yield result
    finally:
        board.remove()


def _watched(
    board: Board,
    targets: Sequence[str],
    counts: Sequence[int],
    seed: int,
    first: int,
    case: bytes | None,
) -> Iterator[Result]:
    command = [
        *INTERPRETER,
        "-m",
        "tests.bytes_fuzz.reading",
        board.path,
        "--targets",
        ",".join(targets),
    ]
    command += ["--counts", ",".join(map(str, counts)), "--seed", str(seed), "--first", str(first)]
    if case is not None:
        command += ["--case", case.hex()]
    board.write(0, first, b"")
    with tempfile.TemporaryFile("w+") as errors:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        child = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        lines: list[str] = []
        listener = threading.Thread(target=lambda: lines.extend(child.stdout or ()), daemon=True)
        listener.start()
        hung = _wait(child, board)
        listener.join()
        found = [json.loads(line) for line in lines if line.startswith("{")]
        yield from found
        is_told = (
            any("error" in one for one in found)
            if child.returncode == 1
            else len(found) == len(targets) - first
        )
        if hung or child.returncode not in (0, 1) or not is_told:
            last = board.read()
            errors.seek(0)
            reason = f"no end after {CASE_S:g} s" if hung else _ending(child.returncode)
            place = max(last.target, first)
            yield {
                "target": targets[place],
                "place": place,
                "case": last.data.hex(),
                "error": reason,
                "trace": errors.read()[-6000:],
            }


def _wait(child: subprocess.Popen[str], board: Board) -> bool:
    """Wait until a child has ended; end it and report if it hangs."""
    process = psutil.Process(child.pid)
    seen, since, used = 0, time.monotonic(), 0.0
    while child.poll() is None:
        number = board.number()
        if number != seen:
            seen, since, used = number, time.monotonic(), _core_s(process)
        elif (seen and _core_s(process) - used > CASE_S) or time.monotonic() - since > (
            _WAIT_S if seen else _START_S
        ):
            child.send_signal(signal.SIGUSR1)
            time.sleep(_STACK_S)
            child.kill()
            child.wait()
            return True
        time.sleep(_LOOK_S)
    return False


def _core_s(process: psutil.Process) -> float:
    """Return the seconds of all cores that a process has used."""
    times = process.cpu_times()
    return times.user + times.system


def _ending(status: int) -> str:
    return (
        f"the process was ended by {signal.Signals(-status).name}"
        if status < 0
        else f"the process ended with status {status}"
    )
