"""Replacement of a file as a whole."""

import contextlib
import os
import resource
import threading

import pytest

from mpidist.whole_file import problem_of, replacing


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_name_appears_with_the_whole_content(tmp_path):
    path = tmp_path / "state.pt"
    for content in (b"first", b"second"):
        before = path.read_bytes() if path.exists() else None
        with replacing(path) as file:
            file.write(content)
            file.flush()
            assert (path.read_bytes() if path.exists() else None) == before
        assert path.read_bytes() == content
    assert names(tmp_path) == ["state.pt"]


def test_an_error_leaves_the_old_file_and_no_part(tmp_path):
    path = tmp_path / "state.pt"
    path.write_bytes(b"old")

    def fail():
        with replacing(path) as file:
            file.write(b"half")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert path.read_bytes() == b"old" and names(tmp_path) == ["state.pt"]


def test_planted_links_are_not_followed(tmp_path):
    """Neither under the name that an earlier version wrote first, nor under the final one."""
    victim, path = tmp_path / "victim", tmp_path / "state.pt"
    victim.write_bytes(b"precious")
    (tmp_path / "state.pt.part").symlink_to(victim)
    path.symlink_to(victim)
    with replacing(path) as file:
        file.write(b"new")
    assert victim.read_bytes() == b"precious"
    assert path.read_bytes() == b"new" and not path.is_symlink()


def test_a_guessed_name_is_refused(tmp_path, monkeypatch):
    class Known:
        hex = "0"

    monkeypatch.setattr("mpidist.whole_file.uuid.uuid4", Known)
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    (tmp_path / ".state.pt.0.part").symlink_to(victim)
    with pytest.raises(FileExistsError), replacing(tmp_path / "state.pt") as file:
        file.write(b"new")
    assert victim.read_bytes() == b"precious"


def test_a_file_that_cannot_be_made_is_named_without_its_part(tmp_path):
    path = tmp_path / "gone" / "state.pt"
    with pytest.raises(FileNotFoundError) as caught, replacing(path) as file:
        file.write(b"content")
    assert str(caught.value) == f"[Errno 2] No such file or directory: '{path}'"


def test_a_write_without_room_names_its_file(tmp_path):
    path = tmp_path / "state.pt"
    with (
        without_room(),
        pytest.raises(OSError, match=f"File too large: '{path}'"),
        replacing(path) as file,
    ):
        file.write(b"content")
    assert names(tmp_path) == []


@contextlib.contextmanager
def without_room():
    """Let no file of this process have a byte, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_would_hinder_a_later_write_is_said(tmp_path):
    path = tmp_path / "state.pt"
    assert problem_of(path) == ""
    assert problem_of(tmp_path) == f"{tmp_path} is a folder"
    gone = tmp_path / "gone"
    assert problem_of(gone / "state.pt") == f"{gone}: No such file or directory"
    with without_room():
        assert problem_of(path) == f"{tmp_path}: File too large"
    assert names(tmp_path) == []


def test_a_device_and_a_pipe_are_not_replaced(tmp_path):
    """Where root writes to ``/dev/null``, or to ``/dev/stdout``, which is a link."""
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    for path in (pipe, link):
        words = f"pipe, which no file can replace: '{path}'"
        with pytest.raises(OSError, match=words), replacing(path) as file:
            file.write(b"content")
        assert problem_of(path).startswith(f"{path}: A device or a pipe")
    assert pipe.is_fifo() and link.is_symlink() and names(tmp_path) == ["link", "pipe"]


def test_two_writers_do_not_mix(tmp_path):
    path, both = tmp_path / "state.pt", threading.Barrier(2)

    def write(byte):
        with replacing(path) as file:
            both.wait()
            for _ in range(100):
                file.write(byte * 1000)
            both.wait()

    threads = [threading.Thread(target=write, args=(byte,)) for byte in (b"a", b"b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_bytes() in (b"a" * 100_000, b"b" * 100_000) and names(tmp_path) == ["state.pt"]


def test_permissions_follow_the_umask(tmp_path):
    former = os.umask(0o027)
    try:
        with replacing(tmp_path / "state.pt"):
            pass
    finally:
        os.umask(former)
    assert (tmp_path / "state.pt").stat().st_mode & 0o777 == 0o640
