"""Chunks of a tensor (pure): rectangular parts that cover a run of its elements in memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from mpidist.kernels.view import is_dense


class Chunk(NamedTuple):
    """Rectangular part: first index and length in each dimension, and number of the first element.

    Elements are numbered in the order of memory.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    first: int


def _memory_order(form: torch.Tensor) -> list[int]:
    """Return a tensor's dimensions by descending stride; in their own order if it is not dense."""
    strides = form.stride()
    if not is_dense(form):
        return list(range(form.dim()))
    return sorted(range(form.dim()), key=lambda dim: (-strides[dim], dim))


def chunks_of(form: torch.Tensor, start: int, stop: int) -> list[Chunk]:
    """Divide elements ``start`` to ``stop``, in memory order, into the fewest chunks.

    Each chunk holds consecutive elements.

    Args:
        form: A tensor of the shape and strides; its values are not read.

    Returns:
        At most 2 d - 1 chunks of d dimensions, in the order of their elements; of a tensor without
        elements one empty chunk.
    """
    if not form.numel():
        # The tensor's place in a checkpoint, which readers of its name look for.
        return [Chunk((0,) * form.dim(), tuple(form.shape), 0)]
    order = _memory_order(form)
    sizes = [form.shape[dim] for dim in order]
    strides = [math.prod(sizes[place + 1 :]) for place in range(len(sizes))]
    found = []
    while start < stop:
        index = [start // stride % size for stride, size in zip(strides, sizes, strict=True)]
        lengths, numel = [1] * len(sizes), 1
        # The outermost dimension of which a whole index begins here and ends within the run.
        for place, stride in enumerate(strides):
            if start % stride == 0 and start + stride <= stop:
                count = min((stop - start) // stride, sizes[place] - index[place])
                lengths[place:] = [count, *sizes[place + 1 :]]
                numel = count * stride
                break
        found.append(Chunk(_placed(index, order), _placed(lengths, order), start))
        start += numel
    return found


def view_of(chunk: Chunk, form: torch.Tensor, elements: torch.Tensor, start: int) -> torch.Tensor:
    """Return a view of a chunk's elements, in the chunk's shape.

    Args:
        elements: A vector that begins with element ``start``.
    """
    order = _memory_order(form)
    run = elements[chunk.first - start : chunk.first - start + math.prod(chunk.sizes)]
    back = sorted(range(len(order)), key=order.__getitem__)
    return run.view([chunk.sizes[dim] for dim in order]).permute(back)


def _placed(values: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    placed = [0] * len(order)
    for dim, value in zip(order, values, strict=True):
        placed[dim] = value
    return tuple(placed)
