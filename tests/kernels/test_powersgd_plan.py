"""The table that the PowerSGD kernels are told: every row and column strip is some block's, once."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist.kernels.powersgd_plan import Item, compiled_rank, plan

ITEMS = st.lists(
    st.builds(Item, st.just((1, 2, 3, 4)), st.integers(0, 70_000), st.integers(1, 5000), st.integers(0, 32)), max_size=12
)


@given(ITEMS)
@settings(max_examples=100, deadline=None)
def test_the_blocks_cover_everything_once(items):
    made = plan(items, 4096)
    per_thread = 4 if made.rank <= 8 else 32 // made.rank
    ends_partials, ends_counters = 0, 0
    for place, (item, row) in enumerate(zip(items, made.items, strict=True)):
        first_row, first_column, splits, partials, counters = row[7:]
        mine = np.flatnonzero(made.row_owners == place)
        share = 8 * per_thread if item.rank else 4096
        assert len(mine) == -(-item.rows // share) and (mine == first_row + np.arange(len(mine))).all()
        strips = -(-item.columns // (32 * per_thread)) if item.rank else 0
        blocks = np.flatnonzero(made.column_owners == place)
        assert len(blocks) == strips * splits and (blocks == first_column + np.arange(len(blocks))).all()
        assert partials == ends_partials and counters == ends_counters
        if splits > 1:
            ends_partials += strips * splits * made.rank * 32 * per_thread
            ends_counters += strips
        assert (item.rank == 0 or item.rows == 0 or 1 <= splits <= 64) and row[4] == item.rows
    assert (made.partials_numel, made.counters) == (ends_partials, ends_counters)


def test_ranks_are_rounded_up_to_what_is_compiled():
    assert [compiled_rank(r) for r in (0, 1, 2, 3, 4, 5, 8, 9, 31, 32)] == [1, 1, 2, 4, 4, 8, 8, 16, 32, 32]
    with pytest.raises(ValueError, match="up to 32; got 33"):
        compiled_rank(33)
