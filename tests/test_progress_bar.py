"""Progress bars: on rank 0 with a terminal alone; items and results as without one."""

import io
import time
from types import SimpleNamespace

import pytest

from mpidist import progress_bar
from tests.tools.support import missing


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    try:
        import rich  # noqa: F401
    except ImportError:
        missing("rich is not installed")
    shown = Terminal()
    # pytest sets sys.stderr itself between the fixture and the test.
    monkeypatch.setattr(progress_bar, "sys", SimpleNamespace(stderr=shown, stdout=shown))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv(progress_bar.VARIABLE, raising=False)
    return shown


def test_items_are_counted_in_a_terminal_on_rank_0(terminal):
    seen = []
    for item in progress_bar.track([3, 4], "sizes", 0):
        seen.append(item)
    assert seen == [3, 4]
    text = terminal.getvalue()
    assert "sizes" in text and "50%" in text and "100%" in text


def test_what_the_work_prints_goes_into_a_file_or_above_the_bar(terminal, monkeypatch, capsys):
    for _ in progress_bar.track([1], "sizes", 0):
        print("a row")
    assert "a row" in terminal.getvalue() and capsys.readouterr().out == ""
    monkeypatch.setattr(progress_bar.sys, "stdout", io.StringIO())
    for _ in progress_bar.track([1], "sizes", 0):
        print("another row")
    assert "another row" not in terminal.getvalue() and capsys.readouterr().out == "another row\n"


def test_other_ranks_pipes_and_machines_without_rich_see_nothing(terminal, monkeypatch):
    assert list(progress_bar.track([1], "sizes", 1)) == [1] and terminal.getvalue() == ""
    monkeypatch.setattr(progress_bar.importlib.util, "find_spec", lambda name: None)
    with progress_bar.spinner("saves", 0, 0.0):
        pass
    assert list(progress_bar.track([1], "sizes", 0)) == [1] and terminal.getvalue() == ""
    monkeypatch.undo()
    pipe = io.StringIO()
    monkeypatch.setattr(progress_bar, "sys", SimpleNamespace(stderr=pipe, stdout=pipe))
    monkeypatch.delenv(progress_bar.VARIABLE, raising=False)
    assert list(progress_bar.track([1], "sizes", 0)) == [1] and pipe.getvalue() == ""
    # mpidist bench has a terminal, and its ranks have pipes to the launcher.
    monkeypatch.setenv(progress_bar.VARIABLE, "1")
    assert list(progress_bar.track([1], "sizes", 0)) == [1] and "sizes" in pipe.getvalue()


def test_a_long_operation_has_a_spinner_and_a_short_one_has_none(terminal):
    with progress_bar.spinner("saves step 3", 0, 60.0):
        pass
    assert terminal.getvalue() == ""
    deadline = time.monotonic() + 60
    with progress_bar.spinner("saves step 4", 0, 0.0):
        while "saves step 4" not in terminal.getvalue():
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_an_error_of_the_work_passes(terminal):
    with pytest.raises(ValueError, match="disk"), progress_bar.spinner("saves", 0, 0.0):
        raise ValueError("disk")
    with pytest.raises(ValueError, match="disk"), progress_bar.bar("sizes", 2, 0):
        raise ValueError("disk")
