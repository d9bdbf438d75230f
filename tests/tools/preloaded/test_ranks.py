"""Forked ranks: they are what a new interpreter would be, and end as it would, with their owner."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.tools.support import VARIABLES, python, started

pytestmark = pytest.mark.slow

# Prints what a program can see of how it was started.
_SEES = """
import json, os, sys
print(json.dumps([
    __name__, sys.argv, sys.path[0], sorted(set(globals()) - {"__file__", "__cached__"}),
    os.getcwd(), sorted(os.sched_getaffinity(0)), os.getpgrp() == os.getpid(),
    {name: os.environ.get(name) for name in ("COLOUR", "OMP_NUM_THREADS", "OMPI_COMM_WORLD_RANK")},
    sorted(map(int, os.listdir("/proc/self/fd")))[:-1],
    sys.stdin.read(),
]))
"""


def seen(start, words, tmp_path, **variables):
    environ = {**os.environ, **VARIABLES, **variables}
    done = subprocess.run(
        [*start, *words], env=environ, cwd=tmp_path, input="typed", capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


@pytest.mark.parametrize("words", [["-c", _SEES, "a", "-b"], ["sees.py", "a"], ["-m", "sees", "a"]])
def test_a_program_sees_what_a_new_interpreter_shows_it(tmp_path, words):
    (tmp_path / "sees.py").write_text(_SEES)
    forked = seen(python(), words, tmp_path, COLOUR="red")
    new = seen(["setsid", sys.executable], words, tmp_path, COLOUR="red")
    assert forked == new
    assert forked[-1] == "typed"


def test_a_variable_that_is_read_at_the_start_is_the_servers_or_makes_a_new_interpreter():
    program = "import os, sys; print('torch' in sys.modules, os.environ[{name!r}])"
    for name in ("TORCH_SHOW_CPP_STACKTRACES", "OMP_NUM_THREADS", "PYTHONPATH"):
        done = started([*python(), "-c", program.format(name=name)], 60, {name: "2"})
        assert done.stdout == "False 2\n"
    # Output to a pipe waits for more, unless it is to be unbuffered.
    program = (
        "import os, sys; sys.stdout.reconfigure(errors='replace'); print('late', '\\udcff'); "
        "print('at once', file=sys.stderr); os._exit(0)"
    )
    for environ, printed in (({"PYTHONUNBUFFERED": "1"}, "late ?\n"), ({}, "")):
        for start in (python(**environ), [sys.executable]):
            done = started([*start, "-c", program], 60, {"PYTHONUNBUFFERED": "", **environ})
            assert (done.stdout, done.stderr) == (printed, "at once\n"), start


def test_torch_is_imported_and_each_fork_draws_other_numbers():
    program = (
        "import sys, random; fork = 'torch' in sys.modules; import numpy, torch; "
        "print(fork, numpy.random.random(), random.random(), torch.initial_seed())"
    )
    first, second = (started([*python(), "-c", program], 60).stdout.split() for _ in range(2))
    assert first[0] == second[0] == "True"
    assert first[1] != second[1] and first[2] != second[2] and first[3] == second[3]


@pytest.mark.parametrize(
    ("end", "code", "text"),
    [
        ("sys.exit(3)", 3, "at exit"),
        ("raise KeyError('culprit')", 1, "at exit"),
        ("os._exit(4)", 4, ""),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
        ("os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV, ""),
        ("os.kill(rank, signal.SIGTERM); time.sleep(60)", -signal.SIGTERM, ""),
    ],
)
def test_it_ends_as_the_program_does(end, code, text):
    program = f"import atexit, os, signal, sys, time; rank = int(sys.argv[1])\n{_AT_EXIT}\n{end}"
    done = started(["sh", "-c", 'exec "$0" "$@" $$', *python(), "-c", program], 60)
    assert done.returncode == code and done.stdout.strip() == text, done
    assert ("KeyError: 'culprit'" in done.stderr) == ("culprit" in end)


_AT_EXIT = "atexit.register(print, 'at exit')"


def gone(process, within_s=20):
    """Whether a process ends in time."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.01)
    return False


def test_a_killed_rank_takes_its_fork_along():
    program = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    with subprocess.Popen(
        [*python(), "-c", program], env={**os.environ, **VARIABLES}, stdout=subprocess.PIPE
    ) as rank:
        fork = int(rank.stdout.readline())
        rank.kill()
        assert fork != rank.pid and gone(fork)


def test_a_server_outlives_ranks_that_are_gone_before_their_answers():
    for after_s in (0, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05) * 3:
        with subprocess.Popen([*python(), "-c", "pass"], env={**os.environ, **VARIABLES}) as rank:
            time.sleep(after_s)
            rank.kill()
    assert started([*python(), "-c", "print(1)"], 60).stdout == "1\n"


def test_forks_end_with_the_owner_of_the_server():
    """An owner that is killed calls nothing at its exit."""
    owner = (
        "import os, signal, subprocess\n"
        "from tests.tools.support import VARIABLES, python\n"
        "ids = 'import os, time; print(os.getpid(), os.getppid(), flush=True); time.sleep(600)'\n"
        "rank = subprocess.Popen([*python(), '-c', ids], env={**os.environ, **VARIABLES},"
        " stdout=subprocess.PIPE)\n"
        "print(rank.stdout.readline().decode(), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = started([*python(), "-c", owner], 60)
    fork, server = map(int, done.stdout.split())
    assert done.returncode == -signal.SIGKILL
    assert gone(fork) and gone(server)
