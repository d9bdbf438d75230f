"""Addresses of devices on workers, compared with torch's own parser."""

from __future__ import annotations

import pytest
import torch
from torch.distributed import _remote_device

from mpidist.nn.address import Address, parse


@pytest.mark.parametrize(
    ("text", "worker", "device"),
    [
        ("worker1/cpu", "worker1", "cpu"),
        ("worker1", "worker1", "cpu"),
        ("worker1/cuda:3", "worker1", "cuda:3"),
        ("rank:12/cpu", 12, "cpu"),
        ("rank:0", 0, "cpu"),
        ("cpu", None, "cpu"),
        ("cuda:1", None, "cuda:1"),
        (torch.device("cuda", 2), None, "cuda:2"),
    ],
)
def test_reads_as_torch(text, worker, device):
    assert parse(text) == Address(worker, device)
    theirs = _remote_device(text)
    rank = theirs.rank()
    assert (theirs.worker_name() if rank is None else rank, str(theirs.device())) == (
        worker,
        device,
    )


@pytest.mark.parametrize(
    "text",
    [
        "/",
        "/cuda:0",
        "worker1/cuda:0/cuda:1",
        "rank:x/cpu",
        "a:b:c",
        "rank:-1",
        "worker1/",
        "worker1/foo",
        3,
    ],
)
def test_refuses_what_torch_refuses(text):
    with pytest.raises((ValueError, RuntimeError, TypeError)) as ours:
        parse(text)
    with pytest.raises((ValueError, RuntimeError, TypeError)) as theirs:
        _remote_device(text)
    assert type(ours.value) is type(theirs.value) and str(ours.value) == str(theirs.value)
