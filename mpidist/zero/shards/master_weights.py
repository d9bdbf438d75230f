"""Master copies: full-precision shards that a rank steps, where all ranks see rounded values.

A master copy is renewed from its parameter only when other code has written the parameter. That
raises autograd's version counter of the parameter; writes to the flat buffer do not. A parameter
that still has its master's values, rounded to a half type, leaves the master as it is.

A loaded master is compared with its parameter at the next step, since the parameters may be loaded
before the optimizer or after it. It stands if the parameter has the values that ranks saw beside
the master when it was saved. Those of a half wire are the master, rounded; those of another wire
are saved too.
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

    Args:
        saves_seen: The values that ranks see are saved beside the masters, which do not give them.

    Attributes:
        flats: The copy of this rank's shard of each flat buffer.
        saves_seen: As given.
    """

    def __init__(self, saves_seen: bool = False) -> None:
        self.flats: list[Tensor] = []
        self.saves_seen = saves_seen
        self._versions: dict[int, int] = {}  # of parameters whose masters are up to date
        # Of loaded masters that were not compared with their parameters yet, by number: the values
        # that ranks saw, in the shape of the piece; None for the master, rounded.
        self._loaded: dict[int, Tensor | None] = {}

    def load(self, piece: Piece, value: Tensor, seen: Tensor | None) -> None:
        """Copy a saved master to a piece's; ``renew`` compares it with the parameter.

        Args:
            piece: One with a place in a buffer.
            value: The master, in the shape of the piece.
            seen: The values that ranks saw beside it, likewise; None if they were the master,
                rounded to a half type. Kept until it is compared.
        """
        piece.tensor.detach().copy_(value)
        self._loaded[piece.number] = seen

    def renew(self, pieces: Sequence[Piece]) -> None:
        """Copy parameters to their masters: those written since the last ``mark_current``.

        A loaded master is renewed if the parameter has other values than were seen beside it.
        """
        if self.flats:
            self.settle(pieces)
            self.renew_written(pieces)

    def settle(self, pieces: Iterable[Piece]) -> None:
        """Compare loaded masters with their parameters, and renew those that do not stand."""
        loaded, self._loaded = self._loaded, {}
        for piece in pieces:
            if piece.number in loaded:
                if not _stands(piece, loaded[piece.number]):
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
            if known is None or self.saves_seen or not _stands(piece, None):
                piece.tensor.detach().copy_(elements_of(piece))
            self._versions[piece.number] = version

    def mark_current(self, pieces: Iterable[Piece]) -> None:
        """Record that the masters of these pieces, and of no others, are up to date."""
        self._versions = {piece.number: piece.parameter._version for piece in pieces}

    def seen(self, pieces: Iterable[Piece], shards: Iterable[Tensor]) -> list[Tensor]:
        """Return copies of the values that ranks see beside the masters; empty if not saved.

        Args:
            shards: This rank's shard of each flat buffer.
        """
        if not self.flats or not self.saves_seen:
            return []
        found = [shard.clone() for shard in shards]
        for piece in pieces:
            values = self._loaded.get(piece.number)
            if piece.home is not None and values is not None:
                piece.state_view(found[piece.home[0]]).copy_(values)
        return found

    def invalidate(self, numbers: Iterable[int]) -> None:
        """Mark some parameters' masters as out of date."""
        for number in numbers:
            self._versions.pop(number, None)
            self._loaded.pop(number, None)


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


def _stands(piece: Piece, seen: Tensor | None) -> bool:
    """Return whether a parameter has the values that ranks saw beside its loaded master."""
    master = piece.tensor.detach()
    now = elements_of(piece).to(master)
    if seen is not None:
        return torch.equal(now, seen.to(master))
    return any(torch.equal(now, master.to(half).to(master.dtype)) for half in _HALVES)
