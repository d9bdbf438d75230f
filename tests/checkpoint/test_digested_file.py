"""Digests computed as a file is written, and by reading; a full disk."""

import hashlib
import traceback
from pathlib import Path

import pytest
import torch

from mpidist.checkpoint import digested_file


def test_the_digest_of_a_write_is_that_of_the_file(tmp_path):
    path = tmp_path / "model.pt"
    entry = digested_file.write(path, {"a": torch.arange(300_000)})
    data = path.read_bytes()
    assert (entry.bytes, entry.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    assert digested_file.sync(path) == entry and digested_file.digest(path) == entry.sha256


def test_a_full_disk_is_named():
    with pytest.raises(OSError, match="No space left") as full:
        digested_file.write(Path("/dev/full"), {"a": torch.zeros(100_000)})
    # Not torch's "enforce fail ... unexpected pos", which follows from it.
    assert "enforce" not in "".join(traceback.format_exception(full.value))
