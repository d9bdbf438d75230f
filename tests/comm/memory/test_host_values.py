"""Copies in host memory: values, memory of their own, and one transfer for many scalars."""

from __future__ import annotations

import pytest
import torch

from mpidist.comm.memory import host_values
from tests.tools.transfers import CUDA, counted, waits

DTYPES = (torch.float32, torch.int64, torch.bfloat16, torch.complex64)


def scalars(device):
    return [torch.tensor(5, device=device).to(DTYPES[place % 4]) for place in range(40)]


def test_copies_have_the_values_and_memory_of_their_own():
    flat = torch.arange(12.0)
    given = [*scalars("cpu"), flat[2:5], flat.view(3, 4).t(), torch.ones(2, requires_grad=True)]
    copies = host_values.copies_of(given)
    for value, copy in zip(given, copies, strict=True):
        assert torch.equal(value, copy) and copy.dtype is value.dtype and not copy.requires_grad
        assert copy.untyped_storage().nbytes() == copy.nbytes
    assert len({copy.data_ptr() for copy in copies} | {flat.data_ptr()}) == len(copies) + 1


def test_scalars_of_a_device_are_one_transfer_for_each_dtype():
    with counted() as counts:
        given = [*scalars(CUDA), torch.ones(3, device=CUDA), torch.ones(())]
        counts.down.clear()
        copies = host_values.copies_of(given)
        assert len(counts.down) == len(DTYPES) + 1
        assert [(c.device.type, c.dtype, c.shape) for c in copies] == [
            ("cpu", value.dtype, value.shape) for value in given
        ]


@pytest.mark.gpu
def test_scalars_of_a_gpu_wait_once():
    given = [torch.full((), place, device=CUDA) for place in range(40)]
    with waits() as found:
        copies = host_values.copies_of(given)
    assert len(found) == 1
    assert [int(copy) for copy in copies] == list(range(40))
