"""The stand-in for pytest-mpi skips what pytest-mpi would skip."""

from types import SimpleNamespace

import pytest

from mpidist.comm import runtime
from tests.mpi_marks import MpiMarks


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
