"""Slots in a node's memory: names, order of writes, owners, and the folder's end."""

import os

import pytest

from mpidist.checkpoint import slots
from mpidist.checkpoint.manifest import MODEL, TRAINING, Entry, Manifest
from mpidist.checkpoint.slots import JobFolder, Slots, clean, job_name
from mpidist.errors import CheckpointError

ENTRY = Entry(1, "0" * 64)


@pytest.fixture(autouse=True)
def memory(tmp_path, monkeypatch):
    monkeypatch.setattr(slots, "MEMORY", tmp_path)
    monkeypatch.setattr(slots, "_jobs", {})
    yield tmp_path
    for job in slots._jobs.values():
        job.close(0)


def written(step):
    return Manifest(step, 1, {MODEL: ENTRY, TRAINING: ENTRY})


def test_a_job_is_named_by_the_first_variable_that_is_set():
    assert job_name({"SLURM_JOB_ID": "7", "PMIX_NAMESPACE": "x"}, "here") == "7"
    assert job_name({"MPIDIST_JOB": "../a b", "SLURM_JOB_ID": "7"}, "here") == ".._a_b"
    assert job_name({"SLURM_JOB_ID": ""}, "node3-77") == "node3-77"


def test_a_slot_counts_while_it_has_its_manifest(tmp_path):
    made = Slots("job", tmp_path / "run")
    assert made.found() == {}
    made.open()
    made.begin(0, ())
    assert made.found() == {}
    made.commit(0, written(3))
    made.begin(1, ())
    assert {slot: one.step for slot, one in made.found().items()} == {0: 3}
    made.commit(1, written(4))
    assert {slot: one.step for slot, one in Slots("job", tmp_path / "run").found().items()} == {
        0: 3,
        1: 4,
    }
    assert Slots("job", tmp_path / "other").found() == Slots("b", tmp_path / "run").found() == {}
    for name in ("model.pt", "other.pt"):
        (made.path(0) / name).write_text("x")
    made.begin(0, ["model.pt", "new.pt"])
    assert list(made.found()) == [1]
    assert [path.name for path in made.path(0).iterdir()] == ["model.pt"]
    made.drop(1)
    assert made.found() == {}


def test_a_manifest_of_another_version_is_refused(tmp_path):
    made = Slots("job", tmp_path)
    made.open()
    made.begin(0, ())
    (made.path(0) / "manifest.json").write_text('{"format": "mpidist.checkpoint 9"}')
    with pytest.raises(CheckpointError, match=r"checkpoint 9.*mpidist clean"):
        made.found()


def test_a_folder_that_is_open_to_others_is_refused(memory, tmp_path):
    folder = memory / f"mpidist-{os.geteuid()}-job"
    folder.mkdir(mode=0o755)
    made = Slots("job", tmp_path)
    for call in (made.open, made.found):
        with pytest.raises(CheckpointError, match="no folder of this user alone"):
            call()
    folder.rmdir()
    (memory / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(memory / "elsewhere")
    with pytest.raises(CheckpointError, match="no folder of this user alone"):
        made.open()


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


def test_clean_removes_what_dead_jobs_have_left(memory):
    dead, never_locked = (memory / f"mpidist-{os.geteuid()}-{name}" for name in ("a", "b"))
    other = memory / f"mpidist-{os.geteuid() + 1}-c"
    for folder in (dead, never_locked, other):
        (folder / "run").mkdir(parents=True)
    (dead / "lock").touch()
    assert clean() == ([dead, never_locked], [])
    assert other.exists() and not dead.exists() and not never_locked.exists()
