"""Parameter groups of references, read as torch reads groups of tensors, and their settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from mpidist.rpc.rref import RRef
from mpidist.rpc.worker import WorkerInfo

# Keys of a group that are no settings.
PARAMETER_KEYS = ("params", "param_names")

# References, and settings without them.
Group = tuple[list[RRef[object]], dict[str, object]]


def groups_of(params: Iterable[object]) -> list[Group]:
    """Return a constructor's groups.

    Args:
        params: References, or dicts with references as ``"params"``; the dicts are not changed.

    Raises:
        TypeError: A parameter is no reference.
        ValueError: No references at all, or none in a group.
    """
    if isinstance(params, (RRef, torch.Tensor)):
        raise TypeError(
            "params_rref is an iterable of references or of dicts; got a single "
            f"{type(params).__name__}"
        )
    entries: list[Any] = list(params)
    if not entries:
        raise ValueError("optimizer got an empty parameter list")
    groups = (
        [dict(entry) for entry in entries]
        if isinstance(entries[0], dict)
        else [{"params": entries}]
    )
    return [(_references(group["params"]), settings_of(group)) for group in groups]


def by_owner(rrefs: Iterable[RRef[object]]) -> dict[WorkerInfo, list[RRef[object]]]:
    """Return each owner's references, in their order."""
    found: dict[WorkerInfo, list[RRef[object]]] = {}
    for rref in rrefs:
        found.setdefault(rref.owner(), []).append(rref)
    return found


def settings_of(group: Mapping[str, object]) -> dict[str, object]:
    """Return a group without its parameters."""
    return {key: value for key, value in group.items() if key not in PARAMETER_KEYS}


def snapshot(settings: Mapping[str, object]) -> dict[str, object]:
    """Return a copy of settings."""
    # A scheduler changes a learning rate that is a tensor in place, so tensors are cloned.
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in settings.items()
    }


def same(value: object, sent: object) -> bool:
    """Return whether two settings are equal."""
    if isinstance(value, torch.Tensor) or isinstance(sent, torch.Tensor):
        return (
            isinstance(value, torch.Tensor)
            and isinstance(sent, torch.Tensor)
            and torch.equal(value, sent)
        )
    return bool(value == sent)


def _references(params: Any) -> list[RRef[object]]:
    rrefs = [params] if isinstance(params, RRef) else list(params)
    if not rrefs:
        raise ValueError("optimizer got a parameter group without references")
    for rref in rrefs:
        if not isinstance(rref, RRef):
            raise TypeError(
                "params_rref takes references (RRef) to parameters or modules; got "
                f"{torch.typename(rref)}"
            )
    return rrefs
