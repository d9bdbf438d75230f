"""Pieces of counts that exceed a C int."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mpidist.comm.memory import buffer
from mpidist.comm.mpi.library import MPI


@given(count=st.integers(0, 5000), limit=st.integers(1, 700))
def test_pieces_cover_everything_once(count, limit):
    spans = list(buffer.pieces(count, limit))
    assert [place for start, length in spans for place in range(start, start + length)] == list(
        range(count)
    )
    assert all(length <= limit for _, length in spans)


def test_nothing_is_one_empty_piece():
    assert list(buffer.pieces(0)) == [(0, 0)]


@pytest.mark.parametrize("count", [2**31 - 1, 2**31, 2**31 + 1, 5 * 2**31 + 7])
def test_pieces_past_a_c_int(count):
    spans = list(buffer.pieces(count))
    assert sum(length for _, length in spans) == count
    assert all(start + length <= count and length < 2**31 for start, length in spans)
    assert [start for start, _ in spans[1:]] == [start + length for start, length in spans[:-1]]


@pytest.mark.parametrize("start", [0, 3])
def test_a_part_of_a_tensor_is_the_memory_of_its_elements(start):
    tensor = torch.arange(8, dtype=torch.float32)
    memory, count, datatype = buffer.elements(tensor, start, 4, MPI.FLOAT)
    assert (memory.address, memory.nbytes) == (tensor[start:].data_ptr(), 16)
    assert count == 4 and datatype == MPI.FLOAT
    memory, count, datatype = buffer.byte_range(tensor, start, 5)
    assert (memory.address, memory.nbytes, count) == (tensor.data_ptr() + start, 5, 5)
    assert datatype == MPI.BYTE
