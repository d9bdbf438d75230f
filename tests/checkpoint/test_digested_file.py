"""Digests computed as a file is written, and by reading; a full disk."""

import hashlib
import os
import traceback
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mpidist.checkpoint import digested_file


def test_the_digest_of_a_write_is_that_of_the_file(tmp_path):
    path = tmp_path / "model.pt"
    entry = digested_file.write(path, {"a": torch.arange(300_000)})
    data = path.read_bytes()
    assert (entry.bytes, entry.digest) == (len(data), hashlib.sha256(data).hexdigest())
    assert digested_file.digest(path) == entry.digest


def test_a_file_is_written_over_in_its_place(tmp_path):
    path = tmp_path / "model.pt"
    for count in (300_000, 5, 200_000):
        value = {"a": torch.arange(count)}
        entry = digested_file.overwrite(path, value)
        data = path.read_bytes()
        words = [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 8)]
        assert (entry.bytes, entry.digest) == (len(data), f"{sum(words) % 2**64:016x}")
        assert digested_file.digest(path, entry.digest) == entry.digest
        assert torch.equal(torch.load(path)["a"], value["a"])
    assert path.stat().st_mode & 0o777 == 0o600
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(OSError, match="symbolic links"):
        digested_file.overwrite(tmp_path / "link", value)


def test_a_sum_is_that_of_all_bytes_however_they_come():
    data = bytes(range(255, 0, -1)) * 3
    whole = digested_file.Sum64()
    whole.update(data)
    for size in (1, 3, 8, 13):
        parts = digested_file.Sum64()
        for start in range(0, len(data), size):
            parts.update(data[start : start + size])
        assert parts.hexdigest() == whole.hexdigest()


@pytest.mark.parametrize("write", [digested_file.write, digested_file.overwrite])
@pytest.mark.parametrize("numel", [100_000, 1])
def test_a_full_disk_is_named(write, numel):
    with pytest.raises(OSError, match="No space left on device: '/dev/full'") as full:
        write(Path("/dev/full"), {"a": torch.zeros(numel)})
    # Not torch's "enforce fail ... unexpected pos", which follows from it.
    assert "enforce" not in "".join(traceback.format_exception(full.value))


def test_a_file_in_memory_grows_while_mpi_has_room(tmp_path, monkeypatch):
    free = [5 << 20]
    path = tmp_path / "model.pt"

    def found(where):
        grown = path.stat().st_size
        return SimpleNamespace(f_frsize=1, f_blocks=64 << 20, f_bavail=free[0] - grown)

    monkeypatch.setattr(os, "statvfs", found)
    digested_file.overwrite(path, torch.zeros(200_000))
    words = f"No space left on device but what MPI may need: '{path}'"
    with pytest.raises(OSError, match=words):
        digested_file.overwrite(path, torch.zeros(2_000_000))
    # What the file has is no more memory.
    size = path.stat().st_size
    free[0] = size
    digested_file.overwrite(path, torch.ones(200_000))
    assert torch.equal(torch.load(path), torch.ones(200_000))
