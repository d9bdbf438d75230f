"""``MPIDIST_DETERMINISTIC``: its values, and the errors of ranks that differ."""

from __future__ import annotations

import pytest

from mpidist.comm.mpi import determinism
from mpidist.comm.mpi.determinism import ANY, EXACT, ORDER, UNREADABLE


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        (None, ANY),
        ("", ANY),
        ("0", ANY),
        ("order", ORDER),
        ("Order", UNREADABLE),
        ("1", UNREADABLE),
    ],
)
def test_the_variables_words(monkeypatch, word, expected):
    monkeypatch.delenv(determinism.ENV_DETERMINISTIC, raising=False)
    if word is not None:
        monkeypatch.setenv(determinism.ENV_DETERMINISTIC, word)
    assert determinism.SETTING.code() == expected
    assert determinism.is_exact() is (expected == EXACT)


def test_ranks_that_differ_and_unknown_words_are_named():
    assert (
        determinism.SETTING.problem([ANY] * 3) is None
        and determinism.SETTING.problem([ORDER] * 2) is None
    )
    assert determinism.SETTING.problem([ORDER, ORDER, ANY]) == (
        "MPIDIST_DETERMINISTIC must be 'order', 'exact', '0' or unset, the same on all ranks; it "
        "is unset or '0' on rank 2, 'order' on rank 0"
    )
    assert "another word on rank 1" in determinism.SETTING.problem([ORDER, UNREADABLE])
    assert "another word on rank 0" in determinism.SETTING.problem([UNREADABLE] * 2)
