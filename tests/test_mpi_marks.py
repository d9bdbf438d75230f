"""The stand-in for pytest-mpi skips what pytest-mpi would skip."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from mpidist.comm import runtime
from tests.mpi_marks import MpiMarks, asked_for, may_hold


@pytest.mark.parametrize(
    ("with_mpi", "only_mpi", "skipped"), [(False, False, ["mpi"]), (True, False, []), (False, True, ["plain"]), (True, True, [])]
)
def test_options_choose(with_mpi, only_mpi, skipped):
    marked = []
    items = [
        SimpleNamespace(keywords={name: True}, add_marker=lambda mark, name=name: marked.append(name))
        for name in ("plain", "mpi")
    ]
    options = {"--with-mpi": with_mpi, "--only-mpi": only_mpi}
    MpiMarks().pytest_collection_modifyitems(SimpleNamespace(getoption=options.get), items)
    assert marked == skipped


@pytest.mark.parametrize(("least", "is_skipped"), [(2, False), (3, True)])
def test_too_few_ranks_skip(monkeypatch, least, is_skipped):
    monkeypatch.setattr(runtime, "world", lambda: SimpleNamespace(size=2))
    item = SimpleNamespace(iter_markers=lambda name: [pytest.mark.mpi(min_size=least).mark])
    try:
        MpiMarks().pytest_runtest_setup(item)
    except pytest.skip.Exception:
        assert is_skipped
    else:
        assert not is_skipped


@pytest.mark.parametrize(
    ("expression", "marks"),
    [
        ("", set()),
        ("mpi and not gpu and not timing", {"mpi"}),
        ("slow and not mpi", {"slow"}),
        ("not mpi and not slow", set()),
        ("mpi or slow", set()),
        ("not (gpu or mpi)", set()),
    ],
)
def test_marks_without_which_nothing_is_chosen(expression, marks):
    assert asked_for(expression) == marks


def test_files_without_a_mark_are_left_out(tmp_path):
    file = tmp_path / "test_it.py"
    file.write_text("pytestmark = pytest.mark.mpi(min_size=2)")
    (tmp_path / "conftest.py").touch()
    assert may_hold(file, "mpi and not gpu") and may_hold(file, "not slow") and may_hold(file, "mpi or slow")
    assert not may_hold(file, "slow and not mpi") and may_hold(tmp_path / "conftest.py", "slow")


def test_a_file_of_tests_applies_its_marks_itself():
    """``may_hold`` reads one file: a mark that came from elsewhere would leave its tests out unseen."""
    elsewhere = [path for path in Path(__file__).parent.rglob("*.py") if not path.name.startswith("test_")]
    texts = {path: path.read_text(encoding="utf-8") for path in elsewhere if path.name != "mpi_marks.py"}
    assert len(texts) > 20 and not [path for path, text in texts.items() if "mark.mpi" in text or "mark.slow" in text]
