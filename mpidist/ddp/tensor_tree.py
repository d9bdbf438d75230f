"""Tensors in a module's inputs and outputs: nested lists, tuples, mappings and dataclasses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import TypeVar

import torch
from torch.utils._pytree import tree_map

T = TypeVar("T")


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in ``value``."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors_in(part)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for part in value:
            yield from tensors_in(part)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))


def to_device(value: T, device: torch.device) -> T:
    """Return ``value`` with its tensors copied to ``device``."""
    return tree_map(
        lambda part: part.to(device, non_blocking=True) if isinstance(part, torch.Tensor) else part,
        value,
    )
