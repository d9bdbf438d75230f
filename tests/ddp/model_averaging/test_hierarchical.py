"""Steps and ranks of ``HierarchicalModelAverager``, in groups along the nodes."""

from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.model_averaging import hierarchical_model_averager as theirs

from mpidist.comm.mpi import runtime
from mpidist.ddp.model_averaging.hierarchical import HierarchicalModelAverager, parts_of
from mpidist.errors import DisagreementError
from tests.support import agree, raises_on_all


@pytest.mark.parametrize(
    ("nodes", "size", "parts"),
    [
        ([0, 0, 1, 1], 2, [(0, 1), (2, 3)]),
        ([0, 1, 0, 1], 2, [(0, 2), (1, 3)]),  # ranks placed round robin
        ([0, 1, 0, 1], 4, [(0, 2, 1, 3)]),
        ([0, 1, 2, 3, 0, 1, 2, 3], 4, [(0, 4, 1, 5), (2, 6, 3, 7)]),  # two whole nodes each
        # Parts would straddle nodes: consecutive ranks.
        ([0, 0, 0, 1, 1, 1], 2, [(0, 1), (2, 3), (4, 5)]),
        ([0, 1, 0, 1, 0, 1], 2, [(0, 1), (2, 3), (4, 5)]),
        ([0, 0, 0], 1, [(0,), (1,), (2,)]),
    ],
)
def test_parts_keep_to_nodes_where_sizes_fit(nodes, size, parts):
    assert parts_of(nodes, size) == parts


def averaged(averager, rank):
    weight = torch.nn.Parameter(torch.full((3,), float(rank)))
    weight.grad = torch.zeros(3)
    averager.average_parameters([{"params": [weight]}])
    return float(weight[0].detach())


@pytest.mark.mpi
@pytest.mark.usefixtures("default_group")
def test_levels_are_torchs(group):
    levels = {
        1: [(3, 1)],
        2: [(2, 1), (4, 2)],
        3: [(2, 1), (6, 3)],
        4: [(2, 1), (3, 2), (6, 4)],
    }.get(group.size, [(2, group.size)])
    mine = HierarchicalModelAverager(OrderedDict(levels), 2, dist.group.WORLD)
    torchs = theirs.HierarchicalModelAverager(OrderedDict(levels), 2, dist.group.WORLD)
    for step in range(13):
        pair = averaged(mine, group.rank), averaged(torchs, group.rank)
        agree(group, pair[0] == pair[1], f"step {step}: {pair}")
    for one in mine.period_process_group_dict.values():
        if one is not dist.group.WORLD:
            one.close()


@pytest.mark.mpi(min_size=4)
def test_groups_follow_the_nodes(group, monkeypatch):
    if group.size % 2:
        pytest.skip("needs an even number of ranks")
    monkeypatch.setattr(
        runtime.World, "nodes_of", lambda self, ranks: tuple(rank % 2 for rank in ranks)
    )
    half = group.size // 2
    averager = HierarchicalModelAverager(OrderedDict([(1, half), (4, group.size)]), 0, group)
    found = [averaged(averager, group.rank) for _ in range(4)]
    own = [rank for rank in range(group.size) if rank % 2 == group.rank % 2]
    agree(group, found == [(group.size - 1) / 2, *[sum(own) / half] * 3], str(found))
    averager.period_process_group_dict[1].close()


@pytest.mark.mpi
def test_wrong_levels_are_refused_on_all_ranks(group):
    size = group.size
    for levels, error, words in [
        (None, ValueError, "must map periods"),
        ({}, ValueError, "must map periods"),
        ([(2, size)], TypeError, "must map periods"),
        ({0: size}, ValueError, "period must be at least 1"),
        ({2: 0, 4: size}, ValueError, "size must be at least 1"),
        ({2.0: size}, TypeError, "period must be an int"),
        ({4: 1, 2: size}, ValueError, "growing periods"),
        ({2: size + 1, 4: size}, ValueError, "sizes that divide the next"),
        ({2: size + 1}, ValueError, f"must be that of process_group, {size}"),
    ]:
        raises_on_all(
            group, error, lambda levels=levels: HierarchicalModelAverager(levels, 0, group), words
        )
    raises_on_all(
        group, ValueError, lambda: HierarchicalModelAverager({2: size}, -1, group), "warmup_steps"
    )
    if size > 1:
        own = {2 + group.rank: size}
        raises_on_all(
            group,
            DisagreementError,
            lambda: HierarchicalModelAverager(own, 0, group),
            "HierarchicalModelAverager: ranks differ",
        )
        own = {2: size} if group.rank else {}
        kind = DisagreementError if group.rank else ValueError
        raises_on_all(
            group, kind, lambda: HierarchicalModelAverager(own, 0, group), "must map periods"
        )
    with pytest.warns(UserWarning, match="every step"):
        HierarchicalModelAverager({1: size}, 0, group)
