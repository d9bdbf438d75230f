"""Flat state of the base optimizer: one tensor for each kind (``exp_avg``, …) and buffer.

Each tensor is as long as the rank's shard, so consolidation sends one message for each kind. The
base optimizer works on views.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias, TypeGuard

import torch

from mpidist.zero.shards.pieces import Piece
from mpidist.zero.state.result_memory import zeros

Tensor = torch.Tensor
ParamState: TypeAlias = dict[str, object]  # of one parameter: values by name
State: TypeAlias = Mapping[Tensor, ParamState]  # by the base optimizer's tensors


class Kind(NamedTuple):
    """One kind of state of one flat buffer."""

    buffer: int
    name: str
    dtype: torch.dtype
    device: torch.device


class FlatState:
    """The flat tensors of one rank.

    Args:
        spare: Tensors that the first ``flatten`` may reuse.

    Attributes:
        kinds: The tensor of each kind, with as many elements as the rank's shard of the buffer.
        entries: Tensors that had state at the last ``flatten``; with more, some state is not flat.
    """

    def __init__(self, spare: Mapping[Kind, Tensor] | None = None) -> None:
        self.kinds: dict[Kind, Tensor] = {}
        self._spare = dict(spare or {})
        self.entries = 0

    def flatten(self, pieces: Iterable[Piece], state: State, sizes: Sequence[int]) -> None:
        """Move element-wise state into the flat tensors; ``state`` then holds views of them.

        Args:
            state: The base optimizer's.
            sizes: Elements of this rank's shard of each buffer.
        """
        for piece in pieces:
            held = state.get(piece.tensor)
            if not held or piece.home is None:
                continue
            size = sizes[piece.home[0]]
            for name, value in held.items():
                if not self.belongs(value, piece):
                    continue
                kind = Kind(piece.home[0], name, value.dtype, value.device)
                flat = self.kinds.get(kind)
                if flat is None:
                    flat = self._spare.pop(kind, None)
                    if flat is None or flat.numel() != size:
                        flat = zeros(size, value.dtype, value.device)
                    self.kinds[kind] = flat
                view = piece.state_view(flat)
                if value.data_ptr() != view.data_ptr():
                    view.copy_(value)
                    held[name] = view
        self._spare.clear()
        self.entries = len(state)

    @staticmethod
    def belongs(value: object, piece: Piece) -> TypeGuard[Tensor]:
        """Return whether a value has one element for each element of the piece."""
        return (
            piece.home is not None
            and isinstance(value, torch.Tensor)
            and value.layout is torch.strided
            and value.dim() > 0
            and value.shape == piece.tensor.shape
        )
