"""Master copies: full-precision shards that a rank steps, where all ranks see rounded values.

A master copy is renewed from its parameter only when other code has written the parameter. That
raises autograd's version counter of the parameter; writes to the flat buffer do not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from mpidist.zero.flat_buffers import in_memory_order
from mpidist.zero.pieces import Piece

Tensor = torch.Tensor


class Masters:
    """The master copies of one rank.

    Attributes:
        flats: The copy of this rank's shard of each flat buffer.
    """

    def __init__(self) -> None:
        self.flats: list[Tensor] = []
        self._versions: dict[int, int] = {}  # of parameters whose masters are up to date

    def renew(self, pieces: Iterable[Piece]) -> None:
        """Copy parameters that were written since the last ``mark_current`` to their masters."""
        if not self.flats:
            return
        pieces = list(pieces)
        with torch.no_grad():
            for piece in pieces:
                if (
                    piece.home is not None
                    and self._versions.get(piece.number) != piece.parameter._version
                ):
                    values = piece.parameter.detach()
                    if not piece.is_whole:
                        values = in_memory_order(values, piece.parameter)[piece.start : piece.stop]
                    piece.tensor.detach().copy_(values)
        self.mark_current(pieces)

    def mark_current(self, pieces: Iterable[Piece]) -> None:
        """Record that the masters of these pieces, and of no others, are up to date."""
        self._versions = {piece.number: piece.parameter._version for piece in pieces}

    def invalidate(self, numbers: Iterable[int]) -> None:
        """Mark some parameters' masters as out of date."""
        for number in numbers:
            self._versions.pop(number, None)


def exact_masters(pieces: Iterable[Piece], places: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Return the master copies of parameters that still have the values of their places, by number.

    Parameters have the rounded values of the wire, so masters renewed from them would be rounded.

    Args:
        places: The place of each parameter, in its shape.
    """
    found = {}
    for piece in pieces:
        if piece.home is None:
            continue
        place = places[piece.number]
        then = in_memory_order(place, place)[piece.start : piece.stop]
        now = in_memory_order(piece.parameter.detach(), place)[piece.start : piece.stop]
        if torch.equal(now.to(then), then):
            found[piece.number] = piece.tensor.detach()
    return found
