"""``torch.distributed.Work`` objects over native works."""

import time
from datetime import timedelta
from typing import ClassVar

import pytest
import torch

from mpidist.c10d.work import TorchWork, WorkList
from mpidist.comm.execution.work import Work
from mpidist.errors import CommTimeout


def test_a_failed_works_future_is_an_error_for_torchs_cpp_as_well():
    # torch's reducer reads the value in C++. If only Python knew of the error, the reducer would
    # take the exception for the gradients.
    for fails_first in (True, False):
        native = Work("all_reduce", [torch.ones(3)], "rank 0 of 2")
        if fails_first:
            native.end(None, CommTimeout("is past its timeout"))
        future = TorchWork(native, [torch.ones(3)]).get_future()
        both = torch.futures.collect_all([future])
        if not fails_first:
            native.end(None, CommTimeout("is past its timeout"))()
        with pytest.raises(RuntimeError, match="CommTimeout: is past its timeout"):
            both.wait()
        with pytest.raises(RuntimeError, match="is past its timeout"):
            future.wait()


def test_an_ended_works_future_has_its_tensors():
    native = Work("all_reduce", [torch.ones(3)], "rank 0 of 2")
    result = [torch.full((3,), 2.0)]
    future = TorchWork(native, result).get_future()
    native.end(native.tensors, None)()
    assert future.wait() is result and torch.futures.wait_all([future])[0] is result


class _Slow(Work):
    """A work that notes its limits and ends late."""

    limits: ClassVar[list[float]] = []

    def wait(self, timeout=None):
        self.limits.append(timeout)
        time.sleep(0.05)
        self.end(self.tensors, None)
        return super().wait(timeout)


def test_works_of_a_list_have_one_limit_together():
    works = WorkList([_Slow("all_reduce", (), "") for _ in range(3)])
    _Slow.limits.clear()
    assert works.wait(timedelta(seconds=30))
    assert 30 >= _Slow.limits[0] > _Slow.limits[1] > _Slow.limits[2]
    late = WorkList([WorkList([Work("all_reduce", (), "rank 0 of 2: all_reduce")])])
    with pytest.raises(CommTimeout, match=r"^rank 0 of 2: all_reduce did not end within 0\.01 s$"):
        late.wait(timedelta(seconds=0.01))
