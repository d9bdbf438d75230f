"""Names of calls in the recorder: the same at the caller and where the call is executed."""

from __future__ import annotations

import pytest
import torch

from mpidist.comm.recorder import recorder
from mpidist.rpc.calls.call_entries import CallEntries
from mpidist.rpc.names import callee
from mpidist.rpc.names.callee import COUNT


@pytest.fixture
def listed(monkeypatch):
    names = []
    made = recorder.Off()
    made.signature = lambda kind, operation: names.append((kind, operation)) or 8 + len(names)
    monkeypatch.setattr(recorder, "of_process", lambda: made)
    return names


def test_both_sides_record_a_function_by_its_name(listed):
    calls, handled = CallEntries("call"), CallEntries("handler", callee.title)
    for function in (max, torch.add, callee.method("step")):
        _, name = callee.wire_name(function)
        assert calls[name] == calls[name] and handled[name[COUNT.size :]]
    assert [name for _, name in listed] == [
        "max", "max", "torch.add", "torch.add", "step", "step",
    ]  # fmt: skip


def test_other_requests_and_functions_by_value_have_names(listed):
    calls, handled = CallEntries("call"), CallEntries("handler", callee.title)
    assert calls["to_here"] and calls[callee.UNNAMED] and handled["<lambda>"] and handled[dict]
    assert [name for _, name in listed] == ["to_here", "unnamed function", "<lambda>", "dict"]
