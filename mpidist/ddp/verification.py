"""Comparisons between the ranks of a data-parallel module.

Parameters are compared before the first step, gradients at the end of each backward pass.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Sequence
from typing import NoReturn

import torch

from mpidist.comm.algorithms.reduce_op import SUM
from mpidist.comm.consistency import Row, by_rank
from mpidist.comm.group_types import Group
from mpidist.dynamo import untraced

# Bytes of tensors in one coalesced broadcast, as in torch's DDP.
_BATCH_BYTES = 250 << 20
_ADVICE = (
    "Parameters that take no part in the loss need find_unused_parameters=True (or "
    "static_graph=True if they never do)"
)


def named_state(
    module: torch.nn.Module, ignored: Collection[str], with_buffers: bool
) -> list[tuple[str, torch.Tensor]]:
    """Return parameters, and buffers if asked for, by name; without those ``ignored``."""
    named: list[tuple[str, torch.Tensor]] = list(module.named_parameters())
    if with_buffers:
        named += module.named_buffers()
    return [(name, tensor) for name, tensor in named if name not in ignored]


def rows_of(named: Sequence[tuple[str, torch.Tensor]]) -> list[Row]:
    """Return name, shape, dtype and device type of tensors, for a comparison between ranks.

    Strides are compared for tensors that require a gradient.
    """
    return [
        (
            name,
            f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device.type}"
            + (f" strides {tensor.stride()}" if tensor.requires_grad else ""),
        )
        for name, tensor in named
    ]


@untraced
def broadcast_state(group: Group, tensors: Sequence[torch.Tensor], root: int = 0) -> None:
    """Broadcast ``root``'s values.

    Collective: over the group.

    Raises:
        LengthError: A tensor has another number of bytes on this rank.
    """
    together: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        # Coalesced on a device, because the host would wait for a copy per message.
        if tensor.is_cuda:
            together.setdefault(tensor.dtype, []).append(tensor.detach())
        # Also without elements: on another rank it may have some, and the broadcasts behind it
        # would be taken for one another.
        else:
            group.broadcast(tensor.detach(), root)
    for same_dtype in together.values():
        for batch in _batches(same_dtype):
            group.broadcast_coalesced(batch, root)


def broadcast_module(group: Group, named: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Broadcast rank 0's parameters and buffers, as writes in place that torch knows of.

    Collective: over the group.
    """
    tensors = [tensor for _, tensor in named]
    broadcast_state(group, tensors)
    # A sharded optimizer with a wire asks by it whether its parameters have been written.
    torch.autograd.graph.increment_version(tensors)


def _batches(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Split a list of tensors into batches of at most ``_BATCH_BYTES``, or of one tensor."""
    batch: list[torch.Tensor] = []
    for tensor in tensors:
        if batch and sum(t.nbytes for t in batch) + tensor.nbytes > _BATCH_BYTES:
            yield batch
            batch = []
        batch.append(tensor)
    yield batch


def used_somewhere(
    group: Group,
    has_gradient: Sequence[bool],
    complaints: Sequence[str],
    may_lack_all: bool = False,
    hook_error: Exception | None = None,
) -> list[bool]:
    """Return for each parameter whether any rank has a gradient.

    Collective: over the group.

    Args:
        complaints: Texts on this rank's invalid gradients: added to too often, or in another
            layout.
        may_lack_all: Warn if no rank has any gradient, as torch's module does; else raise.
        hook_error: As ``require_all_gradients``.

    Raises:
        RuntimeError: There is no gradient at all, or a complaint or an error on any rank (on all
            ranks).
        Exception: ``hook_error``, on the rank that gave it.
    """
    lines = _lines(complaints, hook_error)
    table = torch.tensor([*has_gradient, len(lines)], dtype=torch.int32, device="cpu")
    group.all_reduce(table, SUM)
    *used, wrong = table.tolist()
    if wrong:
        _raise_of_all(group, lines, hook_error)
    if not any(used):
        text = (
            "no parameter received a gradient on any rank: the loss does not depend on the "
            "module's parameters. Look for a detach(), a no_grad(), or a function of your own that "
            "returns None for its gradient"
        )
        if not may_lack_all:
            raise RuntimeError(text)
        warnings.warn(text, stacklevel=2)
    return [bool(count) for count in used]


def require_all_gradients(
    group: Group,
    missing: Sequence[str],
    complaints: Sequence[str],
    hook_error: Exception | None = None,
) -> None:
    """Require that every rank has all gradients and no complaint.

    Collective: over the group.

    Args:
        missing: Names of the parameters without a gradient on this rank.
        complaints: Texts on this rank's invalid gradients: added to too often, or in another
            layout.
        hook_error: The error of what the hook has returned on this rank, or None.

    Raises:
        RuntimeError: A rank lacks a gradient or has a complaint or an error (on all ranks); the
            text names the parameters and the ranks.
        Exception: ``hook_error``, on the rank that gave it.
    """
    lines = _lines(complaints, hook_error)
    table = torch.tensor([len(missing), len(lines)], device="cpu")
    group.all_reduce(table, SUM)
    absent, wrong = table.tolist()
    if wrong:
        _raise_of_all(group, lines, hook_error)
    if absent:
        text = _gathered_texts(group, [_listed(missing)] if missing else [])
        raise RuntimeError(
            f"parameters received no gradient in this backward pass. {text}. {_ADVICE}"
        )


def _lines(complaints: Sequence[str], hook_error: Exception | None) -> list[str]:
    return [*complaints] if hook_error is None else [*complaints, str(hook_error)]


def _raise_of_all(group: Group, lines: Sequence[str], hook_error: Exception | None) -> NoReturn:
    text = _gathered_texts(group, lines)
    if hook_error is not None:
        raise hook_error
    raise RuntimeError(text)


def _gathered_texts(group: Group, lines: Sequence[str]) -> str:
    return by_rank([" ".join(texts) or None for texts in group.all_gather_object(list(lines))])


def _listed(names: Sequence[str], most: int = 10) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
