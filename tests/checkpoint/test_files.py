"""Folders of checkpoints: atomic wherever a save is killed; pruning."""

import os
import shutil
from pathlib import Path

import pytest
import torch

from mpidist.checkpoint import digested_file, files, latest, manifest
from mpidist.checkpoint.manifest import Contents, Manifest
from mpidist.errors import CheckpointError


class Killed(BaseException):
    """Simulated end of the process."""


def write(folder, step, value=0, keep=2):
    part = files.begin(folder, step)
    held = {
        name: digested_file.write(part / name, {"value": value, "step": step})
        for name in (manifest.MODEL, manifest.TRAINING)
    }
    path = files.commit(part, Manifest(step, 1, held, Contents()))
    files.prune(folder, step, keep)
    return path


def read(path):
    written = manifest.from_json((path / manifest.NAME).read_text())
    assert not files.problems(path, written.files)
    return torch.load(path / manifest.MODEL, weights_only=True)


@pytest.mark.parametrize("step", [2, 1])
def test_wherever_a_save_is_killed_a_whole_checkpoint_is_there(tmp_path, monkeypatch, step):
    """Kill a save before each change of the file system, for the next step and the same step."""
    calls = [
        (os, "fsync"),
        (Path, "rename"),
        (Path, "mkdir"),
        (Path, "unlink"),
        (shutil, "rmtree"),
        (digested_file, "write"),
    ]
    left = 0
    for place in range(100):
        folder = tmp_path / str(place)
        write(folder, 1, value=1)
        with monkeypatch.context() as patch:
            for owner, name in calls:
                real = getattr(owner, name)

                def counted(*args, real=real, **kwargs):
                    nonlocal left
                    left -= 1
                    if left < 0:
                        raise Killed
                    return real(*args, **kwargs)

                patch.setattr(owner, name, counted)
            left = place
            try:
                write(folder, step, value=2, keep=1)
                break
            except Killed:
                pass
        found = latest(folder)
        assert found is not None and read(found)["value"] in (1, 2), place
        write(folder, step + 1, value=3)  # the next run removes the parts
        assert read(latest(folder))["value"] == 3 and not list(folder.glob("*.part"))
    assert (
        place > 8
        and [path.name for path in folder.iterdir()] == [f"step-{step}"]
        and read(latest(folder))["value"] == 2
    )


def test_what_is_kept(tmp_path):
    assert latest(tmp_path / "none") is None and latest(tmp_path) is None
    (tmp_path / "step-3").mkdir()  # unfinished
    (tmp_path / "step-x").mkdir()
    (tmp_path / "notes.txt").touch()
    for step in (1, 5, 20, 30, 100):
        write(tmp_path, step, keep=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "notes.txt",
        "step-100",
        "step-20",
        "step-30",
        "step-x",
    ]
    assert latest(tmp_path) == tmp_path / "step-100" == latest(tmp_path / "step-100")
    (tmp_path / "step-100" / manifest.NAME).unlink()
    assert latest(tmp_path) == tmp_path / "step-30"
    with pytest.raises(CheckpointError, match="holds step-30, of a later step than 25"):
        files.begin(tmp_path, 25)


def test_damage_is_named(tmp_path):
    path = write(tmp_path, 1)
    expected = manifest.from_json((path / manifest.NAME).read_text()).files
    data = bytearray((path / manifest.MODEL).read_bytes())
    data[len(data) // 2] ^= 1
    (path / manifest.MODEL).write_bytes(data)
    (path / manifest.TRAINING).unlink()
    assert [text.split(":")[0] for text in files.problems(path, expected)] == [
        "model.pt is damaged",
        "training.pt is missing",
    ]


def test_a_file_of_another_size_is_not_committed(tmp_path, monkeypatch):
    part = files.begin(tmp_path, 1)
    held = {
        name: digested_file.write(part / name, 0) for name in (manifest.MODEL, manifest.TRAINING)
    }
    (part / manifest.MODEL).write_bytes(b"short")
    with pytest.raises(CheckpointError, match=r"model.pt has 5 bytes, not"):
        files.commit(part, Manifest(1, 1, held, Contents()))
    (part / manifest.MODEL).unlink()
    monkeypatch.setattr(files, "VISIBLE_WITHIN_S", 0.0)
    with pytest.raises(CheckpointError, match="a folder that all nodes share"):
        files.commit(part, Manifest(1, 1, held, Contents()))


def test_a_manifest_without_room_names_its_file(tmp_path):
    part = files.begin(tmp_path, 1)
    (part / manifest.NAME).symlink_to("/dev/full")
    with pytest.raises(OSError, match=f"No space left on device: '{part / manifest.NAME}'"):
        files.commit(part, Manifest(1, 1, {}, Contents()))
    assert files.latest(tmp_path) is None


def test_a_folder_that_another_run_removed_is_named_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "VISIBLE_WITHIN_S", 0.0)
    part = files.begin(tmp_path, 1)
    held = {"model.pt": digested_file.write(part / "model.pt", 1)}
    files.begin(tmp_path, 2)
    with pytest.raises(
        CheckpointError, match=r"step-1.part was removed .* give each a folder of its own"
    ):
        files.commit(part, Manifest(1, 1, held, Contents()))


def test_shares_of_what_all_read():
    names = [f"rank-{rank}" for rank in range(7)]
    shares = [files.share_of(names, rank, 3) for rank in range(3)]
    assert sorted(name for share in shares for name in share) == names
