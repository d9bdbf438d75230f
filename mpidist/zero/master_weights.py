"""Master copies: what a rank steps where all ranks see values that a narrow wire has rounded.

The owner of a shard keeps it in full precision. A master copy is made anew from its parameter only
when somebody else has written that: autograd's version counter of the parameter tells, which the
flat buffer's own writes leave alone.
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
        flats: For each flat buffer the copy of this rank's shard.
    """

    def __init__(self) -> None:
        self.flats: list[Tensor] = []
        self._versions: dict[int, int] = {}  # of parameters whose masters are up to date

    def renew(self, pieces: Iterable[Piece]) -> None:
        """Take over what somebody has written into parameters since the last ``mark_current``."""
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
        """Note that the masters are up to date with these parameters, and of no others."""
        self._versions = {piece.number: piece.parameter._version for piece in pieces}

    def invalidate(self, numbers: Iterable[int]) -> None:
        """Have some parameters' masters made anew."""
        for number in numbers:
            self._versions.pop(number, None)


def exact_masters(pieces: Iterable[Piece], places: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Return by number the master copies of parameters whose values are still those of their places in the flat buffers.

    Parameters hold the rounded values that have crossed the network: a copy made anew from them
    would be rounded, too.

    Args:
        places: For each parameter its place, in its shape.
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
