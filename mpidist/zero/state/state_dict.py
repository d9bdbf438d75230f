"""State dicts in torch's format (pure): the state of one optimizer over all parameters."""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from mpidist import state_names
from mpidist.zero.shards.flat_buffers import in_memory_order
from mpidist.zero.shards.groups import Groups, ParamGroup
from mpidist.zero.shards.pieces import Piece
from mpidist.zero.shards.shards import Shards
from mpidist.zero.state.flat_state import ParamState
from mpidist.zero.state.shard_state import MASTER_KIND, ShardState, StateByNumber, forms_of

if TYPE_CHECKING:
    from torch.optim.optimizer import StateDict

Tensor = torch.Tensor

# A wire's master copies are beside the state, under a key that torch's optimizers do not read:
# among a parameter's state they would pass for the state of a first step. By parameter, each has
# a dict of the master.
MASTERS, MASTER = "masters", "value"


def assembled(
    state: Mapping[Any, Mapping[str, object]], packed_groups: list[ParamGroup]
) -> StateDict:
    """Return a state dict of packed groups, with the masters among the state beside it."""
    plain: dict[Any, ParamState] = {}
    masters: dict[Any, ParamState] = {}
    for key, values in state.items():
        if MASTER_KIND in values:
            masters[key] = {MASTER: values[MASTER_KIND]}
        if len(values) > 1 or MASTER_KIND not in values:
            plain[key] = {name: value for name, value in values.items() if name != MASTER_KIND}
    result: StateDict = {"state": plain, "param_groups": packed_groups}
    if masters:
        result[MASTERS] = masters
    return result


def require_fits(given: StateDict, groups: Groups, optim: torch.optim.Optimizer) -> None:
    """Refuse a state dict of another model, or of another class of optimizers.

    Args:
        groups: Of all parameters.
        optim: The base optimizer.

    Raises:
        ValueError: A key, a size or a shape does not fit.
    """
    _require_form(given)
    _require_groups(given["param_groups"], groups)
    parameters = _by_id(given["param_groups"], groups)
    for key, values in given["state"].items():
        if key not in parameters:
            raise ValueError(
                f"the state dict has state of {key!r}, which none of its parameter groups names"
            )
        _require_values(key, values, parameters[key].shape, type(optim))
    state_names.require_complete(type(optim), optim.defaults, given["param_groups"], given["state"])
    _require_masters(given.get(MASTERS, {}), parameters)


def _require_form(given: object) -> None:
    if not isinstance(given, Mapping) or "state" not in given or "param_groups" not in given:
        held = sorted(map(str, given)) if isinstance(given, Mapping) else type(given).__name__
        raise ValueError(f"a state dict of an optimizer has 'state' and 'param_groups'; got {held}")
    if not isinstance(given["state"], Mapping) or not all(
        isinstance(group, Mapping) and "params" in group for group in given["param_groups"]
    ):
        raise ValueError(
            "a state dict of an optimizer has a dict in 'state', and groups with 'params' in "
            "'param_groups'"
        )


def _require_groups(saved: Groups, groups: Groups) -> None:
    sizes = [len(group["params"]) for group in saved]
    own_sizes = [len(group["params"]) for group in groups]
    if sizes != own_sizes:
        raise ValueError(
            f"the state dict is of another model: its parameter groups hold {sizes} parameters, "
            f"this optimizer's {own_sizes}"
        )


def _require_values(key: object, values: object, shape: torch.Size, optim: type) -> None:
    """Check the state of one parameter."""
    if not isinstance(values, Mapping):
        raise ValueError(
            f"the state of parameter {key} is a dict by name; got {type(values).__name__}"
        )
    kinds = state_names.NAMES.get(optim)
    if kinds is None:
        return
    if not kinds.issuperset(values):
        raise ValueError(
            f"the state dict is of another class of optimizers: parameter {key} has "
            f"{', '.join(map(str, values))}; {optim.__name__} keeps {', '.join(sorted(kinds))}"
        )
    for kind, value in values.items():
        # In all of torch's element-wise optimizers, state is a scalar or has the parameter's shape.
        if isinstance(value, torch.Tensor) and value.dim() and value.shape != shape:
            raise ValueError(
                f"the state dict is of another model: {kind} of parameter {key} has shape "
                f"{tuple(value.shape)}, the parameter {tuple(shape)}"
            )


def _require_masters(masters: object, parameters: Mapping[Hashable, Tensor]) -> None:
    if not isinstance(masters, Mapping):
        raise ValueError(
            f"the masters of a state dict are a dict by parameter; got {type(masters).__name__}"
        )
    for key, held in masters.items():
        if key not in parameters:
            raise ValueError(
                f"the state dict has a master of {key!r}, which none of its parameter groups names"
            )
        if not isinstance(held, Mapping) or not isinstance(held.get(MASTER), torch.Tensor):
            raise ValueError(f"the master of parameter {key} is a dict with {MASTER!r}, a tensor")
        found, shape = held[MASTER].shape, parameters[key].shape
        if found != shape:
            raise ValueError(
                f"the state dict is of another model: the master of parameter {key} has shape "
                f"{tuple(found)}, the parameter {tuple(shape)}"
            )


def shard_of(given: StateDict, shards: Shards) -> ShardState:
    """Return this rank's part of a state dict that fits; its tensors are the state dict's.

    Args:
        given: Equal on all ranks.
    """
    state, rank = by_number(given), shards.group.rank
    deferred = {number: shards.owners[number] for number in shards.without_piece(state)}
    entries = {number: state[number] for number, owner in deferred.items() if owner == rank}
    for number, held in by_number(given, MASTERS).items():
        state[number] = {**state.get(number, {}), MASTER_KIND: held[MASTER]}
    for piece in shards.pieces:
        values = state.get(piece.number)
        if values is not None:
            entries[piece.number] = {name: part(value, piece) for name, value in values.items()}
    return ShardState(
        rank=rank,
        groups=given["param_groups"],
        entries=entries,
        deferred=deferred,
        plans=tuple(shards.plans),
        forms=forms_of(shards.parameters),
    )


def part(value: object, piece: Piece) -> object:
    """Return a piece's part of a value of its parameter's state, a view where strides allow."""
    if (
        not isinstance(value, torch.Tensor)
        or value.dim() == 0
        or value.shape != piece.parameter.shape
        or value.layout is not torch.strided
        or (piece.is_whole and piece.tensor.shape == value.shape)
    ):
        return value
    return in_memory_order(value, piece.parameter)[piece.start : piece.stop].view(
        piece.tensor.shape
    )


def by_number(given: StateDict, part: str = "state") -> StateByNumber:
    """Return the state by parameter number, for a state dict that fits.

    Args:
        part: ``"state"`` or ``"masters"``.
    """
    keys = (key for group in given["param_groups"] for key in group["params"])
    numbers = {key: number for number, key in enumerate(keys)}
    return {numbers[key]: held for key, held in given.get(part, {}).items()}


def summary(given: StateDict) -> str:
    """Return a text that is equal for state dicts with the same names and shapes."""
    rows = sorted(
        (str(key), name, tuple(value.shape) if isinstance(value, torch.Tensor) else None)
        for key, held in (*given["state"].items(), *given.get(MASTERS, {}).items())
        for name, value in held.items()
    )
    return f"{len(given['state'])} parameters, checksum {zlib.crc32(repr(rows).encode()):08x}"


def _by_id(saved: Groups, groups: Groups) -> dict[Hashable, Tensor]:
    return {
        key: parameter
        for given, own in zip(saved, groups, strict=True)
        for key, parameter in zip(given["params"], own["params"], strict=True)
    }
