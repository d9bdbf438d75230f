"""Folder of a job in a node's memory: its owner, its lock and its end."""

import fcntl
import os
import shutil

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


class Between:
    """A lock that another process, which has just lost its core, takes later than it opens it.

    Args:
        happens: Called between the opening and the lock, once.
    """

    def __init__(self, monkeypatch, happens):
        self._real, self._happens = fcntl.flock, happens
        monkeypatch.setattr(job_folder.fcntl, "flock", self)

    def __call__(self, file, how):
        happens, self._happens = self._happens, None
        if happens is not None:
            happens()
        self._real(file, how)


def test_a_folder_that_its_last_process_removes_is_made_anew(memory, monkeypatch):
    path = memory / f"mpidist-{os.geteuid()}-job"
    first, second = JobFolder(path), JobFolder(path)
    first.open()
    Between(monkeypatch, lambda: first.close(0))
    second.open()
    assert clean() == ([], [path])
    second.close(0)
    assert not path.exists()


def test_a_folder_that_is_cleaned_before_it_is_locked_is_made_anew(memory, monkeypatch):
    path = memory / f"mpidist-{os.geteuid()}-job"
    job, real = JobFolder(path), os.open
    cleaned = []

    def opens(file, *args, **kwargs):
        if not cleaned and str(file).startswith(str(path)):
            cleaned.append(True)
            assert clean() == ([path], [])
        return real(file, *args, **kwargs)

    monkeypatch.setattr(os, "open", opens)
    job.open()
    assert cleaned and clean() == ([], [path])
    job.close(0)
    assert not path.exists()


@pytest.mark.parametrize("removes", ["clean", "the last process"])
def test_what_a_new_process_writes_is_not_removed_with_the_old(memory, monkeypatch, removes):
    """While a folder without a process is removed, the job starts again."""
    path = memory / f"mpidist-{os.geteuid()}-job"
    first, second = JobFolder(path), JobFolder(path)
    first.open()
    (path / "recorder-0").write_text("old")
    if removes == "clean":
        os.close(first._lock)  # as the kernel does for a killed process
        first._lock = -1
    real, begun = os.unlink, []

    def unlinks(file, *args, **kwargs):
        real(file, *args, **kwargs)
        # Where the lock has no name any more, and not before, another process may make one.
        if not begun and not (path / "lock").exists():
            begun.append(True)
            second.open()
            (path / "recorder-0").write_text("new")

    monkeypatch.setattr(os, "unlink", unlinks)
    if removes == "clean":
        clean()
    else:
        first.close(0)
    assert begun and (path / "recorder-0").read_text() == "new"
    assert clean() == ([], [path])
    second.close(0)


def test_a_close_leaves_the_folder_of_others(memory):
    """Where another program has removed the folder, and the job has started again."""
    path = memory / f"mpidist-{os.geteuid()}-job"
    first, second = JobFolder(path), JobFolder(path)
    first.open()
    shutil.rmtree(path)
    second.open()
    first.close(0)
    assert clean() == ([], [path])
    second.close(0)
