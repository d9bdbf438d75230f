"""Settings of an optimizer that a narrow dtype does not hold."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch


def warn_of_no_eps(group: Mapping[str, Any]) -> None:
    """Warn of an ``eps`` that is 0 in the dtype of a parameter, where it is added."""
    eps = group.get("eps")
    # Adafactor has a pair of them, and squares one in float32.
    if not isinstance(eps, float) or eps == 0:
        return
    lost = {
        parameter.dtype
        for parameter in group["params"]
        if parameter.is_floating_point() and not torch.tensor(eps, dtype=parameter.dtype)
    }
    for dtype in lost:
        least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        warnings.warn(
            f"eps={eps:g} is 0 in {str(dtype).removeprefix('torch.')}, the dtype of a parameter "
            "and its state: a gradient of 0 is divided by 0, and the parameter becomes NaN or inf. "
            f"Give eps of at least {least:.1g}, or keep the parameters in float32 or bfloat16",
            stacklevel=2,
        )
