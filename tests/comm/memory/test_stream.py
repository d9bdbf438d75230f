"""Streams: which tensors are kept for the current one. On a device: with ``make gpu``."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mpidist.comm.memory import stream
from mpidist.comm.memory.stream import device_at


@pytest.mark.parametrize("is_cuda", [True, False])
def test_memory_of_a_device_alone_is_kept_for_the_current_stream(monkeypatch, is_cuda):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    kept = []
    tensor = SimpleNamespace(is_cuda=is_cuda, device="cuda:1", record_stream=kept.append)
    assert stream.used_here(tensor) is tensor
    assert kept == ["stream of cuda:1"] * is_cuda


def test_the_device_of_an_operation_is_its_first_tensors_on_one(monkeypatch):
    monkeypatch.setattr(stream, "_cuda_device", lambda device: f"streams of {device}")
    host = SimpleNamespace(is_cuda=False, device="cpu")
    device = SimpleNamespace(is_cuda=True, device="cuda:1")
    assert stream.device_of([]) is None and stream.device_of([host]) is None
    assert stream.device_of([host, device]) == "streams of cuda:1"


def test_memory_of_the_host_has_no_device():
    assert device_at(None) is None and device_at(torch.device("cpu")) is None
