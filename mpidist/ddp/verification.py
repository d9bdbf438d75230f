"""Comparisons between the ranks of a data-parallel module.

Parameters are compared before the first step, gradients at the end of each backward pass.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from mpidist.comm.algorithms.reduce_op import SUM
from mpidist.comm.consistency import by_rank, first_difference
from mpidist.comm.group_protocol import Group
from mpidist.dynamo import untraced
from mpidist.errors import DisagreementError

# Bytes of tensors in one coalesced broadcast, as in torch's DDP.
_BATCH_BYTES = 250 << 20
_ADVICE = (
    "Parameters that take no part in the loss need find_unused_parameters=True (or "
    "static_graph=True if they never do)"
)


def require_equal(
    group: Group,
    named: Sequence[tuple[str, torch.Tensor]],
    settings: Any = None,
    refusal: str | None = None,
) -> None:
    """Compare settings, and names, shapes, dtypes and device types of parameters and buffers.

    Strides are compared for tensors that require a gradient.

    Collective: over the group.

    Args:
        settings: Compared by their text.
        refusal: This rank's error, which the caller raises afterwards; None if it has none.

    Raises:
        DisagreementError: A tensor or the settings differ, or a rank has an error (on all ranks);
            the text names the first tensor that differs and each rank's.
    """
    rows = [
        (
            name,
            tuple(t.shape),
            f"{t.dtype} on {t.device.type}",
            t.stride() if t.requires_grad else None,
        )
        for name, t in named
    ]
    tables = group.all_gather_object(refusal or [str(settings), *rows])
    if refusals := by_rank([text if isinstance(text, str) else None for text in tables]):
        raise DisagreementError(f"DistributedDataParallel was refused. {refusals}")
    found = first_difference(tables)
    if found is not None:
        subject = f"tensor {found.place - 1} differs" if found.place else "the settings differ"
        values = by_rank([_text(row) for row in found.entries])
        raise DisagreementError(f"DistributedDataParallel: {subject} between ranks. {values}")


@contextmanager
def announcing_refusal(group: Group) -> Iterator[None]:
    """Pass an error of this rank's arguments to the other ranks, which run ``require_equal``.

    Collective: over the group, if an error is raised.
    """
    try:
        yield
    except (TypeError, ValueError, RuntimeError) as error:
        with suppress(DisagreementError):
            require_equal(group, [], refusal=str(error))
        raise


@untraced
def broadcast_state(group: Group, tensors: Sequence[torch.Tensor], root: int = 0) -> None:
    """Broadcast ``root``'s values. Collective: over the group."""
    together: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        # Coalesced on a device, because the host would wait for a copy per message.
        if tensor.is_cuda:
            together.setdefault(tensor.dtype, []).append(tensor.detach())
        elif tensor.numel():
            group.broadcast(tensor.detach(), root)
    for same_dtype in together.values():
        for batch in _batches(same_dtype):
            group.broadcast_coalesced(batch, root)


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
) -> list[bool]:
    """Return for each parameter whether any rank has a gradient.

    Collective: over the group.

    Args:
        complaints: Texts on this rank's invalid gradients: added to too often, or in another
            layout.
        may_lack_all: Warn if no rank has any gradient, as torch's module does; else raise.

    Raises:
        RuntimeError: There is no gradient at all, or a complaint on any rank (on all ranks).
    """
    table = torch.tensor([*has_gradient, len(complaints)], dtype=torch.int32, device="cpu")
    group.all_reduce(table, SUM)
    *used, wrong = table.tolist()
    if wrong:
        raise RuntimeError(_gathered_texts(group, complaints))
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


def require_all_gradients(group: Group, missing: Sequence[str], complaints: Sequence[str]) -> None:
    """Require that every rank has all gradients and no complaint.

    Collective: over the group.

    Args:
        missing: Names of the parameters without a gradient on this rank.
        complaints: Texts on this rank's invalid gradients: added to too often, or in another
            layout.

    Raises:
        RuntimeError: A rank lacks a gradient or has a complaint (on all ranks); the text names the
            parameters and the ranks.
    """
    table = torch.tensor([len(missing), len(complaints)], device="cpu")
    group.all_reduce(table, SUM)
    absent, wrong = table.tolist()
    if wrong:
        raise RuntimeError(_gathered_texts(group, complaints))
    if absent:
        text = _gathered_texts(group, [_listed(missing)] if missing else [])
        raise RuntimeError(
            f"parameters received no gradient in this backward pass. {text}. {_ADVICE}"
        )


def require_equal_owners(
    group: Group,
    names: Sequence[str],
    owners: Mapping[int, Any] | None,
    buffers: int | None,
    problem: Exception | None,
) -> None:
    """Compare the owners of gradients.

    Collective: over the group.

    Args:
        names: Names of all parameters.
        owners: Owners by place; None for averages on all ranks.
        buffers: Number of buffers in which the buckets rotate.
        problem: This rank's error, raised here after the exchange; None if it has none.

    Raises:
        DisagreementError: Another rank has an error or other owners; the text names the first
            parameter that differs.
    """
    rows = (
        None if owners is None else (buffers, *(owners.get(place) for place in range(len(names))))
    )
    reports = group.all_gather_object((rows, None if problem is None else str(problem)))
    if problem is not None:
        raise problem
    if refusals := by_rank([text for _, text in reports]):
        raise DisagreementError(f"the communication hook was refused. {refusals}")
    tables = [table for table, _ in reports if table is not None]
    if tables and len(tables) < len(reports):
        without = [rank for rank, (table, _) in enumerate(reports) if table is None]
        raise DisagreementError(
            f"gradients leave to owners on some ranks and not on ranks {without}: all register the "
            "same hook"
        )
    found = first_difference(tables) if tables else None
    if found is not None:
        parameter = f"the owners of parameter {names[found.place - 1]!r} differ"
        subject = parameter if found.place else "the numbers of buffers differ"
        values = by_rank([str(entry) for entry in found.entries])
        raise DisagreementError(f"{subject} between ranks. {values}")


def _gathered_texts(group: Group, lines: Sequence[str]) -> str:
    return by_rank([" ".join(texts) or None for texts in group.all_gather_object(list(lines))])


def _text(row: Any) -> str:
    if not isinstance(row, tuple):
        return str(row)
    name, shape, dtype, strides = row
    return f"{name} {shape} {dtype}" + (f" strides {strides}" if strides is not None else "")


def _listed(names: Sequence[str], most: int = 10) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
