"""Names and ranks of workers."""

import pytest

from mpidist.errors import MpidistError
from mpidist.rpc.worker import WorkerInfo


def test_names_and_ranks_are_checked():
    assert repr(WorkerInfo("a-b_c:1", 3)) == "WorkerInfo(id=3, name=a-b_c:1)" and WorkerInfo(
        "a", 1
    ) == WorkerInfo("a", 1)
    for wrong in ("a*", " ", "", "x" * 128):
        with pytest.raises(MpidistError):
            WorkerInfo(wrong, 0)
