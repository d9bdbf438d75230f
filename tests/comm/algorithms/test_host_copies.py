"""Host copies of strided tensors; those of device tensors are tested in test_device_collectives."""

import pytest
import torch

from mpidist.comm.algorithms.host_copies import HostCopies
from mpidist.comm.memory import buffer


def test_a_contiguous_cpu_tensor_is_not_copied():
    tensor = torch.arange(6.0)
    copies = HostCopies((tensor,), (tensor,))
    (a,), (b,) = copies.load()
    assert a is tensor and b is tensor
    copies.store()
    assert torch.equal(tensor, torch.arange(6.0))


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(12.0).view(3, 4).t(),
        lambda: torch.arange(12.0)[::2],
        lambda: torch.arange(24.0).view(2, 3, 4)[:, 1],
        lambda: (
            torch.arange(8.0)
            .view(1, 2, 2, 2)
            .contiguous(memory_format=torch.channels_last)
            .permute(0, 2, 3, 1)[..., :1]
        ),
        lambda: torch.complex(torch.arange(4.0), torch.ones(4)).conj(),
    ],
)
def test_strided_tensors_are_copied_and_written_back(make):
    tensor = make()
    expected = tensor.clone() + 1
    copies = HostCopies((tensor,), (tensor,))
    (inside,), (outside,) = copies.load()
    assert inside is outside and inside is not tensor and buffer.is_direct(inside)
    outside += 1
    copies.store()
    assert torch.equal(tensor, expected)


def test_an_expanded_output_is_written_once_for_each_element_in_memory():
    base = torch.zeros(3, 1)
    wide = base.expand(3, 5)
    copies = HostCopies((), (wide,))
    _, (host,) = copies.load()
    host.copy_(torch.arange(3.0)[:, None].expand(3, 5))
    copies.store()
    assert torch.equal(base, torch.arange(3.0)[:, None])


def test_an_output_alone_is_not_read():
    tensor = torch.arange(12.0).view(3, 4).t()
    _, (host,) = HostCopies((), (tensor,)).load()
    assert host.shape == tensor.shape and host.is_contiguous()
