"""Files of jobs: which there are, the last start of each, processes, and stacks on request."""

import faulthandler
import os
import signal
import socket
import subprocess
import threading
import time

import pytest

from mpidist.comm.mpi import job_folder, launcher_env, process_start
from mpidist.comm.recorder import recording as recordings
from mpidist.comm.recorder import ring as rings
from mpidist.comm.recorder.ring import Ring
from mpidist.comm.watchdog.dump_signal import DumpSignal
from mpidist.comm.watchdog.stack_file import StackFile
from mpidist.errors import MpidistError
from mpidist.reports import job_files
from mpidist.reports.job import ELSEWHERE, ENDED, RUNS, STOPPED
from tests.reports.made import recording


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Return a function that makes the recording of a rank in the folder of a job."""
    monkeypatch.setattr(job_folder, "MEMORY", tmp_path)
    made = []

    def one(job="first", rank=0, size=2, pid=None, place=None, worlds=("a",), ticks=None):
        folder = job_folder.path_of(job)
        folder.mkdir(exist_ok=True)
        with monkeypatch.context() as patched:
            if pid is not None:
                patched.setattr(rings.os, "getpid", lambda: pid)
            if ticks is not None:
                patched.setattr(rings, "start_ticks", lambda pid: ticks)
            path = folder / f"recorder-{rank if place is None else place}"
            made.append(Ring(path, job, rank, size, 64, worlds[0]))
            for world in worlds[1:]:
                made[-1].move(world, rank, size)
        return folder

    yield one
    for each in made:
        each.close()


def test_the_newest_job_is_chosen_and_others_by_their_beginnings(make):
    with pytest.raises(MpidistError, match="no job of yours has left a recording"):
        job_files.chosen(None, job_files.jobs())
    for name in ("job-12", "job-13", "other"):
        make(name)
    (job_folder.MEMORY / f"mpidist-{os.geteuid()}-empty").mkdir()
    found = job_files.jobs()
    assert [job.name for job in found] == ["other", "job-13", "job-12"]
    assert job_files.chosen(None, found).name == "other"
    assert job_files.chosen("job-12", found).folder == job_folder.path_of("job-12")
    assert job_files.chosen("oth", found).name == "other"
    with pytest.raises(
        MpidistError, match="several jobs begin with 'job'; jobs of this node: other, job-13"
    ):
        job_files.chosen("job", found)
    with pytest.raises(MpidistError, match=r"no recording here of job 'x'.*other, job-13, job-12"):
        job_files.chosen("x", found)


def test_a_job_is_found_by_the_name_that_it_was_given(make):
    given = "my job/1"
    make(launcher_env.job_name({"MPIDIST_JOB": given}, ""))
    for name in (given, "my j", "my_job_1"):
        assert job_files.chosen(name, job_files.jobs()).name == "my_job_1"
    assert [each.job for each in recordings.recordings("my job")] == []
    make(launcher_env.job_name({"MPIDIST_JOB": "my job"}, ""))
    assert [each.job for each in recordings.recordings("my job")] == ["my_job"]


def test_the_last_start_of_a_job_counts(make, tmp_path):
    """A start of three ranks, and one of two, whose processes have begun later."""
    for rank in range(3):
        folder = make(rank=rank, size=3, pid=2**22)
    began = time.monotonic_ns() * os.sysconf("SC_CLK_TCK") // 10**9 + 1
    while time.monotonic_ns() * os.sysconf("SC_CLK_TCK") // 10**9 < began:
        time.sleep(0.01)
    for rank in range(2):
        make(rank=rank, worlds=("b",), ticks=began)
    (job,) = job_files.read(folder, asks=False)
    assert sorted(job.recordings) == [0, 1] and job.unknown == () and not job.stacks
    assert job.left_out == ["rank 2 of 3, of an earlier start"]
    with pytest.raises(MpidistError, match="has no recording"):
        job_files.read(tmp_path / "none")


def test_the_ranks_that_go_on_after_a_death_are_the_job(make):
    """A spare has taken rank 1's place; a process of the first world has died."""
    make(rank=0, worlds=("a", "b"))
    make(rank=1, pid=2**22)
    folder = make(rank=1, place=2, worlds=("b",))
    (job,) = job_files.read(folder, asks=False)
    assert {rank: each.path.name for rank, each in job.recordings.items()} == {
        0: "recorder-0", 1: "recorder-2",
    }  # fmt: skip
    assert job.left_out == ["rank 1 of 2, of an earlier world of the job"]


def test_programs_of_one_job_are_read_apart(make):
    for place in range(4):
        folder = make(rank=place % 2, place=place, worlds=("a", "bc"[place // 2]))
    jobs = job_files.read(folder, asks=False)
    places = [[each.path.name[-1] for each in job.recordings.values()] for job in jobs]
    assert places == [["0", "1"], ["2", "3"]] and not any(job.left_out for job in jobs)
    assert [job.name for job in job_files.jobs()] == ["first"]


def test_what_is_left_out_of_a_folder_is_said(make):
    job_folder.path_of("first").mkdir()
    other = Ring(job_folder.path_of("first") / "recorder-3", "before", 3, 4, 64, "b")
    folder = make(size=4)
    other.close()
    make(rank=1, size=4)
    (folder / "recorder-2").write_bytes(b"x" * 9000)
    os.mkfifo(folder / "recorder-5")  # has no writer
    (job,) = job_files.read(folder, asks=False)
    assert sorted(job.recordings) == [0, 1] and job.unknown == (2, 3)
    assert job.left_out == [
        f"{folder}/recorder-2 is no recording of mpidist",
        f"{folder}/recorder-5: It is no regular file",
        "rank 3 of job before, in the same folder",
    ]
    for rank in (0, 1, 3):
        (folder / f"recorder-{rank}").unlink()
    with pytest.raises(MpidistError, match=r"first has no recording .*; .*recorder-2 is no record"):
        job_files.read(folder)


def test_processes_run_are_stopped_have_ended_or_are_elsewhere(make):
    folder = make()
    make(rank=1, pid=2**22)
    assert job_files.read(folder, asks=False)[0].states == {0: RUNS, 1: ENDED}
    sleeping = subprocess.Popen(["sleep", "60"])
    try:
        sleeping.send_signal(signal.SIGSTOP)
        host, ticks = socket.gethostname(), process_start.start_ticks(sleeping.pid)
        stopped = recording(0, [], pid=sleeping.pid, host=host, started_ticks=ticks)
        end = time.monotonic() + 60
        while job_files._state(stopped, host) != STOPPED and time.monotonic() < end:
            time.sleep(0.01)
        assert job_files._state(stopped, host) == STOPPED
        assert not job_files._can_be_asked(stopped)
        assert job_files._state(stopped, "there") == ELSEWHERE
    finally:
        sleeping.kill()
        sleeping.wait()


def test_a_living_process_writes_its_stacks(make, monkeypatch):
    handler, descriptor = signal.getsignal(signal.SIGUSR2), signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    folder = make(size=1)
    # Without a handler the signal would end the process.
    assert job_files.read(folder)[0].stacks == {}
    DumpSignal()
    file, stop = StackFile(folder / "stacks-0"), threading.Event()

    def watch():
        while not stop.wait(0.01):
            file.serve()

    thread = threading.Thread(target=watch, name="watching")
    thread.start()
    try:
        (job,) = job_files.read(folder)
    finally:
        stop.set()
        thread.join()
        faulthandler.unregister(signal.SIGUSR2)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGUSR2, handler)
        signal.set_wakeup_fd(descriptor)
    names = {stack.name: stack for stack in job.stacks[0]}
    assert names["watching"].thread and names["MainThread"].lines[0].function == "_ask"
