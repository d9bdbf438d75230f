"""The doctor on real ranks: facts about MPI, disagreements between ranks, failed starts."""

import os
import signal
import threading
from dataclasses import replace

import pytest
import torch

from mpidist.cli import doctor, facts, questions, tables
from mpidist.cli.finding import PROBLEM
from mpidist.comm.discovery import installed
from mpidist.errors import LaunchError
from tests.tools.support import agree


@pytest.fixture
def own(world):
    return questions.ask(facts.collect(os.environ), installed.installed())


@pytest.mark.mpi
def test_a_job_is_examined_by_all_ranks(world, own):
    report = doctor.report_of(own, {}, 30.0)
    size = world.size
    assert [one.rank for one in report.ranks] == list(range(size)) and report.is_mine == (
        world.rank == 0
    )
    for one in report.ranks:
        assert one.mpi.size == size and one.mpi.local_size <= size and one.mpi.file
        assert len(one.checks) >= 6 and not any(one.checks.values())
        assert one.mpi.abi in ("openmpi", "mpich")
        assert one.mpi.transports.component or one.mpi.transports.device
        rows = dict(tables._device_rows(one))
        assert "MPI takes CUDA: " in rows["device"] and ", ROCm: " in rows["device"]
        assert "init_process_group and all_reduce" in one.checks and one.clock_s > 0
        assert one.computing_s > 0
    # Findings about the machine's cores are ignored.
    agree(
        world,
        report.exit_code() == 0,
        str([one for one in report.findings if one.level == PROBLEM]),
    )
    assert world.all_gather_object(report.findings) == [report.findings] * size
    if report.ranks[0].mpi.local_size > 1:
        assert report.ranks[0].mpi.shares_memory is True
    assert len(report.as_data()["ranks"]) == size


@pytest.mark.mpi(min_size=2)
def test_a_finding_of_one_rank_is_reported_on_all(world, own, monkeypatch):
    last = world.size - 1
    if world.rank == last:
        own = replace(
            own,
            versions={**own.versions, "torch": "2.1"},
            settings={**own.settings, "UCX_TLS": "tcp"},
        )
    checks = [
        ("fine", lambda: ""),
        ("wrong", lambda: "expected 1, got 2" if world.rank == last else ""),
    ]
    monkeypatch.setattr(questions, "_checks", lambda group, timeout_s: checks)
    report = doctor.report_of(own, {"before": ""}, 30.0)
    texts = " | ".join(finding.text for finding in report.findings)
    agree(world, report.exit_code() == 1 and "torch differs: " in texts, texts)
    assert "UCX_TLS differs: unset" in texts and "wrong fails: expected 1, got 2" in texts
    assert [finding.ranks for finding in report.findings if "fails" in finding.text] == [(last,)]
    assert list(report.ranks[last].checks) == ["before", "fine", "wrong"]


@pytest.mark.mpi
def test_device_memory_is_tried_by_a_process_alone(world, own, monkeypatch):
    done = []
    monkeypatch.setattr(questions, "_checks", lambda group, timeout_s: [("fine", lambda: "")])
    monkeypatch.setattr(questions, "try_device_operations", lambda: done.append("tried"))
    doctor.report_of(own, {}, 30.0)
    assert not done
    device = facts.Device(0, "pretended", "GPU-0", ("GPU-0",))
    doctor.report_of(replace(own, device=device), {}, 30.0)
    agree(world, done == ["tried"] * (world.size == 1), str(done))


@pytest.mark.mpi
def test_after_an_exception_nothing_is_tried(world, monkeypatch):
    def breaks():
        raise AttributeError("no\n way")

    monkeypatch.setattr(
        questions,
        "_checks",
        lambda group, timeout_s: [("a", lambda: ""), ("b", breaks), ("c", lambda: "")],
    )
    assert questions.check(world) == {
        "a": "",
        "b": "AttributeError: no way",
        "c": questions.NOT_TRIED,
    }
    assert "expected 2, got 1" in questions._compared(torch.ones(3), 2)


def test_a_start_that_fails_is_a_problem_and_one_rank_prints_it(monkeypatch):
    def fails(*args):
        raise LaunchError("no MPI library could be loaded (x); load it")

    monkeypatch.setattr(installed, "installed", fails)
    ranked = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}
    for environ, is_mine in (
        ({}, True),
        (ranked, False),
        ({**ranked, "OMPI_COMM_WORLD_RANK": "0"}, True),
    ):
        report = doctor.examine(environ, 5.0, True)
        assert (report.exit_code(), report.is_mine, report.ranks[0].mpi) == (1, is_mine, None)
        assert report.findings[0].remedy == "load it"
    library = installed.Installed("openmpi", "Open MPI v5", "/m/libmpi.so", "/m/mpirun")
    monkeypatch.setattr(installed, "installed", lambda: library)
    monkeypatch.setattr(questions, "start", lambda timeout_s: fails())
    report = doctor.examine(ranked, 5.0, True)
    assert report.exit_code() == 1 and report.ranks[0].rank == 1


@pytest.mark.parametrize(
    ("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_ctrl_c_and_sigterm_end_the_job_of_the_other_thread(monkeypatch, number, raised):
    library = installed.Installed("openmpi", "Open MPI v5", "/m/libmpi.so", "/m/mpirun")
    monkeypatch.setattr(installed, "installed", lambda: library)
    ended, former = threading.Event(), signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(doctor.child_job, "end_all", ended.set)
    monkeypatch.setattr(doctor, "_try_two_ranks", lambda library: {"it": str(ended.wait(60))})
    monkeypatch.setattr(facts, "collect", lambda *args: signal.raise_signal(number))
    with pytest.raises(raised):
        doctor.examine({}, 5.0, True)
    assert ended.is_set() and signal.getsignal(signal.SIGTERM) == former


def test_sigterm_ends_the_trial_of_a_process_alone_too(monkeypatch):
    library = installed.Installed("openmpi", "Open MPI v5", "/m/libmpi.so", "")
    former = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(installed, "installed", lambda: library)
    monkeypatch.setattr(questions, "start", lambda timeout_s: None)
    monkeypatch.setattr(questions, "ask", lambda own, library: own)
    monkeypatch.setattr(doctor, "report_of", lambda *_: signal.getsignal(signal.SIGTERM))
    assert doctor.examine({}, 30.0, True) != former
    assert signal.getsignal(signal.SIGTERM) == former


def test_torch_is_tried_after_the_handshake_alone(monkeypatch):
    answers = {"handshake": "", "torch": "RuntimeError: no backend"}
    monkeypatch.setattr(doctor.launcher_trial, "try_launcher", lambda *_: answers["handshake"])
    monkeypatch.setattr(doctor.first_program, "try_two_ranks", lambda *_: answers["torch"])
    assert list(doctor._try_two_ranks("x").values()) == ["", "RuntimeError: no backend"]
    answers["handshake"] = "hung"
    assert list(doctor._try_two_ranks("x").values()) == ["hung"]


@pytest.mark.mpi
@pytest.mark.parametrize("former", [None, "abort"])
def test_a_rank_that_does_not_come_leaves_the_report(monkeypatch, group, former):
    monkeypatch.delenv("MPIDIST_ON_TIMEOUT", raising=False)
    if former is not None:
        monkeypatch.setenv("MPIDIST_ON_TIMEOUT", former)
    monkeypatch.setattr(
        questions.first_program, "all_reduce", lambda limit_s: os.environ["MPIDIST_ON_TIMEOUT"]
    )
    checks = questions.check(group, 1.0)
    assert checks["init_process_group and all_reduce"] == "raise", checks
    assert os.environ.get("MPIDIST_ON_TIMEOUT") == former
