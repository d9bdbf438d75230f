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
    in_place: Places | None = None,
    copy: Callable[[Tensor], Tensor] = torch.clone,
) -> list[Tensor]:
    """Return the inputs, each that shares memory with an output replaced by a copy.

    Args:
        inputs: Contiguous tensors.
        outputs: Contiguous tensors.
        in_place: Addresses at which an input may lie in an output, because the operation does not
            change it there (the in-place form of a gather).
        copy: Returns a copy of a tensor.
    """
    if not inputs or not outputs:
        return list(inputs)
    ranges = [(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in outputs]
    low, high = min(start for start, _ in ranges), max(end for _, end in ranges)
    result = []
    for place, tensor in enumerate(inputs):
        start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        if start < high and low < end:
            allowed = in_place or {}
            for other, (output_start, output_end) in enumerate(ranges):
                if (
                    max(start, output_start) < min(end, output_end)
                    and allowed.get((place, other)) != start
                ):
                    tensor = copy(tensor)
                    break
        result.append(tensor)
    return result
