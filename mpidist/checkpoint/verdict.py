"""Verdict of all ranks: what goes wrong on one is raised on all, with the same words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mpidist.errors import CheckpointError, CommTimeout, GroupError, MpidistError, RankFailureError


@contextmanager
def together(group: Any, where: str) -> Iterator[None]:
    """Run a block on all ranks, and raise on all of them if it has failed on any. Collective: over the group, at the block's end.

    The block must communicate nothing that a rank which has failed would leave out.

    Raises:
        CheckpointError: Who failed, and why; on all ranks.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    told = group.all_gather_object(None if error is None else text_of(error))
    if any(text is not None for text in told):
        raise CheckpointError(f"{where}: {summary(told)}") from error


@contextmanager
def as_checkpoint_errors(where: str) -> Iterator[None]:
    """Give errors of what is collective by itself, and raises on all ranks, the class of this package.

    Raises:
        CheckpointError: For any error but those of the communication.
    """
    try:
        yield
    except (RankFailureError, CommTimeout, GroupError):
        raise
    except Exception as error:
        raise CheckpointError(f"{where}: {text_of(error)}") from error


def text_of(error: Exception) -> str:
    """Return what a message says of an error."""
    if isinstance(error, (MpidistError, ValueError, TypeError)):
        return str(error)
    return f"{type(error).__name__}: {error}"


def summary(told: Sequence[str | None]) -> str:
    """Join what ranks told, each text once (pure).

    Args:
        told: By rank; None of one that has nothing to say.
    """
    by_text: dict[str, list[int]] = {}
    for rank, text in enumerate(told):
        if text is not None:
            by_text.setdefault(text, []).append(rank)
    if len(by_text) == 1 and (len(told) == 1 or None not in told):
        return next(iter(by_text))

    def named(ranks: list[int]) -> str:
        shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
        return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}"

    return "; ".join(f"{named(ranks)}: {text}" for text, ranks in by_text.items())
