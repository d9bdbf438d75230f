"""``torch.distributed.Work`` objects over native works."""

import pytest
import torch

from mpidist.c10d.work import TorchWork
from mpidist.comm.execution.work import Work
from mpidist.errors import CommTimeout


def test_a_failed_works_future_is_an_error_for_torchs_cpp_as_well():
    # torch's reducer reads the value in C++. If only Python knew of the error, the reducer would
    # take the exception for the gradients.
    for fails_first in (True, False):
        native = Work("all_reduce", [torch.ones(3)], "rank 0 of 2")
        if fails_first:
            native.set_exception(CommTimeout("is past its timeout"))
        future = TorchWork(native, [torch.ones(3)]).get_future()
        both = torch.futures.collect_all([future])
        if not fails_first:
            native.set_exception(CommTimeout("is past its timeout"))
        with pytest.raises(RuntimeError, match="CommTimeout: is past its timeout"):
            both.wait()
        with pytest.raises(RuntimeError, match="is past its timeout"):
            future.wait()


def test_an_ended_works_future_has_its_tensors():
    native = Work("all_reduce", [torch.ones(3)], "rank 0 of 2")
    result = [torch.full((3,), 2.0)]
    future = TorchWork(native, result).get_future()
    native.set_result(native.tensors)
    assert future.wait() is result and torch.futures.wait_all([future])[0] is result
