"""Settings of a reducer, and checks of numbers among the settings of reducers and hooks."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import SupportsIndex

import torch


@dataclass(frozen=True)
class Settings:
    """Settings of a reducer and of its buckets."""

    # Bytes at which the first, the second, … bucket closes.
    limits: tuple[int, ...]
    # Largest number of buckets; more are merged with neighbors.
    most_buckets: int | None = None
    # Gradients are views of the buckets; else they are copied there and back.
    gradient_as_bucket_view: bool = True
    # Parameters may lack a gradient, and not the same ones on all ranks.
    find_unused_parameters: bool = False
    # All passes use the same parameters as often as the first pass.
    static_graph: bool = False
    # Modules issue collectives of their own in the backward pass, as SyncBatchNorm does.
    communicates_in_backward: bool = False
    # Parameters that no rank used in the first pass are not reduced in later ones.
    skip_unused: bool = False

    def __post_init__(self) -> None:
        if self.most_buckets is not None:
            require_int("the number of buckets", self.most_buckets, least=1)


def require_int(name: str, value: object, least: int | None = None) -> None:
    """Require an int, and one that is not below ``least``.

    Raises:
        TypeError: ``value`` is no int.
        ValueError: ``value`` is below ``least``.
    """
    if isinstance(value, (bool, torch.Tensor)) or not isinstance(value, SupportsIndex):
        raise TypeError(f"{name} must be an int; got {value!r}")
    if least is not None and operator.index(value) < least:
        wanted = f"be at least {least}" if least else "not be negative"
        raise ValueError(f"{name} must {wanted}; got {value}")


def require_real(name: str, value: object) -> None:
    """Require a finite number that is not negative.

    Raises:
        TypeError: ``value`` is no number.
        ValueError: ``value`` is negative, infinite or NaN.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number; got {value!r}")
    if value < 0:
        raise ValueError(f"{name} must not be negative; got {value}")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite; got {value}")
