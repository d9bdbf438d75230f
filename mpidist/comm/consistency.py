"""Comparisons between the ranks of a group, and errors of one rank that all ranks raise.

Each comparison is one all-gather of small objects. ``raising_on_all`` and ``maximum`` cost one
all-reduce of an int32 if no rank has an error. The group's journal counts them as mpidist's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from mpidist.comm.algorithms.reduce_op import MAX
from mpidist.comm.group_types import Group
from mpidist.comm.mpi import rank_ranges
from mpidist.errors import (
    CommTimeout,
    DisagreementError,
    GroupError,
    MpidistError,
    RankFailureError,
)

Row = tuple[str, object]  # a label, and this rank's value


def require_same(
    group: Group, where: str, rows: Sequence[Row], error: Exception | None = None
) -> None:
    """Compare rows between ranks; an error of any rank is raised on all.

    Collective: over the group.

    Args:
        where: The beginning of the message.
        rows: Labels and values that must be equal on all ranks.
        error: This rank's own error, raised here after all ranks know of it.

    Raises:
        DisagreementError: On every rank without an error of its own: the first row that differs
            and each rank's value, or the ranks with errors and their texts.
        Exception: ``error``, on the rank that gave it.
    """
    group.journal.note_own()
    reports = group.all_gather_object(
        (None if error is None else f"{type(error).__name__}: {error}", list(rows))
    )
    if error is not None:
        raise error
    if refusals := by_rank([text for text, _ in reports]):
        raise DisagreementError(f"{where} was refused. {refusals}")
    found = first_difference([table for _, table in reports])
    if found is not None:
        values = by_rank(
            ["nothing" if row is None else f"{row[0]} {row[1]}" for row in found.entries]
        )
        raise DisagreementError(f"{where}: ranks differ. {values}")


@contextmanager
def comparing(group: Group, where: str) -> Iterator[list[Row]]:
    """Yield a list for rows, which is compared between ranks when the block ends.

    An exception in the block takes the place of this rank's rows.

    Collective: over the group, at the end of the block. The block itself must not communicate.

    Raises:
        DisagreementError, Exception: As ``require_same``.
    """
    rows: list[Row] = []
    error: Exception | None = None
    try:
        yield rows
    except Exception as raised:
        error = raised
    require_same(group, where, rows, error)


@contextmanager
def raising_on_all(group: Group, where: str) -> Iterator[None]:
    """Raise on all ranks if the block has raised on any.

    Collective: over the group, at the end of the block. The block must not communicate anything
    that a rank with an error would leave out.

    Raises:
        DisagreementError, Exception: As ``require_same``.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    if maximum(group, int(error is not None)):
        require_same(group, where, (), error)


@contextmanager
def same_error_on_all(group: Group, kind: type[Exception], where: str) -> Iterator[None]:
    """Raise an error of class ``kind``, with one text, on all ranks if the block has raised on any.

    Collective: over the group, at the end of the block. The block must not communicate anything
    that a rank with an error would leave out.

    Raises:
        kind: On all ranks: the ranks with errors and their texts.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    group.journal.note_own()
    texts = group.all_gather_object(None if error is None else describe(error))
    if any(text is not None for text in texts):
        raise kind(f"{where}: {summary(texts)}") from error


@contextmanager
def converting_errors(kind: type[Exception], where: str) -> Iterator[None]:
    """Raise errors of the block as ``kind``; for blocks that raise on all ranks by themselves.

    Raises:
        RankFailureError, CommTimeout, GroupError: Unchanged: errors of the communication itself.
        kind: For any other exception.
    """
    try:
        yield
    except (RankFailureError, CommTimeout, GroupError):
        raise
    except Exception as error:
        raise kind(f"{where}: {describe(error)}") from error


def values_that_differ(group: Group, value: object) -> str | None:
    """Compare one value between ranks: return each rank's value as text, None where all are equal.

    Collective: over the group.
    """
    group.journal.note_own()
    values = group.all_gather_object(value)
    return None if first_difference([[each] for each in values]) is None else by_rank(values)


def maximum(group: Group, code: int, memory: torch.Tensor | None = None) -> int:
    """Return the maximum of all ranks' codes. All ranks have entered before any rank returns.

    Collective: over the group.

    Args:
        memory: One int32 in host memory, to be overwritten. The group prepares an all-reduce once
            for each tensor, so a caller that compares in each step keeps its own.
    """
    if group.size == 1:
        return code
    if memory is None:
        memory = torch.tensor([code], dtype=torch.int32, device="cpu")
    else:
        memory.fill_(code)
    group.journal.note_own()
    if not group.all_reduce_at_once(memory, MAX):
        group.all_reduce(memory, MAX)
    return int(memory)


class Difference(NamedTuple):
    """The first row in which the ranks' tables differ, and each rank's entry there."""

    place: int
    entries: list[Any]


def first_difference(tables: Sequence[Sequence[object]]) -> Difference | None:
    """Return the first row that differs between the tables, None where all are equal. Pure.

    Args:
        tables: By rank. An entry behind a table's end counts as None.
    """
    for place in range(max(map(len, tables))):
        entries = [table[place] if place < len(table) else None for table in tables]
        if any(entry != entries[0] for entry in entries):
            return Difference(place, entries)
    return None


def by_rank(values: Sequence[object]) -> str:
    """Return ``rank 0: …; rank 1: …`` without the ranks whose value is None. Pure."""
    return "; ".join(
        f"rank {rank}: {value}" for rank, value in enumerate(values) if value is not None
    )


def summary(texts: Sequence[str | None]) -> str:
    """Join the ranks' texts, equal ones once. Pure.

    Args:
        texts: By rank; None of a rank without one.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        if text is not None:
            ranks_of.setdefault(text, []).append(rank)
    if len(ranks_of) == 1 and (len(texts) == 1 or None not in texts):
        return next(iter(ranks_of))
    return "; ".join(f"{rank_ranges.named(ranks)}: {text}" for text, ranks in ranks_of.items())


def describe(error: Exception) -> str:
    """Return an error's text, with its class where the text alone may be unclear. Pure."""
    if isinstance(error, (MpidistError, ValueError, TypeError)):
        return str(error)
    return f"{type(error).__name__}: {error}"
