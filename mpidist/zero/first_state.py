"""State that an optimizer makes in its first step, determined on a copy of the piece."""

from __future__ import annotations

import inspect
from collections import OrderedDict, defaultdict
from typing import Any

import torch

from mpidist.zero.groups import ParamGroup, settings
from mpidist.zero.pieces import Piece
from mpidist.zero.state_dict import ParamState

Optimizer = torch.optim.Optimizer


def first_state(optim: Optimizer, group: ParamGroup, piece: Piece) -> ParamState:
    """Return the state of one piece after a step with a gradient of zeros, for names and shapes.

    Args:
        optim: The base optimizer, which does not change.
        group: The settings of the piece's group.
    """
    twin = torch.nn.Parameter(torch.zeros_like(piece.tensor.detach()))
    twin.grad = torch.zeros_like(twin)
    made = _like(optim, {**settings(group), "params": [twin]})
    made.step()
    return dict(made.state[twin])


def _like(optim: Optimizer, group: ParamGroup) -> Optimizer:
    """Return an optimizer of the same class over one group."""
    kind = type(optim)
    taken = inspect.signature(kind).parameters
    has_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in taken.values())
    # AdamW and others keep settings among their defaults that their constructors do not take.
    arguments = {key: value for key, value in optim.defaults.items() if has_all or key in taken}
    try:
        return kind([group], **arguments)
    except TypeError:
        return _copied(optim, group)


def _copied(optim: Optimizer, group: ParamGroup) -> Optimizer:
    """Return a copy without state and hooks, for a constructor that takes other arguments."""
    made = object.__new__(type(optim))
    made.__dict__.update(optim.__dict__)
    held: dict[str, Any] = {
        name: OrderedDict() for name in vars(optim) if name.endswith(("pre_hooks", "post_hooks"))
    }
    made.__dict__.update(held, state=defaultdict(dict), param_groups=[group])
    return made
