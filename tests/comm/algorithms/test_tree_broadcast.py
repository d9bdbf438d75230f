"""Broadcasts by messages: the tree of ranks, and their values on simulated nodes."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from mpidist.comm.algorithms import tree_broadcast
from mpidist.comm.algorithms.tree_broadcast import INLINE_BYTES, tree
from mpidist.comm.mpi import communicator
from mpidist.comm.mpi.tags import BROADCAST_TAGS, Tag
from mpidist.errors import DisagreementError
from tests.tools.simulated_nodes import LAYOUTS, SEVERAL, groups
from tests.tools.support import agree, finished

_SEGMENT = 4096
_LENGTHS = (0, 1, INLINE_BYTES, INLINE_BYTES + 1, 4 * _SEGMENT, 5 * _SEGMENT + 3)


@pytest.fixture
def on_nodes(world, monkeypatch):
    """Return a function that makes groups on a layout's nodes; segments are short."""
    monkeypatch.setattr(tree_broadcast, "_SEGMENT_BYTES", _SEGMENT)
    with groups(world, monkeypatch) as clone:
        yield clone


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_receives_once_and_every_node_once_over_the_network(layout):
    for size in range(1, 18):
        on = [LAYOUTS[layout](rank, size) for rank in range(size)]
        numbers = {node: number for number, node in enumerate(dict.fromkeys(on))}
        nodes = tuple(numbers[node] for node in on)
        for root in range(size):
            edges = {rank: tree(rank, root, nodes) for rank in range(size)}
            sent = [(rank, child) for rank, (_, below) in edges.items() for child in below]
            received = [(parent, rank) for rank, (parent, _) in edges.items() if rank != root]
            assert sorted(sent) == sorted(received) and edges[root][0] is None
            across = [child for rank, child in sent if nodes[rank] != nodes[child]]
            assert sorted(nodes[child] for child in across) == sorted(set(nodes) - {nodes[root]})
            for rank in range(size):  # the root is reached
                for _ in range(size):
                    rank = edges[rank][0] if edges[rank][0] is not None else rank
                assert rank == root


def test_the_first_child_of_a_binomial_tree_has_the_most_ranks_behind_it():
    alone = tuple(range(8))
    assert tree(0, 0, alone) == (None, (4, 2, 1))
    assert tree(4, 0, alone) == (0, (6, 5)) and tree(7, 0, alone) == (6, ())
    # Over the network first.
    assert tree(0, 0, (0, 0, 1, 1)) == (None, (2, 1)) and tree(2, 0, (0, 0, 1, 1)) == (0, (3,))


def test_it_applies_to_few_nodes_and_not_to_device_memory():
    def comm(nodes, **fields):
        return SimpleNamespace(
            nodes=nodes, is_single_node=len(set(nodes)) == 1, **{"mpi": 1, "plain": 2, **fields}
        )

    assert tree_broadcast.applies(comm((0, 1))) and tree_broadcast.applies(comm((0, 1, 2, 3, 3)))
    assert not tree_broadcast.applies(comm((0, 0)))
    assert not tree_broadcast.applies(comm((0, 1, 2, 3, 4)))
    assert not tree_broadcast.applies(comm((0, 1), mpi=2))


def test_tags_are_within_the_librarys():
    assert max(Tag) is Tag.BROADCAST
    assert Tag.BROADCAST + BROADCAST_TAGS <= communicator._RESERVED_TAGS


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
    """Also on ranks that receive from one with another length."""
    group, root = on_nodes(layout), world.size - 1
    other = 0  # its tensors have another length
    for length, more in itertools.product((1, INLINE_BYTES, 5 * _SEGMENT), (1, 3 * _SEGMENT)):
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
