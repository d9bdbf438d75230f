"""Tensors past 2**31 elements, on nodes with enough memory."""

import psutil
import pytest
import torch

from tests.tools.support import agree

NUMEL = 2**31 + 5


@pytest.mark.long
@pytest.mark.mpi(min_size=2)
def test_more_elements_than_a_c_int_counts(group):
    if group.size > 2:
        pytest.skip("memory: two ranks show it")
    room = psutil.virtual_memory().available > 4 * NUMEL + (2 << 30)
    if not all(group.all_gather_object(room)):
        pytest.skip(f"memory: needs {4 * NUMEL >> 30} GiB free")
    tensor = torch.full((NUMEL,), group.rank + 1, dtype=torch.uint8)
    group.broadcast(tensor, group.size - 1)
    ok = all(int(tensor[place]) == group.size for place in (0, 2**30, 2**31 - 1, 2**31, NUMEL - 1))
    booleans = tensor.view(torch.bool)
    booleans.fill_(group.rank == 0)
    group.all_reduce(booleans)  # MPI's own reduction, in pieces
    ok &= bool(booleans[-5:].all()) and bool(booleans[2**30 - 2 : 2**30 + 2].all())
    tensor.fill_(3)
    group.all_reduce(tensor)  # by shards
    ok &= all(
        int(tensor[place]) == 3 * group.size for place in (0, 2**30, 2**31 - 1, 2**31, NUMEL - 1)
    )
    agree(group, ok)
