"""Answers of owners to a ``DistributedOptimizer``: valid ones, and errors that name the owner."""

from __future__ import annotations

import pytest
import torch

from mpidist.errors import FrameError
from mpidist.optim import answers
from mpidist.rpc.rref import RRef
from mpidist.rpc.worker import WorkerInfo

OWNER, OTHER = WorkerInfo("owner", 1), WorkerInfo("other", 2)


def reference(owner=OWNER):
    """Return a reference without a worker's tables."""
    made = RRef.__new__(RRef)
    made._owner = owner
    return made


@pytest.mark.parametrize(
    "answer",
    [
        None,
        1,
        (),
        (None, [[1]], [{}], {}),
        (reference(OTHER), [[1]], [{}], {}),
        (reference(), [[1]], [{}]),
        (reference(), None, [{}], {}),
        (reference(), [[1], [1]], [{}], {}),
        (reference(), [[1]], [{}, {}], {}),
        (reference(), [[1]], [{}], None),
        (reference(), [[1]], [{}], {1: 1}),
        (reference(), [[]], [{}], {}),
        (reference(), [[1, 1]], [{}], {}),
        (reference(), [[-1]], [{}], {}),
        (reference(), [[True]], [{}], {}),
        (reference(), [[1.0]], [{}], {}),
        (reference(), [[1 << 40]], [{}], {}),  # the caller would number them all
        (reference(), [torch.ones(1)], [{}], {}),
        (reference(), [[1]], [{"params": []}], {}),  # would replace the references
        (reference(), [[1]], [{"param_names": []}], {}),
        (reference(), [[1]], [{1: 1}], {}),
        (reference(), [[1]], [[("lr", 1)]], {}),
    ],
)
def test_an_optimizer_of_another_form(answer):
    with pytest.raises(
        FrameError, match=r"^owner \(rank 1\) has answered with something else than"
    ):
        answers.construction(OWNER, answer, [1])


def test_an_optimizer():
    made = (reference(), [[1, 0], [5]], [{"lr": 1.0}, {}], {"lr": 0.5})
    assert answers.construction(OWNER, made, [2, 1]) == made
    assert answers.group(OWNER, ([3], {"lr": torch.ones(())}), 1)[0] == [3]


@pytest.mark.parametrize("answer", [None, [], {"0": {}}, {-1: {}}, {2: {}}, {True: {}}])
def test_a_state_of_another_form(answer):
    with pytest.raises(FrameError, match=r"^owner \(rank 1\)"):
        answers.state(OWNER, answer, 2)
    assert answers.state(OWNER, {0: {}, 1: {}}, 2) == {0: {}, 1: {}}
