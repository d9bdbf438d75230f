"""DTensors of a state as plain data: this rank's local tensors, and the layouts that they fit.

A layout is the global shape, the placements and the mesh's ranks. A local tensor is loaded by a
rank whose own DTensor has an equal layout, so nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

import torch

Layout = list[Any]  # global shape, placements as text, ranks of the mesh


class DTensorState(TypedDict):
    """Content of one rank's file of DTensors.

    ``model`` has local tensors by name, ``layouts`` their layouts. ``optimizer`` is a state dict
    with local tensors, or None if the optimizer's state is in another file; ``parameters`` has its
    parameters' layouts by number (None: a plain tensor), and ``sharded`` the names of the DTensors
    among each one's state.
    """

    model: dict[str, Any]
    layouts: dict[str, Layout]
    optimizer: dict[str, Any] | None
    parameters: list[Layout | None]
    sharded: dict[int, list[str]]


def is_dtensor(value: object) -> bool:
    """Return whether a value is a DTensor, of which a rank may hold a part."""
    return isinstance(value, torch.Tensor) and hasattr(value, "device_mesh")


def layout(value: Any) -> Layout | None:
    """Return the layout of a DTensor; None of another value."""
    if not is_dtensor(value):
        return None
    return [list(value.shape), list(map(repr, value.placements)), value.device_mesh.mesh.tolist()]


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return an optimizer's parameters, in the order of their numbers in its state dict."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def content(
    model: Mapping[str, Any], optimizer: torch.optim.Optimizer | None
) -> tuple[dict[str, Any], DTensorState]:
    """Return the other values of a model's state dict, and what this rank holds of the DTensors.

    Args:
        model: The state dict.
        optimizer: One that steps DTensors, or None.

    Raises:
        TypeError: A state's layout is not its parameter's.
    """
    parts = {name: value for name, value in model.items() if is_dtensor(value)}
    plain = {name: value for name, value in model.items() if name not in parts}
    state: DTensorState = {
        "model": {name: _local(value) for name, value in parts.items()},
        "layouts": {name: layout(value) or [] for name, value in parts.items()},
        "optimizer": None,
        "parameters": [],
        "sharded": {},
    }
    if optimizer is not None:
        given, parameters = optimizer.state_dict(), parameters_of(optimizer)
        state["parameters"] = list(map(layout, parameters))
        for number, values in given["state"].items():
            state["sharded"][number] = names = list(filter(lambda n: is_dtensor(values[n]), values))
            if any(layout(values[name]) != layout(parameters[number]) for name in names):
                raise TypeError(
                    f"the state of parameter {number} has another layout than the parameter, a "
                    "DTensor; torch.distributed.checkpoint saves such optimizers"
                )
        local = {
            number: {name: _local(value) for name, value in values.items()}
            for number, values in given["state"].items()
        }
        state["optimizer"] = {**given, "state": local}
    return plain, state


def model_state(saved: DTensorState, own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the DTensors of a model's state dict.

    Args:
        own: State dict of the model that will load them.

    Raises:
        ValueError: A DTensor of the model has another layout.
    """
    for name, value in own.items():
        _require_layout(name, saved["layouts"].get(name), layout(value))
    # One that the model lacks stays as it is, and is named with the other differences.
    return {
        name: _like(own[name], value) if name in own else value
        for name, value in saved["model"].items()
    }


def optimizer_state(saved: DTensorState, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state dict of an optimizer that steps DTensors.

    Raises:
        ValueError: A parameter of the optimizer has another layout.
    """
    parameters, given = parameters_of(optimizer), saved["optimizer"]
    if given is None or len(parameters) != len(saved["parameters"]):
        raise ValueError(
            f"the checkpoint is of another model: its optimizer has {len(saved['parameters'])} "
            f"parameters, this one {len(parameters)}"
        )
    for number, (kept, parameter) in enumerate(zip(saved["parameters"], parameters, strict=True)):
        _require_layout(f"parameter {number}", kept, layout(parameter))
    state = {
        number: {
            name: _like(parameters[number], value) if name in saved["sharded"][number] else value
            for name, value in values.items()
        }
        for number, values in given["state"].items()
    }
    return {**given, "state": state}


def _local(value: Any) -> Any:
    if not is_dtensor(value):
        return value
    own = value.detach().to_local()
    # A shard of FSDP2's is a view of memory that is shared, padded, or both.
    return own if own.untyped_storage().nbytes() == own.nbytes else own.clone()


def _like(own: Any, saved: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    here = own.detach().to_local()
    if saved.shape != here.shape:
        raise ValueError(
            f"a file is damaged: a local tensor has shape {tuple(saved.shape)}, not "
            f"{tuple(here.shape)}"
        )
    return DTensor.from_local(
        saved.to(here.device),
        own.device_mesh,
        own.placements,
        run_check=False,
        shape=own.shape,
        stride=own.stride(),
    )


def _require_layout(name: str, saved: Layout | None, own: Layout | None) -> None:
    if saved != own:
        texts = [
            "a plain tensor" if one is None else f"a DTensor {one[0]}, {one[1]} over ranks {one[2]}"
            for one in (saved, own)
        ]
        raise ValueError(
            f"the checkpoint is of another layout: {name} is {texts[0]} there, and {texts[1]} here"
        )
