"""Summary of the failures of several stages."""

import shlex

import pytest

from tests.tools import failures


def test_each_failure_has_the_command_that_repeats_it(monkeypatch, tmp_path, capsys):
    path = tmp_path / "failed"
    monkeypatch.setenv(failures.STAGE, "mpi-3")
    failures.record(str(path), "tests/a.py::test_b[x y-$1]", "Traceback\nValueError: this one")
    failures.record(str(path), "tests/a.py::test_b[x y-$1]", "CommTimeout: by the first one")
    monkeypatch.delenv(failures.STAGE)
    failures.record(str(path), "tests/c.py::test_d", "assert 1 == 2")
    with open(path, "a", encoding="utf-8") as file:
        # The stages, as the Makefile names them: the first two have named their tests.
        file.write("mpi-3\nunit\nlint\n")
    failures.main(str(path))
    headline, *lines = capsys.readouterr().out.strip().split("\n")
    assert headline == "failed: 3; each again by"
    commands = [line.strip().split("  # ") for line in lines]
    assert [reason for _, *reason in commands] == [["ValueError: this one"], ["assert 1 == 2"], []]
    # As the shell passes the word to make, whose recipe gives it to the shell once more.
    make, stage, word = shlex.split(commands[0][0])
    assert (make, stage) == ("make", "mpi-3")
    assert shlex.split(word.removeprefix("TESTS=").replace("$$", "$")) == [
        "tests/a.py::test_b[x y-$1]"
    ]
    assert commands[2][0] == "make lint"


@pytest.mark.parametrize("exists", [True, False])
def test_without_a_failure_nothing_is_printed(tmp_path, capsys, exists):
    path = tmp_path / "failed"
    if exists:
        path.touch()
    failures.main(str(path))
    assert not capsys.readouterr().out


def test_without_a_run_nothing_is_recorded(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    failures.record(None, "tests/a.py::test_b", "an error")
    assert not list(tmp_path.iterdir())
