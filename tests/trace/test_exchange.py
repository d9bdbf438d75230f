"""Exchange between the ranks of a recording: texts, parts, clocks, the end."""

import pytest

from mpidist.comm.mpi import exited_ranks
from mpidist.errors import RankFailureError
from mpidist.trace.exchange import Exchange
from tests.tools.support import agree


@pytest.mark.mpi
def test_ranks_exchange_texts_parts_and_clocks(group, monkeypatch):
    monkeypatch.setattr("mpidist.trace.exchange._PIECE_BYTES", 1000)
    exchange = Exchange()
    try:
        texts = exchange.strings(f"rank {group.rank}")
        agree(group, texts == [f"rank {rank}" for rank in range(group.size)], str(texts))
        own = bytes([group.rank]) * (2500 * group.rank)
        parts = exchange.at_root(own)
        expected = [bytes([rank]) * (2500 * rank) for rank in range(group.size)]
        agree(group, parts == (expected if group.rank == 0 else []))
        exchange.meet(may_have_left=False)
        offset = exchange.offset()
        # The ranks of a node read one clock.
        agree(group, abs(offset.offset_ns) <= offset.error_ns + 1, str(offset))
    finally:
        exchange.close()


@pytest.mark.mpi(min_size=2)
def test_end_without_a_rank_that_has_ended_raises(group, monkeypatch):
    exchange = Exchange()
    ended = exited_ranks.ended
    if group.rank:
        monkeypatch.setattr(exited_ranks, "ended", lambda ranks: (0,))
        with pytest.raises(RankFailureError, match="the end of the trace waits for world rank 0"):
            exchange.meet(may_have_left=False)
        monkeypatch.setattr(exited_ranks, "ended", ended)
    group.barrier()
    if group.rank == 0:
        exchange.meet(may_have_left=False)
    exchange.close()
