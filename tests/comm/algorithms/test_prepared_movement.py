"""Prepared movements: lengths that differ, memory that is adjacent, shared or not prepared."""

import pytest
import torch

from mpidist.comm.algorithms import movement, prepared_movement
from mpidist.comm.algorithms.broadcasts import INLINE_BYTES
from mpidist.errors import MpidistError
from tests.tools.support import agree

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("length", [1, INLINE_BYTES, INLINE_BYTES + 1, 100_000])
def test_a_prepared_broadcast_of_another_length_is_an_error_and_leaves_the_tensor(group, length):
    tensor, root = torch.zeros(length + 8 * (group.rank == 0), dtype=torch.uint8), 0
    kept = torch.full((500,), 7, dtype=torch.uint8)
    for _ in range(2):  # the second time by the prepared call
        if group.rank == root:
            group.broadcast(tensor + 1, root)
        else:
            with pytest.raises(MpidistError, match="rank 0 sent"):
                group.broadcast(tensor, root)
    group.broadcast(kept, root)  # the group goes on
    agree(group, not tensor.any() and bool((kept == 7).all()), str(tensor))


def test_what_needs_copies_of_its_inputs_is_not_prepared(group):
    comm, whole = group._comm, torch.zeros(8 * (group.size + 1))
    outputs = list(whole[: 4 * group.size].split(4))
    shared, apart = whole[2:6], whole[-4:]
    assert prepared_movement.all_gather(comm, [shared], outputs) is None
    assert prepared_movement.all_gather_into(comm, [shared], [whole[: 4 * group.size]]) is None
    assert prepared_movement.all_gather(comm, [apart[:0]], [apart[:0]] * group.size) is None
    long = torch.empty(movement.FLAT_BYTES + 1, dtype=torch.uint8)
    assert prepared_movement.all_gather(comm, [long], [long.clone()] * group.size) is None
    assert prepared_movement.broadcast(comm, [apart, shared], [], 0) is None
    gather = prepared_movement.all_gather(comm, [apart], outputs)
    apart.fill_(float(group.rank + 1))
    gather()
    expected = [float(rank + 1) for rank in range(group.size) for _ in range(4)]
    agree(group, whole[: 4 * group.size].tolist() == expected, str(whole))


def test_gathers_outlive_the_scratch_memory_of_the_first(group):
    source = torch.full((2,), float(group.rank))
    short = [torch.empty(2) for _ in range(group.size)]
    long = [torch.empty(2000) for _ in range(group.size)]
    gather = prepared_movement.all_gather(group._comm, [source], short)
    # Needs more scratch memory, which replaces the first's.
    prepared_movement.all_gather(group._comm, [source.repeat(1000)], long)()
    kept = [torch.full((20,), 5.0) for _ in range(50)]  # where freed memory would be reused
    gather()
    right = all(row.tolist() == [rank] * 2 for rank, row in enumerate(short))
    agree(group, right and all(bool((row == 5).all()) for row in kept), str(short))


def test_gathers_of_growing_lengths_keep_little_memory(group):
    kept = {}
    for length in range(1, 60):
        source, *outputs = torch.zeros(group.size + 1, length, dtype=torch.uint8).unbind()
        outputs.reverse()  # not adjacent in the order of the ranks
        gather = prepared_movement.all_gather(group._comm, [source], outputs)
        for held in getattr(gather, "__defaults__", None) or ():
            kept[held.untyped_storage().data_ptr()] = held.untyped_storage().nbytes()
    agree(group, sum(kept.values()) <= 4 * 60 * group.size, str(kept))
