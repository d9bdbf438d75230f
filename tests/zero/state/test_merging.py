"""Merge of rank-local state dicts: equal to a consolidated one; incomplete sets."""

import pytest

from mpidist.zero.state.merging import merged
from tests.tools.support import agree
from tests.zero.stateful import ADAM, RPROP, SGD, same, sharded, train

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("partition", ["greedy", "flat"])
def test_the_merged_state_is_the_consolidated_one(group, partition):
    for kind, more in (
        (ADAM, {}),
        (SGD, {"frozen": True}),
        (RPROP, {}),
        (ADAM, {"names": True, "wire": "bf16"}),
    ):
        source = sharded(group, kind, partition, **more)
        train(source, range(2), skipped=(4,))
        states = group.all_gather_object(source.rank_local_state_dict())
        agree(
            group,
            same(merged(states), source.state_dict(all_ranks=True)),
            f"{kind[0].__name__} {more}",
        )


def test_what_is_no_complete_set(group):
    source = sharded(group)
    train(source, range(1))
    states = group.all_gather_object(source.rank_local_state_dict())
    size = group.size
    for wrong, words in (
        ([], "at least one is none"),
        ([*states, {}], "at least one is none"),
        ([*states, states[0]], "must be those of ranks 0 to"),
        (
            [{**states[0], "layout": {}}, *states[1:]] if size > 1 else [{**states[0], "rank": 1}],
            "different layouts" if size > 1 else "must be",
        ),
        (
            [{**state, "flats": [flat[1:] for flat in state["flats"]]} for state in states],
            "damaged: it lacks elements of",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            merged(wrong)
