"""Messages between coupled programs: requests for samples, headers and data (pure).

The format is part of the interface: a program in C or Fortran writes and reads it with MPI alone.
All numbers are int64 of the machine. On the intercommunicator of two programs:

=============  ======  ===========================================================================
tag            to      content
=============  ======  ===========================================================================
``Tag.ASK``    sender  one number: samples that the reader has room for, or ``LEAVES``
``Tag.HEAD``   reader  ``SAMPLE``, the label, the number of tensors, and for each the code of its
                       dtype (``DTYPES``), its number of dimensions and its shape; or ``END``
``Tag.DATA``   reader  the elements of one tensor in C order, in messages of at most 1 GiB
=============  ======  ===========================================================================

A sender sends a sample to a reader that has asked for it, header first. It answers ``LEAVES`` by
``END``, and its own end is ``END`` to every reader, which answers ``LEAVES`` unless it has said so.
Each has then received all that was sent to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import torch

SAMPLE, END = 0, 1
LEAVES = -1
MOST_DIMENSIONS = 32
MOST_NUMBER = (1 << 63) - 1

# The number of a dtype is its place.
DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int16,
    torch.int32, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip


class Tag(IntEnum):
    """Uses of the intercommunicator."""

    ASK = 1
    HEAD = 2
    DATA = 3


class Form(NamedTuple):
    """Type and shape of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class Head(NamedTuple):
    """Header of a sample."""

    label: int
    forms: tuple[Form, ...]


def pack(head: Head) -> list[int]:
    """Return the numbers of a header."""
    numbers = [SAMPLE, head.label, len(head.forms)]
    for dtype, shape in head.forms:
        numbers += [DTYPES.index(dtype), len(shape), *shape]
    return numbers


def unpack(numbers: Sequence[int]) -> Head | None:
    """Return the header of its numbers; None for the end.

    Raises:
        ValueError: They are none.
    """
    if not numbers or numbers[0] not in (SAMPLE, END):
        raise ValueError(f"a header begins with {SAMPLE} or {END}; got {list(numbers[:8])}")
    if numbers[0] == END:
        return None
    try:
        label, count, place, forms = numbers[1], numbers[2], 3, []
        for _ in range(count):
            code, dimensions = numbers[place], numbers[place + 1]
            place += 2
            shape = tuple(numbers[place : place + dimensions])
            place += dimensions
            if not 0 <= code < len(DTYPES) or not 0 <= dimensions <= MOST_DIMENSIONS:
                raise ValueError
            if len(shape) != dimensions or min(shape, default=0) < 0:
                raise ValueError
            forms.append(Form(DTYPES[code], shape))
        if place != len(numbers) or not forms:
            raise ValueError
    except (ValueError, IndexError):
        raise ValueError(f"a header that cannot be read: {list(numbers[:24])}") from None
    return Head(label, tuple(forms))
