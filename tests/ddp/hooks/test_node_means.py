"""Averages by levels, on simulated nodes of equal and unequal size."""

import pytest
import torch

from mpidist.ddp.hooks.node_means import NodeMeans, shares_nodes
from tests.tools.simulated_nodes import groups
from tests.tools.support import agree

pytestmark = pytest.mark.mpi(min_size=3)


def test_the_average_of_all_ranks(world, monkeypatch):
    with groups(world, monkeypatch) as on:
        assert not shares_nodes(on("one node")) and not shares_nodes(on("alone"))
        for layout in ("blocks", "cyclic", "uneven"):
            group = on(layout)
            assert shares_nodes(group)
            means = NodeMeans(group)
            generator = torch.Generator().manual_seed(group.rank)
            mine = torch.randn(1000, generator=generator)
            average = mine.clone()
            group.all_reduce(average, "avg")
            for by in (
                lambda tensor, means=means: means.all_reduce(tensor),
                lambda tensor, means=means: means.by_leaders(
                    tensor, lambda leaders: leaders.all_reduce(tensor, "avg")
                ),
            ):
                found = mine.clone()
                means.average_within(found)
                by(found)
                agree(world, torch.allclose(found, average, atol=1e-6), layout)
                gathered = world.all_gather_object(found)
                agree(world, all(torch.equal(found, other) for other in gathered), "bits differ")
            means.close()
