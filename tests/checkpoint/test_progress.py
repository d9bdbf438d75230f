"""Progress of a job: the highest step in a file, which a failed write does not harm."""

import pytest

from mpidist.checkpoint import progress


def test_the_highest_step_is_noted(tmp_path, monkeypatch):
    path = tmp_path / "progress"
    monkeypatch.delenv(progress.VARIABLE, raising=False)
    progress.note(3)
    assert not list(tmp_path.iterdir()) and progress.read(path) == -1
    monkeypatch.setenv(progress.VARIABLE, str(path))
    for step, highest in ((0, 0), (7, 7), (5, 7), (12, 12)):
        progress.note(step)
        assert progress.read(path) == highest
    for text in ("", "x", "-3"):
        path.write_text(text)
        assert progress.read(path) == -1


def test_a_file_that_cannot_be_written_is_a_warning(tmp_path, monkeypatch):
    monkeypatch.setenv(progress.VARIABLE, str(tmp_path / "gone" / "progress"))
    with pytest.warns(UserWarning, match="step 3 cannot be noted in MPIDIST_PROGRESS"):
        progress.note(3)
