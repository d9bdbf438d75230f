"""``MPIDIST_TRUST``: its values, and the errors of ranks that differ."""

from __future__ import annotations

import pytest

from mpidist.comm.mpi import trust


@pytest.mark.parametrize(
    ("word", "expected"), [(None, False), ("", False), ("pickle", False), ("data", True)]
)
def test_the_variable_says_whether_pickles_are_read(monkeypatch, word, expected):
    monkeypatch.delenv(trust.ENV_TRUST, raising=False)
    if word is not None:
        monkeypatch.setenv(trust.ENV_TRUST, word)
    assert trust.is_data_only() is expected


@pytest.mark.parametrize("word", ["1", "Data", "data ", "none"])
def test_another_value_is_an_error_that_names_the_variable_and_the_value(monkeypatch, word):
    monkeypatch.setenv(trust.ENV_TRUST, word)
    with pytest.raises(
        ValueError, match=f"MPIDIST_TRUST must be 'pickle' or 'data', or unset; got '{word}'"
    ):
        trust.is_data_only()


@pytest.mark.parametrize("asked", [True, False])
def test_the_callers_choice_precedes_the_variable(monkeypatch, asked):
    monkeypatch.setenv(trust.ENV_TRUST, "pickle" if asked else "data")
    assert trust.is_data_only(asked) is asked


def test_ranks_with_one_setting_have_no_problem():
    assert trust.SETTING.problem([trust.PICKLE] * 3) is None
    assert trust.SETTING.problem([trust.DATA] * 3) is None


def test_ranks_that_differ_are_named():
    text = trust.SETTING.problem([trust.DATA, trust.PICKLE, trust.DATA])
    assert text is not None and "'pickle' or unset on rank 1" in text and "'data' on rank 0" in text


def test_an_unknown_value_is_an_error_on_one_rank_and_on_all():
    assert "another word on rank 1" in (trust.SETTING.problem([trust.DATA, trust.UNREADABLE]) or "")
    assert "another word on rank 0" in (trust.SETTING.problem([trust.UNREADABLE] * 2) or "")
