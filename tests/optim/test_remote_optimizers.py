"""Local optimizers on owners: answers that do not fit what was asked."""

from types import SimpleNamespace

import pytest

from mpidist.optim import remote_optimizers
from mpidist.optim.remote_optimizers import RemoteOptimizers
from mpidist.rpc.worker import WorkerInfo

OWNER = WorkerInfo("b", 1)


@pytest.mark.parametrize(
    ("counts", "settings", "words"),
    [
        ([[1]], [{}], "parameters of 1 groups and the settings of 1, and has part in 2"),
        ([[1], [1]], [{}], "parameters of 2 groups and the settings of 1, and has part in 2"),
        ([[1], [1], [1]], [{}] * 3, "parameters of 3 groups"),
        ([[1], []], [{}, {}], r"tells \[\] as the numbers of parameters of 1 references"),
    ],
)
def test_an_answer_of_other_groups_is_named(monkeypatch, counts, settings, words):
    def answer(what, function, calls):
        return {worker: (None, counts, settings, {}) for worker in calls}

    monkeypatch.setattr(remote_optimizers, "call_all", answer)
    reference = SimpleNamespace(owner=lambda: OWNER)
    with pytest.raises(ValueError, match=f"name=b.*{words}"):
        RemoteOptimizers("SGD", True, (), {}).make([([reference], {}), ([reference], {})])
