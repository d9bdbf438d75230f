"""Counts past MPI's limit, and host copies of what MPI cannot touch in place."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mpidist.comm import buffer


@given(count=st.integers(0, 5000), limit=st.integers(1, 700))
def test_pieces_cover_everything_once(count, limit):
    spans = list(buffer.pieces(count, limit))
    assert [place for start, length in spans for place in range(start, start + length)] == list(range(count))
    assert all(length <= limit for _, length in spans)


def test_nothing_is_one_empty_piece():
    assert list(buffer.pieces(0)) == [(0, 0)]


@pytest.mark.parametrize("count", [2**31 - 1, 2**31, 2**31 + 1, 5 * 2**31 + 7])
def test_pieces_past_a_c_int(count):
    spans = list(buffer.pieces(count))
    assert sum(length for _, length in spans) == count
    assert all(start + length <= count and length < 2**31 for start, length in spans)
    assert [start for start, _ in spans[1:]] == [start + length for start, length in spans[:-1]]


def test_every_dtype_that_mpi_adds_has_mpis_size():
    for dtype, datatype in buffer.datatypes().items():
        assert datatype.Get_size() == dtype.itemsize, dtype


def test_a_contiguous_cpu_tensor_is_its_own_twin():
    tensor = torch.arange(6.0)
    copies = buffer.HostCopies((tensor,), (tensor,))
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
        lambda: torch.arange(8.0).view(1, 2, 2, 2).contiguous(memory_format=torch.channels_last).permute(0, 2, 3, 1)[..., :1],
        lambda: torch.complex(torch.arange(4.0), torch.ones(4)).conj(),
    ],
)
def test_strided_tensors_go_out_and_come_back(make):
    tensor = make()
    expected = tensor.clone() + 1
    copies = buffer.HostCopies((tensor,), (tensor,))
    (inside,), (outside,) = copies.load()
    assert inside is outside and inside is not tensor and buffer.is_direct(inside)
    outside += 1
    copies.store()
    assert torch.equal(tensor, expected)


def test_an_expanded_output_is_written_once_for_each_element_in_memory():
    base = torch.zeros(3, 1)
    wide = base.expand(3, 5)
    copies = buffer.HostCopies((), (wide,))
    _, (host,) = copies.load()
    host.copy_(torch.arange(3.0)[:, None].expand(3, 5))
    copies.store()
    assert torch.equal(base, torch.arange(3.0)[:, None])


def test_an_output_alone_is_not_read():
    tensor = torch.arange(12.0).view(3, 4).t()
    _, (host,) = buffer.HostCopies((), (tensor,)).load()
    assert host.shape == tensor.shape and host.is_contiguous()
