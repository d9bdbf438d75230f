"""Averages of parameters over a group: the functions that averagers call.

Source: ``torch.distributed.algorithms.model_averaging.utils``, for names and meanings. torch
replaces each parameter's memory by a part of a flat tensor in the widest dtype; here parameters are
averaged in their own dtype and keep their memory, so that views of them (a sharded optimizer's)
stay valid. Parameters that differ in number, shape or dtype between ranks are an error on all of
them.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import torch

from mpidist.comm.algorithms.reduce_op import AVG, MAX
from mpidist.comm.consistency import by_rank, first_difference
from mpidist.comm.group_types import AnyGroup, Group
from mpidist.comm.resolve_group import native_group
from mpidist.errors import DisagreementError

Tensor = torch.Tensor

# Parameters, parameter groups of an optimizer, or an optimizer.
Averaged: TypeAlias = "Iterable[Tensor] | Iterable[dict[str, Any]] | torch.optim.Optimizer"

_BATCH_BYTES = 64 << 20  # of a flat copy of parameters


def average_parameters(params: Iterable[Tensor], process_group: AnyGroup) -> None:
    """Average parameters in place.

    Collective: over the group, with parameters of the same shapes and dtypes in the same order; a
    rank outside does nothing.

    Args:
        params: Dense tensors.
        process_group: A group of mpidist; None for the default.

    Raises:
        NotImplementedError: An item is no tensor.
        TypeError: The group is of another backend, or a parameter is not dense.
        DisagreementError: The number, a shape or a dtype differs between ranks, or another rank
            raised one of the above (on all ranks that raise nothing else).
    """
    if _is_outside(process_group):
        return
    group = native_group(process_group)
    _average(group, _agreed(group, params))


def get_params_to_average(params: Averaged) -> list[Tensor]:
    """Return the parameters that have a gradient.

    Args:
        params: Parameters, the parameter groups of an optimizer, or an optimizer.

    Raises:
        NotImplementedError: An item is neither a tensor nor a parameter group.
    """
    return [parameter for parameter in _all_of(params) if parameter.grad is not None]


def average_parameters_or_parameter_groups(params: Averaged, process_group: AnyGroup) -> None:
    """Average in place the parameters that have a gradient on any rank.

    Collective: over the group, with the same parameters; a rank outside does nothing.

    Args:
        params: Parameters, the parameter groups of an optimizer, or an optimizer.

    Raises:
        NotImplementedError, TypeError, DisagreementError: See ``get_params_to_average`` and
            ``average_parameters``.
    """
    if _is_outside(process_group):
        return
    group = native_group(process_group)
    held = _agreed(group, params)
    # The parameters with a gradient may differ, because ranks whose gradients are not averaged may
    # use different parameters.
    has_gradient = torch.tensor(
        [parameter.grad is not None for parameter in held], dtype=torch.uint8, device="cpu"
    )
    if len(held):
        group.all_reduce(has_gradient, MAX)
    _average(
        group,
        [parameter for parameter, has in zip(held, has_gradient.tolist(), strict=True) if has],
    )


def _all_of(params: Averaged) -> list[Tensor]:
    found: list[Tensor] = []
    for item in params.param_groups if hasattr(params, "param_groups") else params:
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif isinstance(item, dict):
            found += item["params"]
        else:
            raise NotImplementedError(
                "parameters, or parameter groups of an optimizer, are needed; got "
                f"{type(item).__name__}"
            )
    return found


def _is_outside(process_group: object) -> bool:
    return (
        process_group is not None
        and process_group is torch.distributed.GroupMember.NON_GROUP_MEMBER
    )


def _agreed(group: Group, params: Averaged) -> list[Tensor]:
    """Return the parameters after a check that all ranks hold the same.

    Collective: over the group.
    """
    held: list[Tensor] = []
    problem: Exception | None = None
    try:
        held = _all_of(params)
        _require_dense(held)
    except (NotImplementedError, TypeError) as error:
        problem = error
    rows = [f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in held]
    # Each call compares a checksum; the rows are gathered only if it differs.
    own = [int(problem is not None), len(rows), zlib.crc32("\n".join(rows).encode())]
    table = torch.tensor([*own, *(-value for value in own)], device="cpu")
    group.all_reduce(table, MAX)
    most, least = table[:3].tolist(), (-table[3:]).tolist()
    if most != least or most[0]:
        reports = group.all_gather_object((None if problem is None else str(problem), rows))
        if problem is not None:
            raise problem
        raise DisagreementError(
            f"model averaging needs the same parameters on all ranks. {_difference(reports)}"
        )
    return held


def _difference(reports: Sequence[tuple[str | None, Sequence[str]]]) -> str:
    """Return the ranks' errors, or the first parameter that differs between ranks.

    Args:
        reports: By rank: the text of an error, or None; shape and dtype of each parameter.
    """
    if errors := by_rank([problem for problem, _ in reports]):
        return errors
    found = first_difference([rows for _, rows in reports])
    assert found is not None
    return f"parameter {found.place}: {by_rank([row or 'nothing' for row in found.entries])}"


def _require_dense(held: Sequence[Tensor]) -> None:
    for tensor in held:
        if tensor.layout is not torch.strided:
            raise TypeError(
                f"model averaging needs dense parameters; got one of layout {tensor.layout}"
            )


@torch.no_grad()
def _average(group: Group, held: Sequence[Tensor]) -> None:
    if group.size == 1:
        return
    together: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in held:
        together.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    for tensors in together.values():
        batch: list[Tensor] = []
        for tensor in tensors:
            if batch and sum(one.nbytes for one in batch) + tensor.nbytes > _BATCH_BYTES:
                _average_batch(group, batch)
                batch = []
            batch.append(tensor)
        _average_batch(group, batch)


def _average_batch(group: Group, batch: Sequence[Tensor]) -> None:
    if len(batch) == 1 and batch[0].is_contiguous():
        group.all_reduce(batch[0], AVG)
        return
    # In the order of the shape, because strides may differ between ranks.
    flat = torch.cat([tensor.reshape(-1) for tensor in batch])
    if flat.numel():
        group.all_reduce(flat, AVG)
    for tensor, part in zip(batch, flat.split([tensor.numel() for tensor in batch]), strict=True):
        tensor.copy_(part.view(tensor.shape))
