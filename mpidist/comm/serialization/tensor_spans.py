"""Spans of tensors in memory: address ranges of elements, and groups of tensors by them. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch

Tensor = torch.Tensor


def overlap(tensors: Iterable[Tensor]) -> bool:
    """Return whether two contiguous host tensors share memory."""
    reach = -1
    for low, nbytes in sorted([(tensor.data_ptr(), tensor.nbytes) for tensor in tensors]):
        if nbytes:
            if low < reach:
                return True
            # Sorted by address, and none so far overlaps: this one reaches farthest.
            reach = low + nbytes
    return False


def span(tensor: Tensor) -> tuple[int, int]:
    """Return the first address of the tensor's elements and the address after the last."""
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.nbytes
    reach = (
        sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        if tensor.numel()
        else -1
    )
    return start, start + (reach + 1) * tensor.element_size()


def is_folded(tensor: Tensor) -> bool:
    """Return whether a tensor has more elements than memory, as an expanded one."""
    low, high = span(tensor)
    return tensor.nbytes > high - low


def clusters(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Group tensors of one storage whose spans overlap or adjoin, ordered by first member."""
    if len(tensors) == 1:
        return [[0]]
    order = sorted(
        range(len(tensors)),
        key=lambda place: (tensors[place].device.index or -1, *span(tensors[place])),
    )
    found: list[list[int]] = []
    reach, owner = -1, None
    for place in order:
        tensor = tensors[place]
        low, high = span(tensor)
        storage = (tensor.device, tensor.untyped_storage().data_ptr())
        if found and storage == owner and low <= reach and tensor.numel():
            found[-1].append(place)
            reach = max(reach, high)
        else:
            found.append([place])
            reach, owner = high, storage
    return sorted(map(sorted, found))


def clusters_apart(tensors: Sequence[Tensor], alone: Collection[int]) -> list[list[int]]:
    """Group tensors as ``clusters`` does, with bools apart from other dtypes.

    Args:
        alone: Indices of tensors that form groups of their own.
    """
    found = [[place] for place in sorted(alone)]
    for is_bool in (False, True):
        chosen = [
            place
            for place, tensor in enumerate(tensors)
            if place not in alone and (tensor.dtype is torch.bool) is is_bool
        ]
        if chosen:
            found += [
                [chosen[member] for member in members]
                for members in clusters([tensors[place] for place in chosen])
            ]
    return found
