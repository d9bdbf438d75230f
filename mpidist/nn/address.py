"""Address of a device on a worker: ``"worker/device"``, as torch writes it."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

_RANK = re.compile(r"rank:(\d+)")


@dataclass(frozen=True, slots=True)
class Address:
    """A device on a worker.

    Attributes:
        worker: Name or rank of the worker; None for this worker.
        device: Device in the syntax of ``torch.device``.
    """

    worker: str | int | None
    device: str


def parse(text: str | torch.device) -> Address:
    """Parse an address.

    Args:
        text: ``"name/device"`` or ``"rank:number/device"``; without ``/device`` the CPU. Or a
            device of this worker.

    Raises:
        TypeError: Neither a str nor a device.
        ValueError: Another form.
        RuntimeError: torch does not know the device.
    """
    if isinstance(text, torch.device):
        return Address(None, str(text))
    if not isinstance(text, str):
        raise TypeError(f"Invalid type for remote_device: {type(text)}")
    worker, slash, device = text.partition("/")
    if not slash:
        if _is_device(text):
            return Address(None, str(torch.device(text)))
        device = "cpu"
    number = _RANK.fullmatch(worker)
    if not worker or "/" in device or (":" in worker and number is None):
        raise ValueError(
            f"Could not parse remote_device: {text}. The valid format is '<workername>/<device>' "
            "or 'rank:<rank>/<device>' or '<device>'"
        )
    return Address(int(number[1]) if number else worker, str(torch.device(device)))


def _is_device(text: str) -> bool:
    try:
        torch.device(text)
    except RuntimeError:
        return False
    return True
