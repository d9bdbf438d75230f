"""Model state: the bare module's, with tensors that take only their elements' bytes in a file."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel as TorchDataParallel

from mpidist.checkpoint.dtensors import is_dtensor
from mpidist.comm.memory import host_values
from mpidist.ddp.module import DistributedDataParallel

Module = torch.nn.Module
Tensor = torch.Tensor
_SHOWN = 6  # names in a message


def wrappers(model: Module) -> Iterator[Module]:
    """Yield a model and the modules wrapped by it: data parallelism's and ``torch.compile``'s."""
    yield model
    inner: Module | None = getattr(model, "_orig_mod", None)
    if inner is None and isinstance(model, (DistributedDataParallel, TorchDataParallel)):
        inner = model.module
    if inner is not None:
        yield from wrappers(inner)


def bare(model: Module) -> Module:
    """Return the innermost module, whose names carry no prefix."""
    *_, inner = wrappers(model)
    return inner


def data_parallel(model: Module) -> DistributedDataParallel | None:
    """Return the wrapper of ``mpidist.ddp``, if any."""
    return next(
        (layer for layer in wrappers(model) if isinstance(layer, DistributedDataParallel)), None
    )


def is_flattened(model: Module) -> bool:
    """Return whether a part of a model is a ``FullyShardedDataParallel``, torch's first FSDP.

    Its ``state_dict`` communicates, and its optimizer steps this rank's part of flat parameters.
    """
    # Whoever has one has imported it.
    loaded = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    kind = getattr(loaded, "FullyShardedDataParallel", ())
    return any(isinstance(part, kind) for part in bare(model).modules())


def keeps_own_buffers(model: Module) -> bool:
    """Return whether each rank has its own buffers: data parallelism does not broadcast them."""
    for layer in wrappers(model):
        if isinstance(layer, DistributedDataParallel):
            return not layer.forward_sync_buffers
        if isinstance(layer, TorchDataParallel):
            return not layer.broadcast_buffers
    return False


def replicated_parameters(model: Module) -> dict[str, Tensor]:
    """Return the parameters that all ranks share, by name.

    Left out are DTensors, and parameters that data parallelism was told to ignore.
    """
    ignored: set[str] = set()
    for layer in wrappers(model):
        ignored |= set(getattr(layer, "parameters_to_ignore", ()))
    return {
        name: parameter
        for name, parameter in bare(model).named_parameters()
        if name not in ignored and not is_dtensor(parameter) and parameter.layout is torch.strided
    }


def packed(state: Mapping[str, object]) -> dict[str, Any]:
    """Return a detached state dict, whose tensors take only their elements' bytes in a file.

    A view has a storage of its own elements, which is the same memory where they lie in order, and
    a copy elsewhere. Tensors that share all their memory, as tied weights do, still share it.
    """
    narrow: dict[object, Tensor] = {}

    def compact(value: object) -> object:
        if not isinstance(value, Tensor):
            return value
        value = value.detach()
        if value.layout is not torch.strided or value.untyped_storage().nbytes() <= value.nbytes:
            return value
        key = (value.data_ptr(), value.dtype, value.shape, value.stride())
        if key not in narrow:
            narrow[key] = _narrow(value)
        return narrow[key]

    return {name: compact(value) for name, value in state.items()}


def _narrow(value: Tensor) -> Tensor:
    if not value.is_cpu or not value.is_contiguous() or not value.numel():
        return host_values.copy_of(value)
    # An array's memory is a storage of its own for torch; NumPy has no bf16, but bytes.
    memory = torch.from_numpy(value.reshape(-1).view(torch.uint8).numpy())
    return memory.view(value.dtype).view(value.shape)


def buffers(model: Module) -> dict[str, Tensor]:
    """Return this rank's buffers by name, those that a state dict holds, without DTensors."""
    module = bare(model)
    own = {name: value for name, value in module.named_buffers() if not is_dtensor(value)}
    return packed({name: own[name] for name in module.state_dict() if name in own})


def require_fits(model: Module, saved: object) -> None:
    """Refuse the state of another model.

    Raises:
        ValueError: Parameters or buffers are missing, unexpected, or of another shape.
    """
    if not isinstance(saved, Mapping):
        raise ValueError(f"the model's state is a dict by name; got {type(saved).__name__}")
    text = differences(bare(model).state_dict(), saved)
    if text:
        raise ValueError(f"the checkpoint is of another model: {text}")


def require_same_layouts(model: Module, saved: Mapping[str, object]) -> None:
    """Refuse values of another kind than the model's, such as sparse for dense, number for tensor.

    ``load_state_dict`` would copy them.

    Raises:
        ValueError: A kind differs; names the value.
    """

    def kind(value: object) -> torch.layout | None:
        return value.layout if isinstance(value, Tensor) else None

    for name, own in bare(model).state_dict().items():
        if kind(own) != kind(saved[name]):
            raise ValueError(f"the checkpoint is of another model: {name} is of another kind there")


def differences(own: Mapping[str, object], saved: Mapping[str, object]) -> str:
    """Return how two state dicts differ in names and shapes; empty if they do not (pure)."""

    def listed(names: list[str]) -> str:
        return ", ".join(names[:_SHOWN]) + (
            f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        )

    def shape(value: object) -> tuple[int, ...] | None:
        return tuple(value.shape) if isinstance(value, Tensor) else None

    missing = [name for name in own if name not in saved]
    unexpected = [name for name in saved if name not in own]
    other = [
        f"{name} {shape(saved[name])} for {shape(own[name])}"
        for name in own
        if name in saved and shape(saved[name]) != shape(own[name])
    ]
    parts = [("missing", missing), ("unexpected", unexpected), ("of another shape", other)]
    return "; ".join(f"{words}: {listed(names)}" for words, names in parts if names)
