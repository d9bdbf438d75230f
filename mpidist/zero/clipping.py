"""Gradient norm over the shards of all ranks.

Source: ``torch.nn.utils.clip_grad_norm_``, with the same result; each rank sums its own shard.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import torch

from mpidist.comm.algorithms.reduce_op import MAX, SUM
from mpidist.comm.group_types import Group
from mpidist.zero.shards.pieces import Piece

Tensor = torch.Tensor
Filter = Callable[[list[Tensor]], Iterable[Tensor]]  # returns some of the given parameters
_TINY = 1e-6  # torch's guard against division by zero


def limits(max_norm: float, norm_type: float) -> tuple[float, float]:
    """Return both arguments as floats.

    Raises:
        ValueError: ``norm_type`` is not positive, or ``max_norm`` is NaN.
    """
    if not float(norm_type) > 0 or math.isnan(max_norm):
        raise ValueError(
            f"clip_grad_norm needs norm_type > 0 and a number for max_norm; got {norm_type} and "
            f"{max_norm}"
        )
    return float(max_norm), float(norm_type)


def own_gradients(pieces: Sequence[Piece], chosen: Filter | None) -> list[tuple[Piece, Tensor]]:
    """Return the pieces that have a gradient, and the gradients.

    Args:
        chosen: Called with the pieces' parameters; the others' gradients do not count.
    """
    own = [piece for piece in pieces if piece.parameter.grad is not None]
    if chosen is not None:
        kept = set(map(id, chosen([piece.parameter for piece in own])))
        own = [piece for piece in own if id(piece.parameter) in kept]
    return [(piece, gradient) for piece in own if (gradient := piece.gradient()) is not None]


def clip(
    group: Group,
    own: Sequence[tuple[Piece, Tensor]],
    max_norm: float,
    norm_type: float,
    device: torch.device,
) -> Tensor:
    """Scale gradients in place such that the norm over all ranks is at most ``max_norm``.

    Collective: over the group.

    Args:
        own: This rank's pieces and their gradients, of any dtypes and devices.
        norm_type: p > 0, or infinity.
        device: Of the result.

    Returns:
        The norm before scaling, a 0-dim tensor of fp64.
    """
    dense = [
        gradient.coalesce().values() if gradient.is_sparse else gradient for _, gradient in own
    ]
    norms = _norms([each for each in dense if each.numel()], norm_type, device)
    if math.isinf(norm_type):
        total = norms.max()
        group.all_reduce(total, MAX)
    else:
        total = (norms**norm_type).sum()
        group.all_reduce(total, SUM)
        total = total ** (1 / norm_type)
    scale = (max_norm / (total + _TINY)).clamp(max=1.0)
    # The host does not read the norm, so a CUDA stream is not synchronized. As in torch, a NaN norm
    # makes all gradients NaN.
    for indices in _by_kind([gradient for _, gradient in own]):
        gradients = [own[index][1] for index in indices]
        dtype = gradients[0].dtype
        factor = scale.to(gradients[0].device, dtype.to_real() if dtype.is_complex else dtype)
        if gradients[0].layout is torch.strided:
            torch._foreach_mul_(gradients, factor)
        else:
            for gradient in gradients:
                gradient.mul_(factor)
    for piece, gradient in own:
        piece.put_back(gradient)
    return total


def _norms(tensors: Sequence[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Return the norm of each tensor, or one 0, in fp64 on ``device``; some launches a kind."""
    norms: dict[int, Tensor] = {}
    for indices in _by_kind(tensors):
        alike = [tensors[index] for index in indices]
        wide = torch.float32 if alike[0].dtype in (torch.float16, torch.bfloat16) else None
        found = torch.stack(torch._foreach_norm(alike, norm_type, dtype=wide))
        norms |= zip(indices, found.to(device, torch.float64).unbind(), strict=True)
    if not norms:
        return torch.zeros(1, dtype=torch.float64, device=device)
    return torch.stack([norms[index] for index in range(len(tensors))])


def _by_kind(tensors: Sequence[Tensor]) -> Iterable[list[int]]:
    """Return the indices of tensors of one device, dtype and layout, for each of these kinds."""
    indices: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
    for index, tensor in enumerate(tensors):
        indices[tensor.device, tensor.dtype, tensor.layout].append(index)
    return indices.values()
