"""Errors of one rank on all, with the same words."""

import pytest

from mpidist.checkpoint.verdict import as_checkpoint_errors, summary, together
from mpidist.errors import CheckpointError, RankFailureError
from tests.support import agree, raises_on_all


@pytest.mark.parametrize(
    ("told", "text"),
    [
        (["a"], "a"),
        (["a", "a"], "a"),
        ([None, "a"], "rank 1: a"),
        (["a", "b", "a", None], "ranks 0, 2: a; rank 1: b"),
        ([*["a"] * 9, None], "ranks 0, 1, 2, 3, 4, 5, 6, 7, ...: a"),
    ],
)
def test_each_text_once(told, text):
    assert summary(told) == text


@pytest.mark.mpi
def test_all_raise_what_one_met(group):
    last = group.size - 1

    def fail():
        with together(group, "here"):
            if group.rank == last:
                raise OSError("disk full")

    text = raises_on_all(group, CheckpointError, fail, "disk full")
    agree(group, len(set(group.all_gather_object(text))) == 1, text)
    with together(group, "here"):
        pass


def test_errors_of_the_communication_keep_their_class():
    with pytest.raises(RankFailureError), as_checkpoint_errors("here"):
        raise RankFailureError("gone")
    with pytest.raises(CheckpointError, match="here: no"), as_checkpoint_errors("here"):
        raise ValueError("no")
