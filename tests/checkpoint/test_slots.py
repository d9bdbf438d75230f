"""Slots in a node's memory: names, order of writes, and owners."""

import os

import pytest

from mpidist.checkpoint.manifest import MODEL, TRAINING, Entry, Manifest
from mpidist.checkpoint.slots import Slots
from mpidist.comm.mpi import job_folder
from mpidist.errors import CheckpointError

ENTRY = Entry(1, "0" * 64)


@pytest.fixture(autouse=True)
def memory(tmp_path, monkeypatch):
    monkeypatch.setattr(job_folder, "MEMORY", tmp_path)
    monkeypatch.setattr(job_folder, "_jobs", {})
    yield tmp_path
    for job in job_folder._jobs.values():
        job.close(0)


def written(step):
    return Manifest(step, 1, {MODEL: ENTRY, TRAINING: ENTRY})


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


def test_a_manifest_without_room_names_its_file(tmp_path):
    made = Slots("job", tmp_path)
    made.open()
    made.begin(0, ())
    path = made.path(0) / "manifest.json"
    path.with_name("manifest.json.part").symlink_to("/dev/full")
    with pytest.raises(OSError, match=f"No space left on device: '{path}'"):
        made.commit(0, written(3))
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
