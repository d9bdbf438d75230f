"""Operations of remote modules on their owner, all through the function ``execute``.

A worker started with ``init_rpc(..., allowed=[...])`` serves remote modules if the list names
``mpidist.nn.remote.execute`` and the classes of the modules or the functions that create them. The
worker runs operations on modules created by the operation ``create``, and on modules whose class is
in the list. With and without a list, ``execute`` checks the types of all arguments and that
references are to modules of this worker. Extra state goes to the module's ``set_extra_state``.
"""

from __future__ import annotations

from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType
from typing import TypeVar
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map

from mpidist.errors import MpidistError
from mpidist.rpc import current
from mpidist.rpc.rref import RRef

T = TypeVar("T")

CREATE, FORWARD, TRAIN, PARAMETERS, STATE, LOAD = (
    "create",
    "forward",
    "train",
    "parameters",
    "state",
    "load",
)
# Key that torch adds to the metadata while loading.
_ASSIGN = "assign_to_params_buffers"

# Modules created by ``create``, by id().
_created: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()


def execute(operation: object, *arguments: object) -> object:
    """Execute an operation of a ``RemoteModule`` on the worker that owns the module.

    Args:
        operation: ``create``, or an operation on an owned module: ``forward``, ``train``,
            ``parameters``, ``state`` or ``load``.
        arguments: Arguments of the operation. Except for ``create``, the first one is a reference
            to the module.

    Raises:
        ValueError: No such operation, or the reference is to no module.
        TypeError: An argument of another type.
        MpidistError: This worker has not created the module, and its list lacks the class.
        Exception: The module's error.
    """
    run = _OPERATIONS.get(operation) if type(operation) is str else None
    if run is None:
        raise ValueError(
            f"an operation of a remote module is one of {', '.join(_OPERATIONS)}; got {operation!r}"
        )
    return run(*arguments)


def _create(
    module_cls: Callable[..., object], args: object, kwargs: object, device: object
) -> nn.Module:
    allowed = current.require().allowed
    # The decoder resolves only names of functions and classes in the list, but a message may also
    # contain callable instances.
    if allowed is not None and not (
        allowed.has_class(module_cls)
        if isinstance(module_cls, type)
        else type(module_cls) in (FunctionType, BuiltinFunctionType)
    ):
        raise MpidistError(
            f"a {type(module_cls).__qualname__} that makes a module is not in the list of what "
            "this worker allows"
        )
    args, kwargs = _require("args", args, tuple), _require_names("kwargs", kwargs)
    target = _device(device)
    module = module_cls(*args, **kwargs)
    if not isinstance(module, nn.Module):
        raise ValueError(
            "Expect `module_cls(*args, **kwargs)` returns an instance of <class nn.Module>, but "
            f"it returned a {type(module)}"
        )
    module.to(target)
    _created[id(module)] = module
    return module


def _forward(
    module_rref: object, device: object, can_return_cuda: object, args: object, kwargs: object
) -> object:
    module = _module_of(module_rref)
    args, kwargs = _require("args", args, tuple), _require_names("kwargs", kwargs)
    _require("can_return_cuda", can_return_cuda, bool)
    target = _device(device)
    if device == "cpu":
        return module(*args, **kwargs)
    result = module(*_to_device(args, target), **_to_device(kwargs, target))
    return (
        result
        if can_return_cuda or target.type != "cuda"
        else _to_device(result, torch.device("cpu"))
    )


def _train(module_rref: object, mode: object) -> None:
    mode = _require("mode", mode, bool)
    _module_of(module_rref).train(mode)


def _parameters(
    module_rref: object, recurse: object, remove_duplicate: object
) -> list[tuple[str, RRef[nn.Parameter]]]:
    recurse = _require("recurse", recurse, bool)
    remove_duplicate = _require("remove_duplicate", remove_duplicate, bool)
    named = _module_of(module_rref).named_parameters(
        recurse=recurse, remove_duplicate=remove_duplicate
    )
    return [(name, RRef(parameter)) for name, parameter in named]


def _state(module_rref: object) -> tuple[dict[str, object], dict[str, object]]:
    state = _module_of(module_rref).state_dict()
    values = {name: _to_device(value, torch.device("cpu")) for name, value in state.items()}
    return values, dict(getattr(state, "_metadata", {}))


def _load(
    module_rref: object, values: object, metadata: object, assign: object
) -> tuple[list[str], list[str], list[str]]:
    module = _module_of(module_rref)
    assign = _require("assign", assign, bool)
    values = _require_names("values", values)
    state = _State(values)
    state._metadata = {}
    for name, entry in _require_names("metadata", metadata).items():
        kept = _require_names("metadata", entry)
        state._metadata[name] = {key: value for key, value in kept.items() if key != _ASSIGN}
    own = module.state_dict()
    for name, value in values.items():
        if isinstance(value, torch.Tensor) and isinstance(own.get(name), torch.Tensor):
            state[name] = _fit(name, value.detach(), own[name], assign)
    try:
        missing, unexpected = module.load_state_dict(state, strict=False, assign=assign)
    except RuntimeError as error:
        return [], [], str(error).split("\n\t")[1:] or [str(error)]
    return list(missing), list(unexpected), []


class _State(dict[str, object]):
    """A state dict: torch reads the modules' versions from an attribute."""

    _metadata: dict[str, dict[str, object]]


def _fit(name: str, value: torch.Tensor, own: torch.Tensor, assign: bool) -> torch.Tensor:
    """Return a loaded value on the device of the module's own value.

    An assigned value gets memory for each of its elements.
    """
    is_dense = value.layout is not torch.strided or bool(
        torch.ops.aten.is_non_overlapping_and_dense(value)
    )
    if not is_dense and is_lazy(own):
        # A lazy parameter takes the value's shape. An expanded tensor of a few bytes could request
        # any amount of memory.
        raise ValueError(
            f"the value of {name}, which has no shape yet, has elements that share their memory"
        )
    if not assign:
        return value
    # Values are sent as CPU tensors; the module keeps its device.
    moved = value.to(own.device)
    return moved if is_dense or moved.shape != own.shape else moved.contiguous()


def _module_of(module_rref: object) -> nn.Module:
    if type(module_rref) is not RRef:
        raise TypeError(
            "a reference to a module of this worker is expected; got a "
            f"{type(module_rref).__qualname__}"
        )
    module = module_rref.local_value()
    if not isinstance(module, nn.Module):
        raise ValueError(f"{module_rref} refers to a {type(module).__name__} and to no nn.Module")
    allowed = current.require().allowed
    if (
        allowed is not None
        and _created.get(id(module)) is not module
        and not allowed.has_class(type(module))
    ):
        kind = type(module)
        raise MpidistError(
            f'"{kind.__module__}.{kind.__qualname__}", the class of a module that was not made '
            "here for a RemoteModule, is not in the list of what this worker allows"
        )
    return module


def _require(name: str, value: object, kind: type[T]) -> T:
    if type(value) is not kind:
        raise TypeError(
            f"{name} of an operation of a remote module is a {kind.__name__}; got a "
            f"{type(value).__qualname__}"
        )
    return value


def _require_names(name: str, values: object) -> dict[str, object]:
    found = _require(name, values, dict)
    if not all(type(key) is str for key in found):
        raise TypeError(f"{name} of an operation of a remote module are by name")
    return found


def _device(device: object) -> torch.device:
    return torch.device(_require("device", device, str))


def _to_device(value: T, device: torch.device) -> T:
    return tree_map(lambda part: part.to(device) if isinstance(part, torch.Tensor) else part, value)


_OPERATIONS: dict[str, Callable[..., object]] = {
    CREATE: _create,
    FORWARD: _forward,
    TRAIN: _train,
    PARAMETERS: _parameters,
    STATE: _state,
    LOAD: _load,
}
