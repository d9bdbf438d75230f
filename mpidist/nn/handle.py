"""Handle of a module on another worker: reference, device, calls of ``forward``, serialisation."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn

from mpidist.errors import MpidistError
from mpidist.nn import address, remote, scripted
from mpidist.rpc import api, current
from mpidist.rpc.rref import RRef

# Names and order are torch's, whose tests read them.
ATTRIBUTES = (
    "on",
    "device",
    "is_device_map_set",
    "is_scriptable",
    "generated_methods",
    "module_rref",
)
_NO_PICKLE = "Cannot {} RemoteModule in python pickler. RemoteModule can only be {}d when using RPC"

T = TypeVar("T", bound="Handle")


class Handle(nn.Module):
    """Base of ``RemoteModule``, initialised by ``_set_up``.

    Attributes:
        on: Name or rank of the worker.
        device: Device of the module on the worker.
        is_device_map_set: This worker has a device map to the module's owner, so results may be
            CUDA tensors.
        is_scriptable: ``torch.jit.script`` can compile the handle.
        generated_methods: Names of the methods that each handle has as instance attributes.
        module_rref: The reference to the module.
        forward: Run the module's ``forward`` on the owner and return the result.
            Blocks: until the result has arrived. Raises: the module's error.
        forward_async: The same; return a ``torch.futures.Future`` at once.
    """

    on: str | int
    device: str
    is_device_map_set: bool
    is_scriptable: bool
    generated_methods: tuple[str, ...]
    module_rref: RRef[nn.Module]
    forward_async: Callable[..., torch.futures.Future[Any]]
    _interface: object  # set if is_scriptable

    def _set_up(
        self, on: str | int, device: str, module_rref: RRef[nn.Module], interface: object
    ) -> None:
        self.on = on
        self.device = device
        self.is_device_map_set = current.require().wire.has_device_map(module_rref.owner().id)
        self.is_scriptable = interface is not None
        self.generated_methods = ("forward_async", "forward")
        self.module_rref = module_rref
        if interface is not None:
            self._interface = interface
        # The methods hold the reference and not this handle, because a cycle would keep the module
        # alive until Python's garbage collector runs.
        held = module_rref, self.device, self.is_device_map_set
        self.__dict__["forward_async"] = partial(_forward_async, *held)
        self.__dict__["forward"] = partial(_forward, *held)

    def __getattr__(self, name: str) -> Any:
        # A handle from a message lacks the attributes of nn.Module until the first access.
        if "_parameters" not in self.__dict__:
            nn.Module.__init__(self)
            return getattr(self, name)
        return super().__getattr__(name)

    def contents(self) -> tuple[str | int, str, RRef[nn.Module], object]:
        """Return the serialised fields; warn about attributes that users have set."""
        for name in self.__dict__.keys() - _OWN:
            warnings.warn(f"attribute {name!r} of a RemoteModule is not sent with it", stacklevel=2)
        return (
            self.on,
            self.device,
            self.module_rref,
            self._interface if self.is_scriptable else None,
        )

    def __getstate__(self) -> NoReturn:
        raise RuntimeError(_NO_PICKLE.format("pickle", "pickle"))

    def __setstate__(self, state: object) -> NoReturn:
        raise RuntimeError(_NO_PICKLE.format("unpickle", "unpickle"))

    def __prepare_scriptable__(self) -> nn.Module:
        """Return the module that ``torch.jit.script`` compiles instead of the handle."""
        if not self.is_scriptable:
            raise MpidistError(
                "torch.jit.script needs a RemoteModule that was made with _module_interface_cls"
            )
        return scripted.typed(self._interface, self.forward_async)


_OWN = frozenset(
    (*ATTRIBUTES, "_interface", "forward", "forward_async", "training", *vars(nn.Module()))
)


def place_of(remote_device: str) -> tuple[str | int, str]:
    """Return the worker and the device of an address.

    Raises:
        MpidistError: RPC is not initialised, or the worker does not exist.
        ValueError: See ``address.parse``.
    """
    agent = current.agent
    if agent is None:
        raise MpidistError("RemoteModule only works in RPC: call mpidist.rpc.init_rpc first")
    place = address.parse(remote_device)
    on = agent.workers.me.name if place.worker is None else place.worker
    agent.workers.rank_of(on)
    return on, place.device


def rebuild(
    kind: type[T], on: str | int, device: str, module_rref: RRef[nn.Module], interface: object
) -> T:
    """Create a handle of an existing module."""
    created = kind.__new__(kind)
    created._set_up(on, device, module_rref, interface)
    return created


def _forward(
    module_rref: RRef[nn.Module],
    device: str,
    can_return_cuda: bool,
    /,
    *args: object,
    **kwargs: object,
) -> Any:
    return api.rpc_sync(
        module_rref.owner(),
        remote.execute,
        (remote.FORWARD, module_rref, device, can_return_cuda, args, kwargs),
    )


def _forward_async(
    module_rref: RRef[nn.Module],
    device: str,
    can_return_cuda: bool,
    /,
    *args: object,
    **kwargs: object,
) -> torch.futures.Future[Any]:
    return api.rpc_async(
        module_rref.owner(),
        remote.execute,
        (remote.FORWARD, module_rref, device, can_return_cuda, args, kwargs),
    )
