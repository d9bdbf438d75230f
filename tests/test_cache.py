"""Cache for later jobs: whole files of this format under this key only."""

import json
import logging
import os
import stat

import pytest

from mpidist import cache

KEY = {"library": "MPI 1.0", "devices": 2}
TABLE = {"Bcast": "works"}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MPIDIST_CACHE", str(tmp_path / "deep" / "cache"))
    return tmp_path / "deep" / "cache"


def test_the_folder_is_the_users_choice(monkeypatch, tmp_path, folder):
    assert cache.folder() == folder
    monkeypatch.delenv("MPIDIST_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert str(cache.folder()) == "/x/mpidist"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.folder() == tmp_path / ".cache" / "mpidist"


def test_a_value_comes_back_under_its_key_alone(folder):
    cache.store("table", KEY, TABLE)
    assert cache.load("table", KEY) == TABLE
    assert cache.load("table", {**KEY, "devices": 1}) is None
    assert cache.load("other", KEY) is None
    assert len(list(folder.iterdir())) == 1  # no unfinished file


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"format": 1}', b"\xff\xfe"])
def test_a_broken_file_is_nothing_and_is_written_again(folder, text):
    cache.store("table", KEY, TABLE)
    (path,) = folder.iterdir()
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert cache.load("table", KEY) is None
    cache.store("table", KEY, TABLE)
    assert cache.load("table", KEY) == TABLE


@pytest.mark.parametrize("change", [{"format": 0}, {"key": {**KEY, "library": "MPI 2.0"}}])
def test_a_file_of_another_format_or_key_is_nothing(folder, change):
    cache.store("table", KEY, TABLE)
    (path,) = folder.iterdir()
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert cache.load("table", KEY) is None


def test_a_folder_that_cannot_be_written_is_no_error(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MPIDIST_CACHE", str(tmp_path / "file"))
    cache.store("table", KEY, TABLE)
    assert cache.load("table", KEY) is None


def test_what_cannot_take_its_name_leaves_nothing_behind(monkeypatch, folder):
    def refuse(*args, **kwargs):
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", refuse)
    cache.store("table", KEY, TABLE)
    assert list(folder.iterdir()) == []


# --- files that another user could have written ---


@pytest.fixture
def path(folder, monkeypatch):
    """Return the path of an existing file, in a process that has logged no warning yet."""
    monkeypatch.setattr(cache, "_warned", set())
    cache.store("table", KEY, TABLE)
    (path,) = folder.iterdir()
    return path


def test_what_is_made_is_this_users_alone(folder, path):
    before = os.umask(0)
    try:
        cache.store("table", {"another": 1}, TABLE)
    finally:
        os.umask(before)
    assert [stat.S_IMODE(held.stat().st_mode) for held in (folder.parent, folder)] == [0o700, 0o700]
    assert {stat.S_IMODE(held.stat().st_mode) for held in folder.iterdir()} == {0o600}


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
@pytest.mark.parametrize("of", ["file", "folder"])
def test_what_others_may_write_is_ignored_with_one_warning(folder, path, caplog, mode, of):
    held = path if of == "file" else folder
    held.chmod(mode if of == "file" else mode | 0o111)
    with caplog.at_level(logging.WARNING):
        assert cache.load("table", KEY) is None
        assert cache.load("table", KEY) is None
    (record,) = caplog.records
    assert (
        f"{held} may be written by other users" in record.message
        and f"chmod go-w {held}" in record.message
    )
    held.chmod(0o700)
    assert cache.load("table", KEY) == TABLE


def test_nothing_is_stored_where_others_may_write(folder, path, caplog):
    folder.chmod(0o777)
    assert not cache.store("table", {"another": 1}, TABLE)
    assert list(folder.iterdir()) == [path] and "may be written by other users" in caplog.text


@pytest.mark.parametrize("of", [stat.S_ISREG, stat.S_ISDIR])
def test_what_belongs_to_another_user_is_ignored_with_one_warning(path, caplog, monkeypatch, of):
    fstat = os.fstat

    def fake_fstat(handle):
        found = fstat(handle)
        return os.stat_result([*found[:4], 12345, *found[5:]]) if of(found.st_mode) else found

    monkeypatch.setattr(os, "fstat", fake_fstat)
    assert cache.load("table", KEY) is None
    (record,) = caplog.records
    assert "belongs to user 12345" in record.message and "MPIDIST_CACHE" in record.message


def test_roots_measurements_are_read(path, monkeypatch):
    fstat = os.fstat
    monkeypatch.setattr(
        os, "fstat", lambda handle: os.stat_result([*fstat(handle)[:4], 0, *fstat(handle)[5:]])
    )
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    assert cache.load("table", KEY) == TABLE


def test_a_link_in_a_files_place_is_not_followed(path, tmp_path):
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert cache.load("table", KEY) is None
    cache.store("table", KEY, {"Bcast": "new"})
    assert cache.load("table", KEY) == {"Bcast": "new"}
    assert json.loads((tmp_path / "elsewhere").read_text())["value"] == TABLE


def test_the_folder_itself_may_be_a_link_to_one_of_this_user(folder, path, tmp_path):
    folder.rename(tmp_path / "scratch")
    folder.symlink_to(tmp_path / "scratch")
    assert cache.load("table", KEY) == TABLE


def test_a_pipe_is_nothing_and_is_not_waited_for(path):
    path.unlink()
    os.mkfifo(path)
    assert cache.load("table", KEY) is None


def test_a_huge_file_is_not_read(path):
    path.write_text(path.read_text() + " " * (1 << 20))
    assert cache.load("table", KEY) is None


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"format": 1, "key": ' + "9" * 10_000 + "}", "null", '"value"']
)
def test_json_that_is_hostile_is_nothing(path, text):
    path.write_text(text)
    assert cache.load("table", KEY) is None
