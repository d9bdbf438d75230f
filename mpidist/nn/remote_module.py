"""``RemoteModule``: a module on another worker with the interface of a local one."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn

from mpidist.errors import FrameError, MpidistError
from mpidist.nn import address, remote
from mpidist.rpc import api, current
from mpidist.rpc.rref import RRef
from mpidist.rpc.values import data_values
from mpidist.rpc.values.pickles import Registered

# Methods of nn.Module that would act on this object, which has no parameters, and not on the
# module.
REFUSED = (
    "add_module",
    "apply",
    "bfloat16",
    "buffers",
    "children",
    "cpu",
    "cuda",
    "double",
    "float",
    "half",
    "ipu",
    "modules",
    "named_buffers",
    "named_children",
    "register_backward_hook",
    "register_buffer",
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_parameter",
    "requires_grad_",
    "share_memory",
    "to",
    "type",
    "xpu",
    "zero_grad",
)
_REST = "remote"  # metadata key of submodules
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

T = TypeVar("T", bound="RemoteModule")


class RemoteModule(nn.Module, Registered):
    """Module that is created on a worker, stays there, and runs its ``forward`` there.

    ``forward`` waits for the result; ``forward_async`` returns a future of the result. Within
    ``mpidist.autograd.context()`` gradients are sent to the module's worker and back. The object
    may be sent to any worker by RPC, and then refers to the same module; it cannot be pickled
    otherwise.

    Inside another module the object is a leaf without parameters. ``state_dict``,
    ``load_state_dict``, ``train`` and ``eval`` of the enclosing module include the remote module;
    ``parameters``, ``to``, ``zero_grad`` and ``requires_grad_`` leave it out. Differences from
    torch's class:

    - ``parameters`` and ``named_parameters`` yield references, as ``remote_parameters`` does;
    - ``state_dict`` returns copies on the CPU, and ``load_state_dict`` sends values to the worker,
      each in one call (torch refuses these four methods);
    - ``train(False)`` is not ``train()``, and returns this object instead of a copy of the module;
    - methods that would act on this object alone raise ``ValueError``: see ``REFUSED``. torch also
      refuses ``named_modules``, and thereby every traversal of an enclosing module.

    Args:
        remote_device: ``"worker/device"``, ``"rank:number/device"``, or a device of this worker;
            without a device the CPU. Tensors among the arguments are moved to the device. On CUDA
            without a device map, results are returned on the CPU.
        module_cls: A class or function that returns a module; called on the worker.
        args: Arguments of ``module_cls``.
        kwargs: Keyword arguments of ``module_cls``.

    Attributes:
        on: Name or rank of the worker.
        device: Device of the module on the worker.
        is_device_map_set: This worker has a device map to the module's owner, so results may be
            CUDA tensors.
        is_scriptable: False: ``torch.jit.script`` cannot compile the handle.
        generated_methods: Names of the methods that each handle has as instance attributes.
        module_rref: The reference to the module.
        forward: Run the module's ``forward`` on the owner and return the result.
            Blocks: until the result has arrived. Raises: the module's error.
        forward_async: The same; return a ``torch.futures.Future`` at once.

    Raises:
        MpidistError: RPC is not initialised, or the worker does not exist.
        ValueError: An address of another form.

    An error of ``module_cls`` on the worker is raised by the first use of this object.
    """

    on: str | int
    device: str
    is_device_map_set: bool
    is_scriptable: bool
    generated_methods: tuple[str, ...]
    module_rref: RRef[nn.Module]
    forward_async: Callable[..., torch.futures.Future[Any]]

    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., nn.Module],
        args: Iterable[object] | None = None,
        kwargs: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__()
        on, device = place_of(remote_device)
        arguments = module_cls, tuple(args or ()), dict(kwargs or {}), device
        module_rref = api.remote(on, remote.execute, (remote.CREATE, *arguments))
        self._set_up(on, device, module_rref)

    def _set_up(self, on: str | int, device: str, module_rref: RRef[nn.Module]) -> None:
        self.on = on
        self.device = device
        self.is_device_map_set = current.require().wire.has_device_map(module_rref.owner().id)
        self.is_scriptable = False
        self.generated_methods = ("forward_async", "forward")
        self.module_rref = module_rref
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

    @staticmethod
    def init_from_module_rref(remote_device: str, module_rref: RRef[nn.Module]) -> RemoteModule:
        """Return a ``RemoteModule`` of an existing module; several objects may share a module.

        Args:
            remote_device: Address of the module; calls go to the owner of the reference.
            module_rref: A reference to the module.
        """
        return from_wire(*place_of(remote_device), module_rref)

    def get_module_rref(self) -> RRef[nn.Module]:
        """Return the reference to the module."""
        return self.module_rref

    def remote_parameters(self, recurse: bool = True) -> list[RRef[nn.Parameter]]:
        """Return references to the module's parameters, for ``DistributedOptimizer``.

        Args:
            recurse: Include parameters of submodules.

        Blocks: for one call.
        """
        return [reference for _, reference in self.named_parameters(recurse=recurse)]

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        """Yield the references of ``remote_parameters``."""
        yield from self.remote_parameters(recurse)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Any]]:
        """Yield names and references of the module's parameters.

        Args:
            prefix: Prefix of all names.
            recurse: Include parameters of submodules.
            remove_duplicate: Yield each parameter once, even if it has several names.
        """
        start = f"{prefix}." if prefix else ""
        for name, reference in self._execute(remote.PARAMETERS, recurse, remove_duplicate):
            yield start + name, reference

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield this object only, because its submodules are on the worker."""
        memo = set() if memo is None else memo
        if self not in memo:
            if remove_duplicate:
                memo.add(self)
            yield prefix, self

    def train(self, mode: bool = True) -> RemoteModule:
        """Set the module's training mode and return this object.

        Blocks: for one call. ``training`` is the mode that this object has set; other objects of
        the same module may have set another mode.
        """
        if not isinstance(mode, bool):
            raise ValueError("training mode is expected to be boolean")
        self._execute(remote.TRAIN, mode)
        self.training = mode
        return self

    def extra_repr(self) -> str:
        """Return the worker and the device."""
        return f"on={self.on!r}, device={self.device!r}"

    def contents(self) -> tuple[str | int, str, RRef[nn.Module]]:
        """Return the serialised fields; warn about attributes that users have set."""
        for name in self.__dict__.keys() - _OWN:
            warnings.warn(f"attribute {name!r} of a RemoteModule is not sent with it", stacklevel=2)
        return self.on, self.device, self.module_rref

    def __getstate__(self) -> NoReturn:
        raise RuntimeError(_NO_PICKLE.format("pickle", "pickle"))

    def __setstate__(self, state: object) -> NoReturn:
        raise RuntimeError(_NO_PICKLE.format("unpickle", "unpickle"))

    def __prepare_scriptable__(self) -> NoReturn:
        raise TypeError(
            "torch.jit.script cannot compile a RemoteModule: it is called from Python alone"
        )

    def reduced(self) -> Any:
        """See ``Registered``."""
        if type(self) is RemoteModule:
            return from_wire, self.contents()
        return rebuild, (type(self), *self.contents())

    def _execute(self, operation: str, *arguments: object) -> Any:
        return api.rpc_sync(
            self.module_rref.owner(), remote.execute, (operation, self.module_rref, *arguments)
        )

    def _apply(self, fn: Callable[..., object], recurse: bool = True) -> RemoteModule:
        # Called by ``to`` or ``float`` of an enclosing module; this object has no parameters.
        return self

    def _save_to_state_dict(
        self, destination: MutableMapping[str, object], prefix: str, keep_vars: bool
    ) -> None:
        values, metadata = self._execute(remote.STATE)
        for name, value in values.items():
            destination[prefix + name] = value
        versions = getattr(destination, "_metadata", None)
        if versions is not None:
            rest = {name: entry for name, entry in metadata.items() if name}
            # On loading, torch passes a child only the child's own entry. Therefore this entry also
            # holds the entries of the submodules.
            versions[prefix[:-1]] = {**metadata.get("", {}), _REST: rest}
            versions.update({prefix + name: entry for name, entry in rest.items()})

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, object],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        values = {
            name[len(prefix) :]: value.detach() if isinstance(value, torch.Tensor) else value
            for name, value in state_dict.items()
            if name.startswith(prefix)
        }
        own = dict(local_metadata)
        assign = own.pop("assign_to_params_buffers", False)
        whole = {} if prefix else getattr(state_dict, "_metadata", None) or {}
        metadata = {**whole, **own.pop(_REST, {}), "": own}
        missing, unexpected, errors = self._execute(remote.LOAD, values, metadata, assign)
        missing_keys += [prefix + name for name in missing]
        unexpected_keys += [prefix + name for name in unexpected] if strict else []
        error_msgs += [f"{prefix}* on {self.module_rref.owner_name()}: {error}" for error in errors]


_OWN = frozenset((*ATTRIBUTES, "forward", "forward_async", "training", *vars(nn.Module())))


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


def rebuild(kind: type[T], on: str | int, device: str, module_rref: RRef[nn.Module]) -> T:
    """Create a handle of an existing module."""
    created = kind.__new__(kind)
    created._set_up(on, device, module_rref)
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


def from_wire(on: str | int, device: str, module_rref: RRef[nn.Module]) -> RemoteModule:
    """Create a ``RemoteModule`` from the fields of a message."""
    return rebuild(RemoteModule, on, device, module_rref)


def from_data(*contents: object) -> RemoteModule:
    """Create a ``RemoteModule`` from the fields of a data-only message, after checking them.

    Raises:
        FrameError: An unknown worker or device, or a value that is no reference.
    """
    if len(contents) != 3:
        raise FrameError(f"a RemoteModule is sent as 3 values; got {len(contents)}")
    on, device, module_rref = contents
    if (
        not (type(on) is str or type(on) is int)
        or type(device) is not str
        or type(module_rref) is not RRef
    ):
        raise FrameError(
            "a RemoteModule is sent as a worker, a device and a reference; got something else"
        )
    try:
        current.require().workers.rank_of(on)
        torch.device(device)
    except (RuntimeError, ValueError) as error:
        raise FrameError(f"no RemoteModule: {error}") from error
    return from_wire(on, device, module_rref)


data_values.register_class(1, RemoteModule, from_data)


def _refusal(name: str) -> Callable[..., NoReturn]:
    def refuse(self: RemoteModule, *args: object, **kwargs: object) -> NoReturn:
        raise ValueError(f"Method ``{name}`` not supported for RemoteModule")

    refuse.__name__ = name
    refuse.__qualname__ = f"RemoteModule.{name}"
    refuse.__doc__ = "Raise ``ValueError``: see ``REFUSED``."
    return refuse


for _name in REFUSED:
    setattr(RemoteModule, _name, _refusal(_name))
