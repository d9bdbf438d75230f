"""State that an optimizer makes in its first step, determined on a copy of the piece."""

from __future__ import annotations

from typing import Any

import torch

from mpidist.zero.groups import ParamGroup, settings
from mpidist.zero.pieces import Piece
from mpidist.zero.state_dict import ParamState


def first_state(
    optim: type[torch.optim.Optimizer],
    group: ParamGroup,
    defaults: dict[str, Any],
    piece: Piece,
) -> ParamState:
    """Return the state of one piece after a step with a gradient of zeros, for names and shapes.

    Args:
        group: The settings of the piece's group.
        defaults: Arguments of the optimizer.
    """
    twin = torch.nn.Parameter(torch.zeros_like(piece.tensor.detach()))
    twin.grad = torch.zeros_like(twin)
    made = optim([{**settings(group), "params": [twin]}], **defaults)
    made.step()
    return dict(made.state[twin])
