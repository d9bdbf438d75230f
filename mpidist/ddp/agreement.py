"""What all ranks of a data-parallel module must hold alike: parameters before the first step, gradients at the end of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mpidist.comm.arithmetic import SUM
from mpidist.errors import DisagreementError

_ADVICE = (
    "Parameters that take no part in the loss need find_unused_parameters=True (or static_graph=True if they never do); "
    "torch.autograd.grad() is not supported, because it adds to no gradient: call backward()"
)


def require_equal_parameters(group: Any, named: Sequence[tuple[str, torch.Tensor]], refusal: str | None = None) -> None:
    """Compare names, shapes, strides and dtypes of the parameters; a bucket holds elements in the order of memory.

    Collective: over the group.

    Args:
        refusal: Why this rank cannot go on, which it raises itself afterwards.

    Raises:
        DisagreementError: On all ranks, naming the first parameter that differs and what each rank holds, or who refused.
    """
    own = refusal or [(name, tuple(p.shape), str(p.dtype), p.stride()) for name, p in named]
    tables = group.all_gather_object(own)
    refused = "; ".join(f"rank {rank}: {told}" for rank, told in enumerate(tables) if isinstance(told, str))
    if refused:
        raise DisagreementError(f"DistributedDataParallel was refused. {refused}")
    if all(table == tables[0] for table in tables):
        return
    for place in range(max(len(table) for table in tables)):
        rows = [table[place] if place < len(table) else None for table in tables]
        if len(set(rows)) > 1:
            told = "; ".join(f"rank {rank}: {_text(row)}" for rank, row in enumerate(rows))
            raise DisagreementError(f"DistributedDataParallel: parameter {place} differs between ranks. {told}")


def broadcast_state(group: Any, tensors: Sequence[torch.Tensor], root: int = 0) -> None:
    """Give ``root``'s values to all. Collective: over the group."""
    for tensor in tensors:
        if tensor.numel():
            group.broadcast(tensor.detach(), root)


def used_somewhere(group: Any, has_gradient: Sequence[bool]) -> list[bool]:
    """Return for each parameter whether any rank has a gradient.

    Collective: over the group.

    Raises:
        RuntimeError: On all ranks, if there is no gradient at all.
    """
    used = torch.tensor(has_gradient, dtype=torch.int32)
    group.all_reduce(used, SUM)
    if not used.any():
        raise RuntimeError(f"no parameter received a gradient on any rank. {_ADVICE}")
    return [bool(count) for count in used.tolist()]


def require_all_gradients(group: Any, missing: Sequence[str]) -> None:
    """Find out whether any rank lacks a gradient.

    Collective: over the group.

    Args:
        missing: The names of the parameters that received none on this rank.

    Raises:
        RuntimeError: On all ranks, naming the parameters and the ranks.
    """
    absent = torch.tensor([len(missing)])
    group.all_reduce(absent, SUM)
    if not int(absent):
        return
    told = group.all_gather_object(list(missing))
    lines = [f"rank {rank}: {_listed(names)}" for rank, names in enumerate(told) if names]
    raise RuntimeError(f"parameters received no gradient in this backward pass. {'; '.join(lines)}. {_ADVICE}")


def _text(row: tuple[str, tuple[int, ...], str, tuple[int, ...]] | None) -> str:
    return "none" if row is None else f"{row[0]} {row[1]} {row[2]} strides {row[3]}"


def _listed(names: Sequence[str], most: int = 10) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
