"""Overlap of inputs and outputs in memory: an input that an output would overwrite is copied first.

MPI forbids overlapping buffers (MPI-4.1 §6.1), and an algorithm of several messages would send data
that it has just received. Each rank copies for itself: the MPI calls that follow do not depend on
the copies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

Tensor = torch.Tensor
Tensors = Sequence[torch.Tensor]
Places = Mapping[tuple[int, int], int]  # (input, output): address


def separated(
    inputs: Tensors,
    outputs: Tensors,
    in_place: Callable[[], Places] | None = None,
    copy: Callable[[Tensor], Tensor] = torch.clone,
) -> Tensors:
    """Return the inputs, each that shares memory with an output replaced by a copy.

    Args:
        inputs: Contiguous tensors.
        outputs: Contiguous tensors.
        in_place: Returns addresses at which an input may lie in an output, because the operation
            does not change it there (the in-place form of a gather). Called only where they
            overlap.
        copy: Returns a copy of a tensor.
    """
    if not inputs or not outputs:
        return inputs
    starts = [tensor.data_ptr() for tensor in outputs]
    ends = [start + tensor.nbytes for start, tensor in zip(starts, outputs, strict=True)]
    low, high = min(starts), max(ends)
    result: list[Tensor] | None = None
    for place, tensor in enumerate(inputs):
        start = tensor.data_ptr()
        end = start + tensor.nbytes
        if start >= high or low >= end:
            continue
        allowed = in_place() if in_place is not None else {}
        for other, (output_start, output_end) in enumerate(zip(starts, ends, strict=True)):
            if (
                max(start, output_start) < min(end, output_end)
                and allowed.get((place, other)) != start
            ):
                result = result or list(inputs)
                result[place] = copy(tensor)
                break
    return result or inputs
