"""Failures and crashes that are printed although the job never reaches pytest's summary."""

import signal
import sys
from types import SimpleNamespace

import pytest

from tests.tools import instant_failures
from tests.tools.support import launcher, python, require_tool, started

# Rank 0 fails in each phase of a test and then waits, as the fixtures of a job do; rank 1 waits in
# its test.
MODULE = """
import os, threading, pytest
rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
def fail_or_wait():
    print("printed by the test")
    assert rank == 1, "rank 0 has failed"
    threading.Event().wait()

def test_call(): fail_or_wait()

@pytest.fixture
def before(): fail_or_wait()
def test_setup(before): pass

@pytest.fixture
def behind():
    yield
    fail_or_wait()
def test_teardown(behind): pass
"""
UNREADABLE = """
import os
assert os.environ["OMPI_COMM_WORLD_RANK"] == "1", "rank 0 has failed"
"""


@pytest.mark.slow
def test_a_failure_of_one_rank_is_written_before_the_job_is_ended(tmp_path):
    (tmp_path / "test_one_rank.py").write_text(MODULE)
    (tmp_path / "test_unreadable.py").write_text(UNREADABLE)
    (tmp_path / "conftest.py").write_text(
        "import threading\ndef pytest_sessionfinish(): threading.Event().wait()\n"
    )
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\nfaulthandler_timeout = 1\nfaulthandler_exit_on_timeout = True\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "--continue-on-collection-errors"]
    command += ["-p", "no:cacheprovider", "-p", "tests.tools.instant_failures", str(tmp_path)]
    done = started(
        [*launcher(2), *command], timeout_s=60, env={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    )
    assert done.returncode != 0 and "short test summary" not in done.stdout
    assert "collect failed in test_unreadable.py on rank 0\n" in done.stderr
    for phase in ("call", "setup", "teardown"):
        assert f"{phase} failed in test_one_rank.py::test_{phase} on rank 0\n" in done.stderr
    assert (
        done.stderr.count("AssertionError: rank 0 has failed") == 4
        and done.stderr.count("printed by the test") >= 3
    )
    assert " on rank 1\n" not in done.stderr


# Rank 1 fails, or a thread of mpidist does; the others wait for it in MPI.
FAILS = """
import mpidist.comm

def test_fails():
    world = mpidist.comm.init()
    print("printed by the test")
    assert world.rank != 1, "this rank has failed"
    world.barrier()
"""
ABORTS = """
import threading
import mpidist.comm
from mpidist.comm.mpi import runtime

def fails():
    raise ValueError("in a thread")

def test_aborts():
    world = mpidist.comm.init()
    print("printed by the test")
    if world.rank == 1:
        threading.Thread(target=runtime.guard_thread(fails)).start()
    world.barrier() if world.rank != 1 else threading.Event().wait()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "words"),
    [
        (FAILS, ["call failed in test_it.py::test_fails on rank 1", "this rank has failed"]),
        (
            ABORTS,
            [
                "the job is ended in test_it.py::test_aborts (call) on rank 1: ValueError in thr",
                "ValueError: in a thread",
            ],
        ),
    ],
    ids=["a failure", "an abort"],
)
def test_a_job_that_one_rank_ends_says_why(tmp_path, text, words):
    (tmp_path / "test_it.py").write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = ["-m", "mpi4py", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command += ["-p", "tests.tools.instant_failures", str(tmp_path)]
    env = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = started([*launcher(3), *python(), *command], timeout_s=60, env=env)
    assert done.returncode != 0 and "MPI_ABORT was invoked on rank 1" in done.stderr
    for expected in [*words, "printed by the test"]:
        assert expected in done.stderr, done.stderr


def test_every_stage_prints_failures_immediately():
    """As make runs it, with and without ranks."""
    make = [require_tool("make"), "--dry-run", "--always-make"]
    stages = ["unit", "slow", "mpi-2", "mpich-3", "timing", "long", "conformance"]
    done = started([*make, *stages], timeout_s=60)
    commands = done.stdout.replace("\\\n", "").splitlines()
    parallel = [line for line in commands if "-m mpi4py -m pytest" in line or "--dist" in line]
    assert done.returncode == 0 and len(parallel) >= len(stages), done.stdout + done.stderr
    for line in parallel:
        assert "-p tests.tools.instant_failures" in line, line


def test_a_worker_of_several_leaves_the_printing_to_its_controller():
    left = []
    manager = SimpleNamespace(unregister=lambda name: left.append(name))
    instant_failures.pytest_configure(SimpleNamespace(workerinput={}, pluginmanager=manager))
    assert left == ["tests.tools.instant_failures"]


def test_tests_that_have_begun_are_noted_and_left_out_the_next_time(tmp_path, monkeypatch):
    begun = tmp_path / "begun"
    monkeypatch.setenv("MPIDIST_TESTS_BEGUN", str(begun))
    monkeypatch.setenv("MPIDIST_TESTS_DONE", str(begun))
    for rank, nodeid in (("0", "a.py::test[x y]"), ("1", "a.py::other")):
        monkeypatch.setattr(instant_failures, "_RANK", rank)
        instant_failures.pytest_runtest_logstart(nodeid)
    items = [SimpleNamespace(nodeid=name) for name in ("a.py::test[x y]", "a.py::other")]
    left_out = []
    config = SimpleNamespace(
        hook=SimpleNamespace(pytest_deselected=lambda items: left_out.extend(items))
    )
    instant_failures.pytest_collection_modifyitems(config, items)
    assert [item.nodeid for item in items] == ["a.py::other"] and [
        item.nodeid for item in left_out
    ] == ["a.py::test[x y]"]


CRASH = """
import os, signal, threading
def wait_idly(): threading.Event().wait()
def test_crash():
    threading.Thread(target=wait_idly, daemon=True).start()
    os.kill(os.getpid(), signal.SIGSEGV)
"""


def test_a_crash_prints_the_stack_of_the_thread_that_crashed_and_no_other(tmp_path):
    (tmp_path / "test_crash.py").write_text(CRASH)
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", str(tmp_path)]
    done = started(command, timeout_s=60, env={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"})
    assert done.returncode == -signal.SIGSEGV
    assert "Segmentation fault" in done.stderr and "in test_crash\n" in done.stderr
    assert "in wait_idly\n" not in done.stderr
