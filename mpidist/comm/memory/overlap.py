"""Overlap of inputs and outputs, by memory ranges: an input that an output would overwrite is copied first.

MPI forbids overlapping buffers (MPI-4.1 §6.1), and an algorithm of several messages would read what
it has just received. Copies are made by the executing rank alone; which calls of MPI follow does
not depend on them.
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
    """Return the inputs, with a copy in the place of each that shares memory with an output.

    Args:
        inputs: Contiguous tensors.
        outputs: Contiguous tensors.
        in_place: Addresses at which an input may lie in an output, because the operation leaves
            there what the input holds (the in-place form of a gather).
        copy: Makes the copy.
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
