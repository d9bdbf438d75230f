"""Broadcasts between nodes: their values, and errors of other lengths, on simulated nodes."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from mpidist.comm.algorithms import broadcasts
from mpidist.comm.algorithms.broadcasts import INLINE_BYTES
from mpidist.comm.memory import buffer
from mpidist.errors import DisagreementError
from tests.tools.simulated_nodes import SEVERAL, groups
from tests.tools.support import agree, finished

_PIECE = 4096
_LENGTHS = (0, 1, INLINE_BYTES, INLINE_BYTES + 1, 4 * _PIECE, 5 * _PIECE + 3)


@pytest.fixture
def on_nodes(world, monkeypatch):
    """Return a function that makes groups on a layout's nodes; longer data go in pieces."""
    monkeypatch.setattr(buffer, "MAX_COUNT", _PIECE)
    with groups(world, monkeypatch) as clone:
        yield clone


def test_they_are_between_nodes_and_not_of_device_memory():
    def comm(is_single_node, mpi):
        return SimpleNamespace(is_single_node=is_single_node, mpi=mpi, plain=2)

    assert broadcasts.applies(comm(False, 1))
    assert not broadcasts.applies(comm(True, 1)) and not broadcasts.applies(comm(False, 2))


@pytest.mark.mpi
@pytest.mark.parametrize("layout", [*SEVERAL, "alone"])
def test_all_lengths_and_roots_synchronous_on_one_rank_and_not_on_the_next(world, on_nodes, layout):
    group, wrong = on_nodes(layout), []
    for turn, (root, numel) in enumerate(itertools.product(range(group.size), _LENGTHS)):
        values = (torch.arange(numel) * 7 + root + numel).to(torch.uint8)
        tensor = values.clone() if group.rank == root else torch.zeros_like(values)
        listed = [tensor, tensor[:0].clone(), tensor[: numel // 2].clone()]
        is_async = bool((turn + group.rank) % 2)
        works = [
            group.broadcast(tensor, root, async_op=is_async),
            group.broadcast_coalesced(listed, root, async_op=is_async),
        ]
        for work in works:
            finished(work)
        if not all(torch.equal(got, values[: got.numel()]) for got in (tensor, *listed)):
            wrong.append((root, numel))
    agree(world, not wrong, str(wrong))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("layout", ["alone", "uneven"])
def test_another_length_is_an_error_there_and_the_rest_goes_on(world, on_nodes, layout):
    group, root = on_nodes(layout), world.size - 1
    other = 0  # its tensors have another length
    for length, more in itertools.product((1, INLINE_BYTES, 5 * _PIECE), (1, 3 * _PIECE)):
        for numel in (length, length + more):
            sent = 2 * length + more - numel
            tensors = [torch.zeros(sent, dtype=torch.uint8) for _ in range(3)]
            if group.rank == root:
                tensors = [tensor + place + 1 for place, tensor in enumerate(tensors)]
            if group.rank == other:
                tensors[1] = torch.zeros(numel, dtype=torch.uint8)
            works = [group.broadcast(tensor, root, async_op=True) for tensor in tensors]
            works[0].wait()
            error = works[1].exception()
            if group.rank == other:
                with pytest.raises(DisagreementError, match=f"rank {root} sent {sent} bytes, and"):
                    works[1].wait()
                assert not tensors[1].any()
            else:
                works[1].wait()
                assert bool((tensors[1] == 2).all()), error
            works[2].wait()
            agree(world, bool((tensors[0] == 1).all()) and bool((tensors[2] == 3).all()))
