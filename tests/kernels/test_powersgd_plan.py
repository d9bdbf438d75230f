"""Table of the PowerSGD kernels: every row and column strip belongs to one block."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist.kernels.powersgd_plan import Item, compiled_rank, held_rows, plan

ITEMS = st.lists(
    st.builds(
        Item,
        st.just((1, 2, 3, 4)),
        st.integers(0, 70_000),
        st.integers(1, 5000),
        st.integers(0, 32),
    ),
    max_size=12,
)


@given(ITEMS, st.sampled_from([4, 8]))
@settings(max_examples=100, deadline=None)
def test_the_blocks_cover_everything_once(items, compute_bytes):
    made = plan(items, 4096, compute_bytes)
    per_thread = 4 if made.rank <= 8 else 32 // made.rank
    ends_partials, ends_counters = 0, 0
    for place, (item, row) in enumerate(zip(items, made.items, strict=True)):
        first_row, shares_rows, first_column, splits, partials, counters = row[7:13]
        mine = np.flatnonzero(made.row_owners == place)
        share = per_thread * (1 if shares_rows else 8) if item.rank else 4096
        assert (
            len(mine) == -(-item.rows // share) and (mine == first_row + np.arange(len(mine))).all()
        )
        strips = -(-item.columns // (32 * per_thread)) if item.rank else 0
        blocks = np.flatnonzero(made.column_owners == place)
        assert (
            len(blocks) == strips * splits
            and (blocks == first_column + np.arange(len(blocks))).all()
        )
        assert partials == ends_partials and counters == ends_counters
        if splits > 1:
            ends_partials += strips * splits * made.rank * 32 * per_thread
            ends_counters += strips
        assert (item.rank == 0 or item.rows == 0 or 1 <= splits <= 64) and row[4] == item.rows
    assert made.partials_numel == ends_partials
    held, gram, counter = held_rows(made.rank, compute_bytes), 0, ends_counters
    for side, heights in enumerate(
        [[item.rows for item in items], [item.columns for item in items]]
    ):
        for place, (item, height) in enumerate(zip(items, heights, strict=True)):
            first, count, segment, of_gram, of_counter = made.items[
                place, 13 + 5 * side : 18 + 5 * side
            ]
            blocks = np.flatnonzero(made.sweep_owners[side] == place)
            assert (
                len(blocks) == (count if item.rank else 0)
                and (blocks == first + np.arange(len(blocks))).all()
            )
            if item.rank == 0 or height == 0:
                continue
            assert (count == 1) == (height <= held) and (count - 1) * segment < height
            if count > 1:
                assert (
                    count <= 256
                    and count * segment >= height
                    and (of_gram, of_counter) == (gram, counter)
                )
                gram, counter = gram + count * made.rank**2, counter + 1
        assert made.has_tall[side] == any(
            n > held for n, item in zip(heights, items, strict=True) if item.rank
        )
    assert (made.grams_numel, made.counters) == (gram, counter)


def test_a_block_holds_as_many_rows_as_its_registers():
    """64 registers of a thread in a block of 512 threads: at rank 4 up to 8192 rows."""
    assert [held_rows(rank, 4) for rank in (1, 2, 4, 8, 16, 32)] == [
        8192,
        8192,
        8192,
        4096,
        2048,
        1024,
    ]
    assert [held_rows(rank, 8) for rank in (1, 2, 4, 8, 16, 32)] == [
        8192,
        8192,
        4096,
        2048,
        1024,
        512,
    ]


def test_warps_share_rows_where_few_are_long():
    def of(*shapes):
        made = plan([Item((1, 2, 3, 4), n, m, 4) for n, m in shapes], 4096)
        return made.items[:, 8].tolist(), len(made.row_owners)

    assert of((768, 2304), (768, 768)) == ([1, 0], 192 + 24)
    assert of((768, 1023)) == ([0], 24)
    assert of((50_257, 1024)) == ([0], 1571), "there are blocks enough"


def test_ranks_are_rounded_up_to_what_is_compiled():
    assert [compiled_rank(r) for r in (0, 1, 2, 3, 4, 5, 8, 9, 31, 32)] == [
        1,
        1,
        2,
        4,
        4,
        8,
        8,
        16,
        32,
        32,
    ]
    with pytest.raises(ValueError, match="up to 32; got 33"):
        compiled_rank(33)
