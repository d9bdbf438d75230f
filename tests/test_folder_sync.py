"""fsync of folders on file systems that refuse it, and on disks that fail."""

from __future__ import annotations

import errno
import os
import stat

import pytest

from mpidist.folder_sync import sync_folder


@pytest.fixture
def refusing(monkeypatch):
    """Return a function that makes fsync of folders fail with an error number."""
    real = os.fsync

    def refuse(number):
        def fsync(handle):
            if stat.S_ISDIR(os.fstat(handle).st_mode):
                raise OSError(number, os.strerror(number))
            real(handle)

        monkeypatch.setattr(os, "fsync", fsync)

    return refuse


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_that_cannot_sync_folders_is_accepted(tmp_path, refusing, number):
    refusing(number)
    sync_folder(tmp_path)


def test_a_failing_disk_is_an_error(tmp_path, refusing):
    refusing(errno.EIO)
    with pytest.raises(OSError, match=f"{os.strerror(errno.EIO)}: '{tmp_path}'"):
        sync_folder(tmp_path)


def test_no_handle_of_the_folder_is_left_open(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    sync_folder(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before
