"""Checks of numbers among the settings of hooks."""

from __future__ import annotations

import math
import operator
from typing import SupportsIndex

import torch


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
