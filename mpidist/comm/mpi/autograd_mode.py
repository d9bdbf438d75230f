"""Autograd modes (grad mode, inference mode) of the thread that executes an operation.

A collective writes below autograd, as torch's own backends do: into a leaf under ``no_grad``, into
an inference tensor from any thread. Modes belong to a thread, and the executing thread may differ
from the issuing one.

Source: torch's notes on inference mode: an inference tensor may be written in inference mode only,
and every tensor allocated in inference mode stays an inference tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

_UNCHANGED: AbstractContextManager[object] = nullcontext()


def to_write(*groups: Sequence[torch.Tensor]) -> AbstractContextManager[object] | None:
    """Return a context in which this thread may write these tensors, unrecorded by autograd.

    None if it may do so as it is.
    """
    if torch.is_inference_mode_enabled():
        return None
    is_recorded = False
    seen: Sequence[torch.Tensor] | None = None
    for tensors in groups:
        if tensors is seen:  # reduced in place
            continue
        seen = tensors
        for tensor in tensors:
            if tensor.is_inference():
                return torch.inference_mode()
            is_recorded = is_recorded or tensor.requires_grad
    return torch.no_grad() if is_recorded and torch.is_grad_enabled() else None


def writing(*groups: Sequence[torch.Tensor]) -> AbstractContextManager[object]:
    """Return ``to_write``'s context, or one that changes nothing."""
    return to_write(*groups) or _UNCHANGED


def allocating() -> AbstractContextManager[object]:
    """Return a context for memory that outlives the call: its tensors are not inference ones."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else _UNCHANGED
