"""Tables and grids of the PowerSGD kernels for a bucket: pure arithmetic on sizes.

Letters: n × m a matrix; r the approximation's rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mpidist.kernels.launch import THREADS, blocks_of

HIGHEST_RANK = 32
SWEEP_THREADS = 512  # of a block that orthogonalizes
_WARP = 32
_TILE = 128  # rows that a block of backproject processes at once
# Blocks of one strip of columns; more blocks would leave more sums to add.
_MAX_SPLITS = 64
# Columns from which the warps of a block may share rows: each has at least one iteration of its
# loop.
_LONG_ROW = 1024
# Blocks of a bucket in project. This many keep a device busy, and warps with rows of their own read
# Q less often.
_ENOUGH_BLOCKS = 1024
# Registers of a thread that orthogonalizes: bytes, rows.
_HELD_BYTES, _MAX_HELD = 256, 16
_SEGMENT = 512  # rows of a block that shares a tall matrix
_MAX_SEGMENTS = 256  # more blocks would leave more Gram matrices to add


@dataclass(frozen=True)
class Item:
    """One matrix; with ``rank`` 0 an uncompressed tensor of ``rows`` elements."""

    addresses: tuple[int, int, int, int]  # of M, E (0: no error feedback), P, Q
    rows: int
    columns: int
    rank: int


@dataclass(frozen=True)
class Plan:
    """Table and grids of the kernels; the fields of ``items`` are those of ``struct Item``."""

    items: np.ndarray  # int64, one row an item
    row_owners: np.ndarray  # int32: the item of each block of project and reconstruct
    column_owners: np.ndarray  # int32: of backproject
    sweep_owners: tuple[np.ndarray, np.ndarray]  # int32: of orthogonalize, for P and for Q
    # Some P or Q is shared by several blocks, so orthogonalize needs a second launch.
    has_tall: tuple[bool, bool]
    partials_numel: int  # partial sums of blocks that share a strip
    grams_numel: int  # float64: Gram matrices of blocks that share a tall matrix
    counters: int  # strips and tall matrices with several blocks
    rank: int  # power of two that the kernels are compiled for


def compiled_rank(highest: int) -> int:
    """Return the power of two that the kernels are compiled for, at least ``highest``.

    Raises:
        ValueError: Above 32.
    """
    if highest > HIGHEST_RANK:
        raise ValueError(f"the PowerSGD kernels take ranks up to {HIGHEST_RANK}; got {highest}")
    return 1 << max(highest - 1, 0).bit_length()


def held_rows(rank: int, compute_bytes: int) -> int:
    """Return the number of rows that one block of ``orthogonalize`` holds in registers.

    Args:
        rank: As compiled.
        compute_bytes: Of the type that the kernel computes in.
    """
    return SWEEP_THREADS * min(_HELD_BYTES // compute_bytes // rank, _MAX_HELD)


def plan(
    items: Sequence[Item], chunk_numel: int, compute_bytes: int = 4, threads: int = THREADS
) -> Plan:
    """Assign blocks to each item in each kernel.

    Args:
        chunk_numel: Elements of a whole tensor that one block copies.
        compute_bytes: Of the type that the kernels compute in: 8 for float64, else 4.
        threads: Of a block, except in ``orthogonalize``.
    """
    rank = compiled_rank(max((item.rank for item in items), default=0))
    per_thread = 4 if rank <= 8 else 32 // rank  # rows of a warp, columns of a thread
    width = per_thread * _WARP
    shares, shares_rows = _row_blocks(items, chunk_numel, per_thread, threads // _WARP)
    strips = [-(-item.columns // width) if item.rank else 0 for item in items]
    splits = [min(-(-item.rows // _TILE), _MAX_SPLITS) if item.rank else 1 for item in items]
    first_row, row_owners = blocks_of(shares)
    first_column, column_owners = blocks_of([n * s for n, s in zip(strips, splits, strict=True)])
    shared = [n if s > 1 else 0 for n, s in zip(strips, splits, strict=True)]
    partials = np.cumsum([0, *(n * s * rank * width for n, s in zip(shared, splits, strict=True))])
    counters = np.cumsum([0, *shared])
    held = held_rows(rank, compute_bytes)
    heights = [item.rows if item.rank else 0 for item in items]
    of_p = _sweeps(heights, held, rank, 0, int(counters[-1]))
    heights = [item.columns if item.rank else 0 for item in items]
    of_q = _sweeps(heights, held, rank, of_p.grams_end, of_p.counters_end)
    columns = (first_row, shares_rows, first_column, splits, partials, counters)
    table = [
        (
            *(*item.addresses, item.rows, item.columns, item.rank),
            *(column[i] for column in columns),
            *(*of_p.fields[i], *of_q.fields[i]),
        )
        for i, item in enumerate(items)
    ]
    return Plan(
        items=np.asarray(table, np.int64).reshape(-1, 23),
        row_owners=row_owners,
        column_owners=column_owners,
        sweep_owners=(of_p.owners, of_q.owners),
        has_tall=(of_p.has_tall, of_q.has_tall),
        partials_numel=int(partials[-1]),
        grams_numel=of_q.grams_end,
        counters=of_q.counters_end,
        rank=rank,
    )


def _row_blocks(
    items: Sequence[Item], chunk_numel: int, rows: int, warps: int
) -> tuple[list[int], list[bool]]:
    """Return each item's blocks in project and reconstruct, and whether warps share its rows.

    Few long rows would make few blocks with long loops. In this case a block processes the rows of
    one warp, and its warps divide the columns.
    """
    own = [-(-item.rows // (rows * warps if item.rank else chunk_numel)) for item in items]
    is_busy = sum(own) >= _ENOUGH_BLOCKS
    shares_rows = [bool(item.rank) and item.columns >= _LONG_ROW and not is_busy for item in items]
    return [
        -(-item.rows // rows) if s else n
        for item, n, s in zip(items, own, shares_rows, strict=True)
    ], shares_rows


@dataclass(frozen=True)
class _Sweeps:
    fields: list[tuple[int, int, int, int, int]]  # ``struct Sweep`` of each item
    owners: np.ndarray
    has_tall: bool
    grams_end: int
    counters_end: int


def _sweeps(heights: Sequence[int], held: int, rank: int, grams: int, counters: int) -> _Sweeps:
    """Assign blocks to each thin matrix: one, or for a tall matrix as many as share its rows.

    Args:
        heights: Rows of each; 0 for no work.
        held: Rows that one block holds in registers.
        grams: The first free offset for Gram matrices.
        counters: The first free counter.
    """
    segments = [
        _SEGMENT if n <= _SEGMENT * _MAX_SEGMENTS else -(-n // _MAX_SEGMENTS) for n in heights
    ]
    blocks = [
        1 if 0 < n <= held else -(-n // segment)
        for n, segment in zip(heights, segments, strict=True)
    ]
    first, owners = blocks_of(blocks)
    is_tall = [n > held for n in heights]
    gram = grams + np.cumsum(
        [0, *(b * rank * rank * tall for b, tall in zip(blocks, is_tall, strict=True))]
    )
    counter = counters + np.cumsum([0, *is_tall])
    fields = [
        (int(first[i]), blocks[i], segments[i], int(gram[i]), int(counter[i]))
        for i in range(len(heights))
    ]
    return _Sweeps(fields, owners, any(is_tall), int(gram[-1]), int(counter[-1]))
