"""Owner's side of a remote module: ``execute``, the one function that other workers call.

A worker started with ``init_rpc(..., allowed=[...])`` serves remote modules if its list names
``mpidist.nn.remote.execute`` and the classes of the modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from mpidist.rpc.rref import RRef

CREATE, FORWARD, TRAIN, PARAMETERS, STATE, LOAD = "create", "forward", "train", "parameters", "state", "load"


def execute(operation: str, *arguments: Any) -> Any:
    """Execute an operation of a ``RemoteModule`` on the worker that owns the module.

    Args:
        operation: ``create`` (a module), or one of an owned module: ``forward``, ``train``,
            ``parameters``, ``state`` and ``load``.
        arguments: The operation's; a reference to the module is the first, but for ``create``.

    Raises:
        ValueError: There is no such operation, or the reference is to no module.
        Exception: What the module raises.
    """
    run = _OPERATIONS.get(operation)
    if run is None:
        raise ValueError(f"an operation of a remote module is one of {', '.join(_OPERATIONS)}; got {operation!r}")
    return run(*arguments)


def _create(module_cls: Callable[..., Any], args: Any, kwargs: Any, device: str, is_scripted: bool) -> nn.Module:
    module = module_cls(*args, **kwargs)
    if not isinstance(module, nn.Module):
        raise ValueError(
            f"Expect `module_cls(*args, **kwargs)` returns an instance of <class nn.Module>, but it returned a {type(module)}"
        )
    module.to(device)
    return torch.jit.script(module) if is_scripted else module


def _forward(module_rref: RRef[nn.Module], device: str, can_return_cuda: bool, args: Any, kwargs: Any) -> Any:
    module = _owned(module_rref)
    if device == "cpu":
        return module(*args, **kwargs)
    there = torch.device(device)
    result = module(*_moved(args, there), **_moved(kwargs, there))
    return result if can_return_cuda or there.type != "cuda" else _moved(result, torch.device("cpu"))


def _train(module_rref: RRef[nn.Module], mode: bool) -> None:
    _owned(module_rref).train(mode)


def _parameters(module_rref: RRef[nn.Module], recurse: bool, remove_duplicate: bool) -> list[tuple[str, RRef[nn.Parameter]]]:
    named = _owned(module_rref).named_parameters(recurse=recurse, remove_duplicate=remove_duplicate)
    return [(name, RRef(parameter)) for name, parameter in named]


def _state(module_rref: RRef[nn.Module]) -> tuple[dict[str, Any], dict[str, Any]]:
    state = _owned(module_rref).state_dict()
    values = {name: _moved(value, torch.device("cpu")) for name, value in state.items()}
    return values, dict(getattr(state, "_metadata", {}))


def _load(
    module_rref: RRef[nn.Module], values: Mapping[str, Any], metadata: Mapping[str, Any], assign: bool
) -> tuple[list[str], list[str], list[str]]:
    module = _owned(module_rref)
    state = _State(values)
    state._metadata = dict(metadata)
    if assign:
        # The values came over the CPU; the module stays where it is.
        places = {name: value.device for name, value in module.state_dict().items() if isinstance(value, torch.Tensor)}
        state.update({name: _moved(value, places[name]) for name, value in values.items() if name in places})
    try:
        missing, unexpected = module.load_state_dict(state, strict=False, assign=assign)
    except RuntimeError as error:
        return [], [], str(error).split("\n\t")[1:] or [str(error)]
    return list(missing), list(unexpected), []


class _State(dict[str, Any]):
    """A state dict: torch reads the modules' versions from an attribute."""

    _metadata: dict[str, Any]


def _owned(module_rref: RRef[nn.Module]) -> nn.Module:
    module = module_rref.local_value()
    if not isinstance(module, nn.Module):
        raise ValueError(f"{module_rref} refers to a {type(module).__name__} and to no nn.Module")
    return module


def _moved(value: Any, device: torch.device) -> Any:
    return tree_map(lambda part: part.to(device) if isinstance(part, torch.Tensor) else part, value)


_OPERATIONS: dict[str, Callable[..., Any]] = {
    CREATE: _create,
    FORWARD: _forward,
    TRAIN: _train,
    PARAMETERS: _parameters,
    STATE: _state,
    LOAD: _load,
}
