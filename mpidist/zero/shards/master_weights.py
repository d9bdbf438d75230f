"""Master copies: full-precision shards that a rank steps, where all ranks see rounded values.

A master copy is renewed from its parameter only when other code has written the parameter. That
raises autograd's version counter of the parameter; writes to the flat buffer do not. A parameter
that still has its master's values, rounded to a half type, leaves the master as it is.

A loaded master is compared with its parameter at the next step, since the parameters may be loaded
before the optimizer or after it. It stands if the parameter has the values that ranks saw when it
was saved: the master, rounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from mpidist.zero.shards.flat_buffers import in_memory_order
from mpidist.zero.shards.pieces import Piece

Tensor = torch.Tensor

# Types of half wires, to which a master may have been rounded for the ranks to see.
_HALVES = (torch.bfloat16, torch.float16)


class Masters:
    """The master copies of one rank.

    Attributes:
        flats: The copy of this rank's shard of each flat buffer.
    """

    def __init__(self) -> None:
        self.flats: list[Tensor] = []
        self._versions: dict[int, int] = {}  # of parameters whose masters are up to date
        # Numbers of loaded masters that were not compared with their parameters yet.
        self._loaded: set[int] = set()

    def load(self, piece: Piece, value: Tensor) -> None:
        """Copy a saved master to a piece's; ``renew`` compares it with the parameter.

        Args:
            piece: One with a place in a buffer.
            value: The master, in the shape of the piece.
        """
        piece.tensor.detach().copy_(value)
        self._loaded.add(piece.number)

    def renew(self, pieces: Sequence[Piece]) -> None:
        """Copy parameters to their masters: those written since the last ``mark_current``.

        A loaded master is renewed if the parameter has other values than the master, rounded.
        """
        if self.flats:
            self.settle(pieces)
            self.renew_written(pieces)

    def settle(self, pieces: Iterable[Piece]) -> None:
        """Compare loaded masters with their parameters, and renew those that do not stand."""
        loaded, self._loaded = self._loaded, set()
        for piece in pieces:
            if piece.number in loaded:
                if not _stands(piece):
                    piece.tensor.detach().copy_(elements_of(piece))
                self._versions[piece.number] = piece.parameter._version

    def renew_written(self, pieces: Iterable[Piece]) -> None:
        """Renew masters, but not loaded ones, whose parameters may be about to be loaded."""
        if not self.flats:
            return
        for piece in pieces:
            version, known = piece.parameter._version, self._versions.get(piece.number)
            if piece.home is None or piece.number in self._loaded or known == version:
                continue
            # It may have been written with the values that it had, as by a module that is wrapped
            # again.
            if known is None or not _stands(piece):
                piece.tensor.detach().copy_(elements_of(piece))
            self._versions[piece.number] = version

    def mark_current(self, pieces: Iterable[Piece]) -> None:
        """Record that the masters of these pieces, and of no others, are up to date."""
        self._versions = {piece.number: piece.parameter._version for piece in pieces}

    def invalidate(self, numbers: Iterable[int]) -> None:
        """Mark some parameters' masters as out of date."""
        for number in numbers:
            self._versions.pop(number, None)
            self._loaded.discard(number)


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


def elements_of(piece: Piece) -> Tensor:
    """Return the elements of a piece as the parameter has them, in the piece's shape."""
    values = piece.parameter.detach()
    if piece.is_whole:
        return values
    return in_memory_order(values, piece.parameter)[piece.start : piece.stop]


def _stands(piece: Piece) -> bool:
    """Return whether a parameter has the values of its master, rounded to a half type."""
    master = piece.tensor.detach()
    now = elements_of(piece).to(master)
    return any(torch.equal(now, master.to(half).to(master.dtype)) for half in _HALVES)
