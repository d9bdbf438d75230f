"""Child job that tries operations, with real ranks and with ranks that crash, hang or misreport."""

import os
import sys

import pytest
import torch

from mpidist.comm.discovery import capability_trial, child_job, trial_operations
from tests.tools.support import missing

# A rank that needs neither torch nor MPI; ``at_bcast`` is its code for Bcast.
_RANK = """
import os, signal, sys, time
if os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")) == "0":
    operations = sys.argv[sys.argv.index("--device") + 2 :]
    for operation in operations:
        print("mpidist-probe begins", operation, flush=True)
        if operation == "Bcast":
            {at_bcast}
        print("noise without an end", end="", file=sys.stderr, flush=True)
        print("mpidist-probe ended", operation, "works", flush=True)
else:
    {other}
"""
_TRIED = ("point_to_point", "Bcast", "Allreduce")


def library():
    """Return the MPI whose launcher is beside this Python."""
    if child_job.launcher("Open MPI") is None:
        missing("no mpirun is installed")
    return "Open MPI"


def tried(at_bcast="pass", other="pass", silence_s=20.0):
    program = [sys.executable, "-S", "-c", _RANK.format(at_bcast=at_bcast, other=other)]
    return capability_trial.try_operations("cpu", library(), _TRIED, program, silence_s)


def expected(at_bcast):
    return {"point_to_point": "works", "Bcast": at_bcast, "Allreduce": "works"}


def test_every_operation_works_on_the_host():
    by_operation = capability_trial.try_operations("cpu", library())
    assert by_operation == dict.fromkeys(trial_operations.OPERATIONS, "works")


@pytest.mark.parametrize("cuda_first", [True, False])
def test_the_ranks_start_cuda_and_mpi_in_the_order_of_the_job_that_asks(monkeypatch, cuda_first):
    order = []

    def run(command, on_line, silence_s):
        arguments = command[command.index("mpidist.comm.discovery.capability_trial") + 1 :]
        with pytest.raises(InterruptedError):
            capability_trial.main(arguments)
        return ""

    def world():
        order.append("mpi")
        raise InterruptedError

    monkeypatch.setattr(child_job, "run", run)
    for name in ("setrlimit", "alarm", "sched_setaffinity"):
        monkeypatch.setattr(
            {"setrlimit": capability_trial.resource, "alarm": capability_trial.signal}.get(
                name, os
            ),
            name,
            lambda *_: None,
        )
    monkeypatch.setattr(
        capability_trial,
        "load",
        lambda makes_context: order.append(f"mpi, makes a context: {makes_context}"),
    )
    monkeypatch.setattr(capability_trial, "_start_device", lambda device: order.append("cuda"))
    monkeypatch.setattr(capability_trial.runtime, "world", world)
    capability_trial.try_operations("cuda:0", library(), _TRIED, cuda_first=cuda_first)
    assert order == (
        ["cuda", "mpi"] if cuda_first else ["mpi, makes a context: False", "cuda", "mpi"]
    )


def test_a_crash_marks_its_operation_alone():
    assert tried("os.kill(os.getpid(), signal.SIGSEGV)") == expected("ended by signal 11 (SIGSEGV)")


def test_an_exit_marks_its_operation_with_the_end_of_the_output():
    by_operation = tried("sys.exit('Error: no such memory')")
    assert "Error: no such memory" in by_operation["Bcast"]
    assert {**by_operation, "Bcast": ""} == expected("")


def test_an_operation_within_which_a_rank_exits_with_status_0_has_not_ended():
    assert tried("sys.exit(0)") == expected("ended before it returned")


def test_a_verdict_is_kept_word_for_word():
    assert tried(
        "print('mpidist-probe ended Bcast wrong result on rank 1', flush=True); continue"
    ) == expected("wrong result on rank 1")


@pytest.mark.slow
def test_a_hang_marks_its_operation_alone_and_leaves_no_process(monkeypatch):
    mark = "d1d2d3d4"
    monkeypatch.setattr(child_job.uuid, "uuid4", lambda: type("", (), {"hex": mark}))
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    assert tried(deaf, other=deaf, silence_s=2.0) == expected("hung: no output within 2 s")
    assert list(child_job._processes_marked(mark)) == []


def test_a_job_that_does_not_start_has_tried_no_operation():
    program = [sys.executable, "-S", "-c", "raise SystemExit('ImportError: no mpi4py')"]
    by_operation = capability_trial.try_operations("cpu", library(), _TRIED, program)
    assert set(by_operation) == set(_TRIED)
    for text in by_operation.values():
        assert text.startswith(capability_trial.NOT_TRIED)
        assert "ImportError: no mpi4py" in text


def test_without_a_launcher_nothing_is_tried(monkeypatch):
    monkeypatch.setattr(child_job, "launcher", lambda library: None)
    by_operation = capability_trial.try_operations("cpu", "MPI", _TRIED)
    assert all(
        text.startswith(capability_trial.NOT_TRIED) and "mpirun" in text
        for text in by_operation.values()
    )


def test_an_unknown_operation_is_refused_by_the_program(capsys):
    with pytest.raises(SystemExit):
        capability_trial.main(["--device", "cpu", "Everything"])
    assert "Everything" in capsys.readouterr().err


# --- the operations, in the job at hand ---


@pytest.mark.mpi
def test_the_trials_are_right_on_any_number_of_ranks(group):
    verdicts = {
        operation: trial_operations.attempt(group._state.mpi, operation, torch.device("cpu"))
        for operation in trial_operations.OPERATIONS
    }
    assert verdicts == dict.fromkeys(trial_operations.OPERATIONS, trial_operations.WORKS)


class Silent:
    """A library whose collectives do nothing, so that results are wrong."""

    def __init__(self, comm):
        self._comm = comm

    def __getattr__(self, name):
        is_needed = name in ("Get_rank", "Get_size", "allgather")
        return getattr(self._comm, name) if is_needed else lambda *args: None


@pytest.mark.mpi(min_size=2)  # an all-reduce of one rank leaves its operand as it is
def test_a_result_that_no_rank_wrote_is_wrong_on_all_ranks(group, monkeypatch):
    gathered = trial_operations.byte_strings.gathered
    monkeypatch.setattr(
        trial_operations.byte_strings,
        "gathered",
        lambda mpi, data: gathered(group._comm.plain, data),
    )
    first = {
        **dict.fromkeys(("Allgather", "Iallgather", "Alltoallv", "Ialltoallv"), "float32"),
        "Allreduce": "uint8",
    }
    verdicts = {
        attempt: trial_operations.attempt(Silent(group._state.mpi), attempt, torch.device("cpu"))
        for attempt in first
    }
    assert verdicts == {
        attempt: f"wrong result on rank 0 with 61 elements of torch.{dtype}"
        for attempt, dtype in first.items()
    }
