"""Description of an operation: whether MPI can work on its tensors, its results, its executors."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

from mpidist.comm.execution.operation import Operation, call, call_on_device, refuse
from mpidist.comm.execution.progress import is_at_once
from mpidist.comm.memory.fence import StreamFence


@pytest.mark.parametrize("place", ["inputs", "outputs"])
def test_all_tensors_must_be_contiguous_in_host_memory(place):
    fine, strided = torch.ones(2, 3), torch.ones(3, 2).t()
    assert Operation("a", refuse, **{place: (fine, fine)}).is_direct()
    for wrong in (strided, torch.ones(2, device="meta"), torch.ones(2, dtype=torch.cfloat).conj()):
        assert not Operation("a", refuse, **{place: (fine, wrong)}).is_direct()
    both = (strided,)
    assert not Operation("a", refuse, both, both).is_direct() and Operation("a", refuse).is_direct()


def test_a_works_value_is_what_was_named_else_written_else_read():
    read, written, named = (torch.ones(1),), (torch.ones(2),), (torch.ones(3),)
    assert Operation("a", refuse, read, written, results=named).work_results() is named
    assert Operation("a", refuse, read, written).work_results() is written
    assert Operation("a", refuse, read).work_results() is read


def test_what_a_function_issues_has_ended_when_its_calls_return():
    assert call(None, (), (), lambda: (is_at_once(), "result")) == (True, "result")
    assert not is_at_once() and refuse(None, (), ()) is None
    with pytest.raises(ZeroDivisionError):
        call(None, (), (), lambda: 1 / 0)
    assert not is_at_once()


def test_a_function_on_a_device_follows_the_issuers_stream_and_leaves_an_event():
    steps, events = [], []
    ready = SimpleNamespace(block_current_stream=lambda: steps.append("waits"))

    def record():
        steps.append("records")
        return "event"

    device = SimpleNamespace(
        record_current_stream=record, leave_default_stream=lambda: steps.append("own stream")
    )
    fence = StreamFence(device, (), ready)

    def run():
        result = call_on_device(None, (), (), lambda: steps.append("runs") or 7, fence, events)
        assert result == 7

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert steps == ["own stream", "waits", "runs", "records"] and events == ["event"]
    steps.clear()
    run()  # the issuer's own stream needs no wait
    assert steps == ["runs", "records"]
