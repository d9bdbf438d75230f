"""What the PowerSGD kernels are told of a bucket: pure arithmetic, from sizes to a table.

Letters: n × m a matrix; r the approximation's rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mpidist.kernels.launch import THREADS, blocks_of

HIGHEST_RANK = 32
_WARP = 32
_TILE = 128  # rows that a block of backproject takes at once
_MOST_SPLITS = 64  # of the rows of one strip of columns: more blocks, and more sums of theirs to add up


@dataclass(frozen=True)
class Item:
    """One matrix, or with ``rank`` 0 a tensor that travels whole: ``rows`` elements of M go to P and back."""

    addresses: tuple[int, int, int, int]  # of M, E (0: no error feedback), P, Q
    rows: int
    columns: int
    rank: int


@dataclass(frozen=True)
class Plan:
    """The kernels' table and grids; the fields of ``items`` are ``struct Item`` of cuda/powersgd.cu."""

    items: np.ndarray  # int64, one row an item
    row_owners: np.ndarray  # int32: the item of each block of project and reconstruct
    column_owners: np.ndarray  # int32: of backproject
    partials_numel: int  # sums that blocks of one strip leave each other
    counters: int  # strips with several blocks
    rank: int  # the power of two that the kernels are compiled for


def compiled_rank(highest: int) -> int:
    """Return the power of two that serves matrices up to this rank.

    Raises:
        ValueError: Past 32.
    """
    if highest > HIGHEST_RANK:
        raise ValueError(f"the PowerSGD kernels take ranks up to {HIGHEST_RANK}; got {highest}")
    return 1 << max(highest - 1, 0).bit_length()


def sweep_threads(rank: int) -> int:
    """Return how many threads orthogonalise a matrix, for a compiled rank: as many as its registers leave room for."""
    return 1024 if rank <= 8 else 512


def plan(items: Sequence[Item], chunk_numel: int, threads: int = THREADS) -> Plan:
    """Give each item its blocks in each kernel.

    Args:
        chunk_numel: Elements of a whole tensor that one block copies.
        threads: Of a block.
    """
    rank = compiled_rank(max((item.rank for item in items), default=0))
    per_thread = 4 if rank <= 8 else 32 // rank  # rows of a warp, and columns of a thread
    rows_of_block, width = per_thread * (threads // _WARP), per_thread * _WARP
    shares, splits, strips = [], [], []
    for item in items:
        shares.append(-(-item.rows // (rows_of_block if item.rank else chunk_numel)))
        strips.append(-(-item.columns // width) if item.rank else 0)
        splits.append(min(-(-item.rows // _TILE), _MOST_SPLITS) if item.rank else 1)
    first_row, row_owners = blocks_of(shares)
    first_column, column_owners = blocks_of([n * s for n, s in zip(strips, splits, strict=True)])
    shared = [n if s > 1 else 0 for n, s in zip(strips, splits, strict=True)]
    partials = np.cumsum([0, *(n * s * rank * width for n, s in zip(shared, splits, strict=True))])
    counters = np.cumsum([0, *shared])
    table = [
        (*item.addresses, item.rows, item.columns, item.rank, first_row[i], first_column[i], splits[i], partials[i], counters[i])
        for i, item in enumerate(items)
    ]
    return Plan(
        np.asarray(table, np.int64).reshape(-1, 12), row_owners, column_owners, int(partials[-1]), int(counters[-1]), rank
    )
