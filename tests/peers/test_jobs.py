"""Jobs: command lines and variables of both sides, limits, and a program run end to end."""

import os
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.peers import jobs, runner
from tests.peers.jobs import OURS, PEER, Ended
from tests.peers.outcomes import Outcome, Verdict
from tests.peers.programs import Program

pytestmark = pytest.mark.slow


def words_of(program, side):
    return [[Path(word).name for word in words] for words in jobs.commands(program, side)]


def test_a_program_of_torchrun():
    program = Program("a/train.py", 3, ("--x",))
    python = Path(sys.executable).name
    assert words_of(program, OURS) == [
        ["mpirun", "--oversubscribe", "-n", "3", python, "-u", "train.py", "--x"]
    ]
    (peer,) = words_of(program, PEER)
    assert peer[1:] == [
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", "train.py", "--x")
    ]


def test_a_program_of_a_package():
    (ours,) = words_of(Program("module:a.b"), OURS)
    assert ours[-3:] == ["-u", "-m", "a.b"]


def test_a_program_that_spawns():
    program = Program("a/main.py", 4, start="spawn")
    assert words_of(program, PEER) == [[Path(sys.executable).name, "-u", "main.py"]]
    assert words_of(program, OURS)[0][3] == "4"


def test_a_program_whose_ranks_are_started_by_hand():
    program = Program("a/main.py", 2, ("--rank={rank}", "--world={size}"), start="ranks")
    assert [words[-2:] for words in words_of(program, PEER)] == [
        ["--rank=0", "--world=2"],
        ["--rank=1", "--world=2"],
    ]
    (ours,) = words_of(program, OURS)
    first, second = " ".join(ours).split(" : ")
    assert first.endswith("--rank=0 --world=2") and second.endswith("--rank=1 --world=2")
    assert first.startswith("mpirun --oversubscribe -n 1 ") and second.startswith("-n 1 ")


def test_variables():
    given = {"PYTHONPATH": "/more", "OMPI_COMM_WORLD_RANK": "1", "MPIDIST_REPLACE": "gloo"}
    program = Program("a.py", start="spawn", devices=2, environ={"A": "b"})
    ours = jobs.environment(OURS, Path("record"), program, given)
    peer = jobs.environment(PEER, Path("record"), program, given)
    assert ours["MPIDIST_REPLACE"] == jobs.REPLACED and "MPIDIST_REPLACE" not in peer
    assert ours["PEERS_SPAWNS"] == "1" and "PEERS_SPAWNS" not in peer
    assert ours["PYTHONPATH"].endswith(":/more") and "OMPI_COMM_WORLD_RANK" not in ours
    assert ours["PEERS_DEVICES"] == peer["PEERS_DEVICES"] == "2" and peer["A"] == "b"


def judged(end, record, side=OURS, **settings):
    return runner.judged(Program("a.py", **settings), side, end, record)


def test_a_program_has_to_end_well_and_to_say_so_on_its_own_groups():
    ours = ["group mpidist", "rpc mpidist.rpc.api"]
    assert judged(Ended(0, "done\n"), ours, says="^done").kind == "passed"
    assert "without saying" in judged(Ended(0, "Exiting\n"), ours, says="^done").detail
    assert judged(Ended(1, "ValueError: x"), ours).detail == "ValueError: x"
    assert judged(Ended(None, ""), ours, limit_s=3).detail == "not ended after 3 s"
    assert "group gloo" in judged(Ended(0, ""), [*ours, "group gloo"]).detail
    assert judged(Ended(0, ""), []).kind == "failed"
    assert judged(Ended(0, ""), ["group gloo"], PEER) == Outcome("passed")
    assert judged(Ended(0, ""), [], PEER) == Outcome("passed")


def test_a_program_without_an_end_has_to_say_something():
    ours = ["rpc mpidist.rpc.api"]
    assert judged(Ended(None, "Episode 3", True), ours, until="3").kind == "passed"
    assert judged(Ended(None, "Episode 2"), ours, until="3").kind == "failed"
    assert judged(Ended(0, "Episode 2"), ours, until="3").kind == "failed"


ENDLESS = """\
import subprocess, sys, time
words = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
child = subprocess.Popen(words, start_new_session=True)
print("child", child.pid, flush=True)
time.sleep(600)
"""


def test_a_job_that_has_said_it_is_ended_with_its_children(tmp_path):
    end = jobs.run([[sys.executable, "-c", ENDLESS]], tmp_path, os.environ, 30, r"child \d+")
    assert end.has_said and end.status is None
    child = int(end.output.split()[1])
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == "zombie"


def test_a_job_of_which_one_process_fails_is_ended(tmp_path):
    start = time.monotonic()
    command = [sys.executable, "-S", "-c"]
    endless, fails = "import time; time.sleep(600)", "raise SystemExit(3)"
    end = jobs.run([[*command, endless], [*command, fails]], tmp_path, os.environ, 300)
    assert end.status == 3 and time.monotonic() - start < 300


def test_an_absent_program_is_a_row(tmp_path):
    row = runner.run(Program("a/b.py"), tmp_path, tmp_path)
    assert row.verdict is Verdict.ABSENT and "not among SOURCES" in row.note
    row = runner.run(Program("a/b.py", needs=("no_such_module",)), tmp_path, tmp_path)
    assert row.note == "no_such_module is not installed"


PROGRAM = """\
import sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
value = torch.ones(3).to("cuda:0")
dist.all_reduce(value)
print("sum", value.sum().item(), torch.accelerator.device_count())
"""


@pytest.mark.slow
def test_a_program_runs_on_both_sides(tmp_path):
    (tmp_path / "suite").mkdir()
    (tmp_path / "suite" / "main.py").write_text(PROGRAM)
    args = (str(tmp_path / "store{rank}"),)
    program = Program("suite/main.py", 1, args, "ranks", devices=2, says=r"^sum 3\.0 2$")
    row = runner.run(program, tmp_path, tmp_path)
    assert (row.verdict, row.lines, row.cpu_lines, row.note) == (Verdict.PASSED, 0, 0, "")
    assert len(list(tmp_path.glob("*.txt"))) == 2
