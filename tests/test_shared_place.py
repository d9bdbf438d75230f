"""Files where another user may write: links, pipes, sizes, owners, and what mpidist does there."""

from __future__ import annotations

import errno
import logging
import os
import signal
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from mpidist import shared_place
from mpidist.checkpoint.slots import Slots
from mpidist.cli.app import app
from mpidist.comm.mpi import job_folder
from mpidist.comm.recorder import recorder, recording
from mpidist.comm.recorder.ring import Ring
from mpidist.comm.watchdog import stack_file
from mpidist.comm.watchdog.stack_file import StackFile
from mpidist.errors import CheckpointError
from mpidist.reports import job_files
from tests.tools.two_users import OTHER, VICTIM, as_user, shared_folder


@pytest.fixture
def memory(monkeypatch):
    """Return a node's memory that two users share."""
    with shared_folder() as path:
        monkeypatch.setattr(job_folder, "MEMORY", path)
        monkeypatch.setattr(job_folder, "_jobs", {})
        # What they import the other users may not be able to read.
        for command in ("clean", "report"):
            call(command)
        yield path


def test_what_is_no_regular_file_of_this_user_is_not_opened(tmp_path):
    file, link, pipe = tmp_path / "file", tmp_path / "link", tmp_path / "pipe"
    file.write_bytes(b"text")
    link.symlink_to(file)
    os.mkfifo(pipe)
    assert shared_place.text_of(file, 4) == "text"
    for path, most, code in (
        (link, 4, errno.ELOOP),
        (pipe, 4, errno.EINVAL),
        (tmp_path, 4, errno.EINVAL),
        (file, 3, errno.EFBIG),
        (tmp_path / "none", 4, errno.ENOENT),
    ):
        with pytest.raises(OSError, match=path.name) as caught:
            shared_place.opened(path, most)
        assert (caught.value.errno, caught.value.filename) == (code, str(path))


def call(*words):
    return CliRunner().invoke(app, list(words))


def test_a_file_that_is_made_replaces_a_link_and_not_its_target(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_bytes(b"text")
    link.symlink_to(target)
    os.close(shared_place.made(link, os.O_WRONLY))
    assert target.read_bytes() == b"text" and not link.is_symlink()
    assert link.stat().st_mode & 0o777 == 0o600


def test_a_file_of_another_user_is_opened_only_where_that_is_meant(memory):
    with as_user(OTHER):
        (memory / "file").write_bytes(b"theirs")
    with as_user(VICTIM):
        with pytest.raises(OSError, match=f"belongs to user {OTHER}"):
            shared_place.opened(memory / "file", 9)
        assert shared_place.text_of(memory / "file", 9, is_own=False) == "theirs"
        # The folder keeps each user's files, as /tmp does.
        with pytest.raises(PermissionError):
            shared_place.made(memory / "file", os.O_WRONLY)


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o777])
def test_a_folder_of_another_user_keeps_nobody_from_cleaning_and_recording(
    memory, mode, monkeypatch, caplog
):
    # More than the dead jobs whose recordings stay.
    with as_user(OTHER):
        for number in range(recorder._DEAD_JOBS + 1):
            folder = memory / f"mpidist-{VICTIM}-{number}"
            folder.mkdir()
            folder.chmod(mode)
            (folder / "lock").touch(mode=0o600)
    with as_user(VICTIM):
        own = job_folder.path_of("own")
        own.mkdir(mode=0o700)
        done = call("clean")
        lines = done.output.splitlines()
        assert done.exit_code == 0, done.output
        assert lines[0] == f"removed {own}" and not own.exists()
        assert lines[1:] == [
            f"left {memory}/mpidist-{VICTIM}-{number}, which belongs to user {OTHER}"
            for number in range(recorder._DEAD_JOBS + 1)
        ]
        monkeypatch.setattr(logging.getLogger("mpidist"), "propagate", True)
        monkeypatch.setattr(recorder.runtime, "close_at_exit", lambda owner, stage: None)
        world = SimpleNamespace(start="own", rank=0, size=1, key="a")
        ranks = SimpleNamespace(Get_rank=lambda: 0)
        monkeypatch.setattr(recorder.runtime, "processes_of_job", lambda: ranks)
        made = recorder._opened(recorder.Settings(), world)
        assert made.path == own / "recorder-0" and not caplog.records
        made.close()
        with pytest.raises(CheckpointError, match=f"belongs to user {OTHER}.*MPIDIST_JOB"):
            Slots("0", memory).open()
        job_folder.of_job("own").close(0)


def test_a_forged_recording_neither_empties_a_file_nor_signals_a_process(memory):
    """The recording names a process of the victim; the stacks beside it are a link to a file."""
    with as_user(VICTIM):
        thesis = memory / "thesis.tex"
        thesis.write_bytes(b"years of work")
    with as_user(OTHER):
        folder = memory / f"mpidist-{VICTIM}-evil"
        folder.mkdir(mode=0o755)
        (folder / "stacks-0").symlink_to(thesis)
        ring = Ring(folder / "recorder-0", "evil", 0, 1, 64)
        (folder / "recorder-0").chmod(0o644)
    handler, taken = signal.getsignal(signal.SIGUSR2), []
    signal.signal(signal.SIGUSR2, lambda *args: taken.append(args))
    try:
        with as_user(VICTIM):
            assert job_files.jobs() == [] and recording.recordings("evil") == []
            done = call("report", "--folder", str(folder), "--last", "0")
            assert done.exit_code == 0, done.output
            assert f"not read: {folder}, which belongs to user {OTHER}" not in done.stdout
            assert f"not read: {folder}, which belongs to user {OTHER}" in done.stderr
    finally:
        signal.signal(signal.SIGUSR2, handler)
        ring.close()
    assert thesis.read_bytes() == b"years of work" and taken == []


def test_a_link_beside_an_own_recording_is_not_followed_either(tmp_path, monkeypatch):
    thesis = tmp_path / "thesis.tex"
    thesis.write_bytes(b"years of work")
    ring = Ring(tmp_path / "recorder-0", "own", 0, 1, 64)
    (tmp_path / "stacks-0").symlink_to(thesis)
    sent = []
    monkeypatch.setattr(job_files.os, "kill", lambda *args: sent.append(args))
    monkeypatch.setattr(job_files, "_field", lambda pid, name: "f" * 16)
    (job,) = job_files.read(tmp_path)
    assert job.recordings[0].pid == os.getpid() and not job.stacks
    ring.close()
    assert thesis.read_bytes() == b"years of work" and sent == []


def test_stacks_are_not_written_to_a_file_of_another_user(memory, monkeypatch):
    monkeypatch.setattr(stack_file.StackFile, "_install", lambda file: None)
    with as_user(OTHER):
        theirs = memory / "stacks-0"
        theirs.touch()
        theirs.chmod(0o666)
    with as_user(VICTIM):
        file = StackFile(theirs)
        file.write()
    assert theirs.stat().st_size == 0 and not file.is_installed


def test_a_recording_of_an_impossible_size_is_not_read(tmp_path):
    path = tmp_path / "recorder-0"
    with open(path, "wb") as file:
        file.truncate(1 << 33)
    found = recording.read_folder(tmp_path)
    assert found.recordings == [] and "above" in found.unread[0]
