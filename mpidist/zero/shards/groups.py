"""Parameter groups (pure): settings of all parameters' groups and of the base optimizer's."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import torch

from mpidist.comm.consistency import Row
from mpidist.zero.shards.half_wire import HalfWire
from mpidist.zero.shards.pieces import Piece

Tensor = torch.Tensor
# torch's parameter group: the parameters under "params", their names under "param_names" if they
# have any, and settings by their names.
ParamGroup: TypeAlias = dict[str, Any]
Groups: TypeAlias = Sequence[ParamGroup]
Settings: TypeAlias = dict[str, object]

# Differ between the ranks' base optimizers; all other keys are settings.
_PARAMETERS = ("params", "param_names")


def settings(group: ParamGroup) -> Settings:
    """Return a group without its parameters and their names."""
    return {key: value for key, value in group.items() if key not in _PARAMETERS}


def sync(source: Sequence[Settings], target: Sequence[Settings]) -> None:
    """Make the settings of each group those of its counterpart in ``source``.

    A scheduler may have set learning rates there, and a user may have deleted a setting.
    """
    for one, other in zip(source, target, strict=True):
        for key in [key for key in other if key not in one and key not in _PARAMETERS]:
            del other[key]
        for key, value in one.items():
            if key not in _PARAMETERS:
                other[key] = value


def packed(groups: Groups) -> list[ParamGroup]:
    """Return copies of the groups with numbers for parameters."""
    numbers = itertools.count()
    return [
        {
            **{key: copy.deepcopy(value) for key, value in group.items() if key != "params"},
            "params": list(itertools.islice(numbers, len(group["params"]))),
        }
        for group in groups
    ]


def take_loaded(base_groups: Groups, saved: Groups, groups: Groups) -> None:
    """Copy the loaded settings, and parameter names if given, to the groups of all parameters."""
    for base, given, own in zip(base_groups, saved, groups, strict=True):
        kept = {"params": own["params"]}
        if "param_names" in given or "param_names" in own:
            kept["param_names"] = copy.copy(given.get("param_names", own.get("param_names")))
        loaded = {**base, **kept}
        own.clear()
        # torch keeps the order of the loaded settings.
        for key in (*given, *loaded):
            if key in loaded:
                own.setdefault(key, loaded[key])


def by_group(groups: Groups, pieces: Iterable[Piece]) -> list[list[Tensor]]:
    """Return for each group the tensors of its pieces, in the order of the parameters."""
    index_of = [index for index, group in enumerate(groups) for _ in group["params"]]
    found: list[list[Tensor]] = [[] for _ in groups]
    for piece in sorted(pieces, key=lambda piece: piece.number):
        found[index_of[piece.number]].append(piece.tensor)
    return found


def rows(groups: Groups) -> list[Row]:
    """Return rows that must be equal on all ranks: settings, and the form of each parameter.

    A parameter's row is its shape, dtype, device type, ``requires_grad`` and strides.
    """
    found: list[Row] = []
    for index, group in enumerate(groups):
        found.append((f"group {index}", text(group)))
        for number, p in enumerate(group["params"]):
            held = (tuple(p.shape), str(p.dtype), p.device.type, p.requires_grad, p.stride())
            found.append((f"group {index} parameter {number}", held))
    return found


def text(group: ParamGroup) -> str:
    """Return a group's settings as text; equal settings have equal texts on all ranks."""
    return str(sorted(((key, _text(value)) for key, value in settings(group).items()), key=str))


def _text(value: object) -> str:
    if isinstance(value, Tensor):
        return _text(value.tolist())
    if isinstance(value, float):
        return f"{value:.17g}"
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_text, value))}]"
    if value is None or isinstance(value, (bool, int, complex, str)):
        return repr(value)
    # The text of other objects may hold an address, which differs between ranks.
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def require_whole(groups: Groups) -> None:
    """Refuse parameters that are not dense tensors of this rank, which have no elements to divide.

    Raises:
        ValueError: A parameter is sparse, or a DTensor.
    """
    for number, parameter in enumerate(p for group in groups for p in group["params"]):
        if parameter.layout is not torch.strided:
            raise ValueError(
                f"parameter {number} is of layout {parameter.layout}: a sharded optimizer is for "
                "dense parameters; gradients may be sparse"
            )
        # As FSDP2 makes them.
        if hasattr(parameter, "device_mesh"):
            raise ValueError(
                f"parameter {number} is a DTensor, of which each rank has its part already: give "
                "it to the base optimizer itself"
            )


def require_distinct(groups: Groups) -> None:
    """Refuse parameters given twice or at one address, which would get separate places.

    Raises:
        ValueError: Two parameters share their memory.
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
                f"{tuple(parameter.shape)}, lie in the same memory, which flat buffers would "
                "separate: tie modules by one Parameter that both hold"
            )


def require_carried(groups: Groups, wire: HalfWire | None) -> None:
    """Refuse trainable parameters that a wire cannot carry.

    Raises:
        TypeError: The wire does not carry a parameter's dtype.
    """
    if wire is not None:
        for parameter in (p for group in groups for p in group["params"]):
            if parameter.requires_grad:
                wire.require(parameter.dtype)


def require_host_memory(groups: Groups) -> None:
    """Refuse parameters on devices.

    Raises:
        ValueError: A parameter is on a device.
    """
    devices = {p.device.type for group in groups for p in group["params"]} - {"cpu"}
    if devices:
        raise ValueError(
            "one_copy=True is for parameters in host memory; got some on "
            f"{', '.join(sorted(devices))}"
        )
