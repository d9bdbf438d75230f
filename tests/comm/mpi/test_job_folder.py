"""Folder of a job in a node's memory: its owner, its lock and its end."""

import os

import pytest

from mpidist.comm.mpi import job_folder, runtime
from mpidist.comm.mpi.job_folder import JobFolder, clean


@pytest.fixture(autouse=True)
def memory(tmp_path, monkeypatch):
    monkeypatch.setattr(job_folder, "MEMORY", tmp_path)
    return tmp_path


def test_the_last_process_removes_the_folder(memory):
    path = memory / f"mpidist-{os.geteuid()}-job"
    first, second = JobFolder(path), JobFolder(path)
    first.open()
    second.open()
    assert clean() == ([], [path])
    first.close(0)
    assert path.exists()
    second.close(0)
    second.close(0)
    assert not path.exists()


def test_the_files_of_a_job_that_has_lost_ranks_stay(memory, monkeypatch):
    job = JobFolder(memory / f"mpidist-{os.geteuid()}-job")
    job.open()
    monkeypatch.setattr(runtime, "_unfinished", runtime.Unfinished({1}))
    job.close(0)
    assert job.path.exists() and clean() == ([job.path], [])


def test_clean_removes_what_dead_jobs_have_left(memory):
    dead, never_locked = (memory / f"mpidist-{os.geteuid()}-{name}" for name in ("a", "b"))
    other = memory / f"mpidist-{os.geteuid() + 1}-c"
    for folder in (dead, never_locked, other):
        (folder / "run").mkdir(parents=True)
    (dead / "lock").touch()
    assert clean() == ([dead, never_locked], [])
    assert other.exists() and not dead.exists() and not never_locked.exists()


def test_the_newest_recordings_of_dead_jobs_stay_and_all_commits(memory):
    folders = [memory / f"mpidist-{os.geteuid()}-{name}" for name in "abcde"]
    for age, folder in enumerate(folders):
        folder.mkdir(mode=0o700)
        for name in ("lock", "recorder-0"):
            (folder / name).touch()
        os.utime(folder, (age, age))
    (folders[0] / "run").mkdir()
    os.utime(folders[0], (0, 0))
    (folders[2] / "lock").unlink()  # of a job that is about to lock it
    used = JobFolder(folders[1])
    used.open()
    job_folder.remove_recordings(1)
    assert sorted(memory.iterdir()) == [folders[0], folders[1], folders[2], folders[4]]
    used.close(0)


def test_a_forked_child_that_outlives_a_rank_does_not_keep_its_folder(memory, monkeypatch):
    monkeypatch.setattr(job_folder, "_jobs", {})
    job = job_folder.of_job("job")
    job.open()
    (reading, writing), (is_there, there) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(writing)
            job.close(0)
            os.write(there, b"x")
            os.read(reading, 1)
        finally:
            os._exit(0)
    try:
        os.read(is_there, 1)
        assert clean() == ([], [job.path])  # the child has not given up the lock
        os.close(job._lock)  # as the kernel does for a killed process
        job._lock = -1
        assert clean() == ([job.path], [])
    finally:
        for file in (reading, writing, is_there, there):
            os.close(file)
        os.waitpid(child, 0)
