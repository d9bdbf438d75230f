"""What later jobs find: whole files of this format under this key, and nothing else."""

import json
import os

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
    def refuse(*args):
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", refuse)
    cache.store("table", KEY, TABLE)
    assert list(folder.iterdir()) == []
