"""The examples of RPC run as they stand, and learn what they are to learn; in one process, and at the lowest thread level."""

from __future__ import annotations

import re
import sys

import pytest

from tests.support import ROOT, launcher, started

pytestmark = pytest.mark.slow


def run(ranks, program, *options, env=None):
    command = [*launcher(ranks), sys.executable, str(ROOT / "examples" / program), *options]
    done = started(command, timeout_s=100, env=env)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize(("ranks", "level"), [(1, None), (3, "serialized")])
def test_trainers_find_the_servers_target(ranks, level):
    text = run(ranks, "parameter_server.py", env={"MPI4PY_RC_THREAD_LEVEL": level} if level else None)
    match = re.search(r"(\d) trainer\(s\), 200 steps: loss (\S+),", text)
    assert match and int(match[1]) == max(ranks - 1, 1) and float(match[2]) < 1e-6


@pytest.mark.parametrize("ranks", [3])
def test_actors_win_by_the_learners_policy(ranks):
    text = run(ranks, "actor_learner.py")
    match = re.search(r"(\d) actor\(s\) won (\S+) of their plays; policy \[(.*)\]", text)
    assert match and int(match[1]) == max(ranks - 1, 1)
    assert float(match[2]) > 0.65 and float(match[3].split(",")[2]) > 0.9  # the best arm wins 80 %, drawing at random 45 %


@pytest.mark.parametrize("program", ["parameter_server.py", "actor_learner.py"])
def test_examples_are_short(program):
    assert len((ROOT / "examples" / program).read_text().splitlines()) < 100
