"""Creation of groups from some of a group's ranks, by colour, or as clones."""

import pytest
import torch

from tests.tools.simulated_nodes import lay_out
from tests.tools.support import agree

pytestmark = pytest.mark.mpi


def test_split_by_color_and_key(group):
    child = group.split(group.rank % 2, key=-group.rank)
    mine = [r for r in range(group.size) if r % 2 == group.rank % 2][::-1]
    ok = child.world_ranks == tuple(mine) and child.rank == mine.index(group.rank)
    total = torch.tensor([float(group.rank)])
    child.all_reduce(total)
    ok &= total.item() == sum(mine)
    child.close()
    agree(group, ok)


def test_split_leaves_out_ranks_without_a_color(group):
    child = group.split(None if group.rank == 0 else 0)
    agree(group, (child is None) == (group.rank == 0))
    if child is not None:
        child.barrier()
        child.close()
    if group.rank == 0:
        with pytest.raises(ValueError, match="color"):
            group.split(-3)


def test_new_group_is_for_its_members_and_in_their_order(group):
    ranks = list(range(group.size))[::-1][: max(1, group.size - 1)]
    child = group.new_group(ranks, "some")
    agree(group, (child is not None) == (group.rank in ranks))
    ok = True
    if child is not None:
        ok = (
            child.world_ranks == tuple(ranks)
            and ranks[child.rank] == group.rank
            and child.name == "some"
        )
        tensor = torch.tensor([float(group.rank)])
        child.broadcast(tensor, 0)
        ok &= tensor.item() == ranks[0]
        grandchild = child.new_group([0])
        if grandchild is not None:
            ok &= grandchild.world_ranks == (ranks[0],)
            grandchild.close()
        child.close()
    agree(group, ok)


def test_new_groups_of_one_key_need_no_common_name(group):
    children = [
        group.new_group(range(group.size), f"{turn} of {group.rank}", key="one") for turn in "ab"
    ]
    ok = True
    for child in children:
        tensor = torch.tensor([1.0])
        child.all_reduce(tensor)
        ok &= tensor.item() == group.size and child.name.endswith(f"of {group.rank}")
        child.close()
    agree(group, ok)


@pytest.mark.parametrize("ranks", [[], [0, 0], [99], [-1], ["0"]])
def test_new_group_refuses(group, ranks):
    with pytest.raises((ValueError, TypeError), match="new_group"):
        group.new_group(ranks)


def test_many_groups_are_made_and_closed(group):
    for turn in range(60):
        child = group.split(0)
        tensor = torch.tensor([float(turn)])
        child.all_reduce(tensor)
        assert tensor.item() == turn * group.size
        child.close()


@pytest.mark.mpi(min_size=3)
def test_a_group_knows_its_own_nodes(world, monkeypatch):
    lay_out(world, monkeypatch, "uneven")
    far = world.clone("far")
    near = far.new_group(range(1, world.size))
    alone = far.split_by_node()
    agree(world, not far.is_single_node and (near is None or near.is_single_node))
    agree(world, alone.is_single_node and alone.size == (1 if world.rank == 0 else world.size - 1))
    for group in (near, alone, far):
        if group is not None:
            group.close()
