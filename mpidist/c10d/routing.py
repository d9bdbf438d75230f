"""Methods of a mixed group, each of which calls the backend of its tensors' device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from mpidist.dynamo import untraced


def route(group: type, base: type, names: Iterable[str]) -> None:
    """Define methods of a class of mixed groups.

    A method calls ``base``'s if its first tensor is on a device of ours or there is none, and else
    that of ``_torch_group()``, a ProcessGroup of torch's class with the other backends.

    Args:
        group: The class, which has ``_is_ours(device)`` and ``_torch_group()``.
        base: The class of groups on MPI.
        names: Names of methods with tensors among their arguments.
    """
    for name in names:
        setattr(group, name, _routed(base, name))


def _routed(base: type, name: str) -> Callable[..., object]:
    method = getattr(base, name)

    @untraced
    @functools.wraps(method)
    def call(self: Any, *args: object, **kwargs: object) -> object:
        device = device_of([*args, *kwargs.values()])
        if device is None or self._is_ours(device):
            return method(self, *args, **kwargs)
        return getattr(self._torch_group(), name)(*args, **kwargs)

    return call


def device_of(args: Iterable[object]) -> str | None:
    """Return the device type of the first tensor among (nested) arguments, or None."""
    for argument in args:
        if isinstance(argument, torch.Tensor):
            return argument.device.type
        if isinstance(argument, (list, tuple)) and (found := device_of(argument)) is not None:
            return found
    return None
