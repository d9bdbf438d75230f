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


def memory_order(form: torch.Tensor) -> list[int]:
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
        At most 2 d - 1 chunks of d dimensions, in the order of their elements.
    """
    order = memory_order(form)
    found = []
    for offsets, sizes, first in _runs([form.shape[dim] for dim in order], start, stop):
        found.append(Chunk(_placed(offsets, order), _placed(sizes, order), first))
    return found


def view_of(chunk: Chunk, form: torch.Tensor, elements: torch.Tensor, start: int) -> torch.Tensor:
    """Return a view of a chunk's elements, in the chunk's shape.

    Args:
        elements: A vector that begins with element ``start``.
    """
    order = memory_order(form)
    run = elements[chunk.first - start : chunk.first - start + math.prod(chunk.sizes)]
    back = sorted(range(len(order)), key=order.__getitem__)
    return run.view([chunk.sizes[dim] for dim in order]).permute(back)


def _runs(
    sizes: Sequence[int], start: int, stop: int
) -> list[tuple[tuple[int, ...], tuple[int, ...], int]]:
    if start >= stop:
        return []
    if not sizes:
        return [((), (), start)]
    inner = math.prod(sizes[1:])
    first_whole, end_whole = -(-start // inner), stop // inner
    found = []
    if first_whole > end_whole:  # all within one index of the first dimension
        return _inside(sizes, first_whole - 1, inner, start, stop)
    if start < first_whole * inner:
        found += _inside(sizes, first_whole - 1, inner, start, first_whole * inner)
    if first_whole < end_whole:
        zeros = (0,) * (len(sizes) - 1)
        found.append(
            ((first_whole, *zeros), (end_whole - first_whole, *sizes[1:]), first_whole * inner)
        )
    if end_whole * inner < stop:
        found += _inside(sizes, end_whole, inner, end_whole * inner, stop)
    return found


def _inside(
    sizes: Sequence[int], index: int, inner: int, start: int, stop: int
) -> list[tuple[tuple[int, ...], tuple[int, ...], int]]:
    base = index * inner
    return [
        ((index, *offsets), (1, *lengths), base + first)
        for offsets, lengths, first in _runs(sizes[1:], start - base, stop - base)
    ]


def _placed(values: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    placed = [0] * len(order)
    for dim, value in zip(order, values, strict=True):
        placed[dim] = value
    return tuple(placed)
