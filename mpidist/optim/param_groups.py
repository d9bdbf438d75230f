"""Parameter groups of references, read as torch reads groups of tensors, and their settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mpidist.rpc.rref import RRef


def groups_of(params: Any) -> list[dict[str, Any]]:
    """Return a constructor's groups, with lists of references.

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
    entries = list(params)
    if not entries:
        raise ValueError("optimizer got an empty parameter list")
    groups = (
        [dict(entry) for entry in entries]
        if isinstance(entries[0], dict)
        else [{"params": entries}]
    )
    for group in groups:
        rrefs = group["params"]
        group["params"] = rrefs = [rrefs] if isinstance(rrefs, RRef) else list(rrefs)
        if not rrefs:
            raise ValueError("optimizer got a parameter group without references")
        for rref in rrefs:
            if not isinstance(rref, RRef):
                raise TypeError(
                    "params_rref takes references (RRef) to parameters or modules; got "
                    f"{torch.typename(rref)}"
                )
    return groups


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group without its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def snapshot(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of settings."""
    # A scheduler changes a learning rate that is a tensor in place, so tensors are cloned.
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in settings.items()
    }


def same(value: Any, sent: Any) -> bool:
    """Return whether two settings are equal."""
    if isinstance(value, torch.Tensor) or isinstance(sent, torch.Tensor):
        return (
            isinstance(value, torch.Tensor)
            and isinstance(sent, torch.Tensor)
            and torch.equal(value, sent)
        )
    return bool(value == sent)
