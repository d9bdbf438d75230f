"""Parameter groups (pure): what the groups of all parameters and those of the base optimizer share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from mpidist.comm.consistency import Row
from mpidist.zero.pieces import Piece

Tensor = torch.Tensor
Group = dict[str, Any]

_OF_RANKS = ("params", "param_names")


def settings(group: Group) -> Group:
    """Return a group without its parameters and their names."""
    return {key: value for key, value in group.items() if key not in _OF_RANKS}


def sync(source: Sequence[Group], target: Sequence[Group]) -> None:
    """Give each group the settings of its counterpart: learning rates that a scheduler has changed, for instance."""
    for one, other in zip(source, target, strict=True):
        for key, value in one.items():
            if key not in _OF_RANKS:
                other[key] = value


def by_group(groups: Sequence[Group], pieces: Iterable[Piece]) -> list[list[Tensor]]:
    """Return for each group the tensors of its pieces, in the order of the parameters."""
    place_of = [place for place, group in enumerate(groups) for _ in group["params"]]
    found: list[list[Tensor]] = [[] for _ in groups]
    for piece in sorted(pieces, key=lambda piece: piece.number):
        found[place_of[piece.number]].append(piece.tensor)
    return found


def rows(groups: Sequence[Group]) -> list[Row]:
    """Return what all ranks must hold alike: settings, and shape, dtype, kind of device and trainability of parameters."""
    found: list[Row] = []
    for place, group in enumerate(groups):
        found.append((f"group {place}", text(group)))
        for number, p in enumerate(group["params"]):
            held = (tuple(p.shape), str(p.dtype), p.device.type, p.requires_grad, p.stride())
            found.append((f"group {place} parameter {number}", held))
    return found


def text(group: Group) -> str:
    """Write a group's settings such that equal ones have equal texts on all ranks."""
    return str(sorted(((key, _text(value)) for key, value in settings(group).items()), key=str))


def _text(value: Any) -> str:
    if isinstance(value, Tensor):
        return _text(value.tolist())
    if isinstance(value, float):
        return f"{value:.17g}"
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_text, value))}]"
    if value is None or isinstance(value, (bool, int, complex, str)):
        return repr(value)
    # Others may write an address, which no two ranks have alike.
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def require_apart(groups: Sequence[Group]) -> None:
    """Refuse parameters that are there twice, or begin at the same address: each would get a place of its own.

    Raises:
        ValueError: There are some.
    """
    first: dict[tuple[torch.device, int], int] = {}
    parameters = [
        parameter for group in groups for parameter in group["params"] if parameter.numel()
    ]
    for number, parameter in enumerate(parameters):
        address = parameter.data_ptr()
        if address and first.setdefault((parameter.device, address), number) != number:
            other = first[parameter.device, address]
            if parameter is parameters[other]:
                raise ValueError(
                    f"a parameter of shape {tuple(parameter.shape)} was given twice: an optimizer "
                    "steps each once"
                )
            raise ValueError(
                f"two parameters, of shapes {tuple(parameters[other].shape)} and "
                f"{tuple(parameter.shape)}, lie in the same "
                "memory: in flat buffers they would be two; tie modules by one Parameter that both "
                "hold"
            )


def require_carried(groups: Sequence[Group], wire: Any) -> None:
    """Refuse trainable parameters that a wire cannot carry.

    Raises:
        TypeError: There are some.
    """
    if wire is not None:
        for dtype in dict.fromkeys(
            p.dtype for group in groups for p in group["params"] if p.requires_grad
        ):
            wire.master_dtype(dtype)


def require_host_memory(groups: Sequence[Group]) -> None:
    """Refuse parameters on devices.

    Raises:
        ValueError: There are some.
    """
    devices = {p.device.type for group in groups for p in group["params"]} - {"cpu"}
    if devices:
        raise ValueError(
            "one_copy=True is for parameters in host memory; got some on "
            f"{', '.join(sorted(devices))}"
        )
