"""Module on another worker that is used as one here: ``RemoteModule``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn

from mpidist.errors import FrameError
from mpidist.nn import handle, remote, scripted
from mpidist.rpc import api, current, data_values
from mpidist.rpc.pickles import Carried
from mpidist.rpc.rref import RRef

# Methods of nn.Module that would act on this object, which holds no parameter, and not on the
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
_REST = "remote"  # where the metadata of a state dict has that of the submodules


class RemoteModule(handle.Handle, Carried):
    """A module that is made on a worker, lives there, and runs its ``forward`` there.

    ``forward`` waits for the result; ``forward_async`` returns a future of it. Within
    ``mpidist.autograd.context()`` gradients pass to the module's worker and back. The object may be
    sent to any worker by RPC, and shares the module then; it cannot be pickled otherwise.

    Inside another module it is a leaf without parameters of its own: ``state_dict``,
    ``load_state_dict``, ``train`` and ``eval`` of that module reach the worker; ``parameters``,
    ``to``, ``zero_grad`` and ``requires_grad_`` of that module leave the remote part out. Where its
    own methods differ from torch's:

    - ``parameters`` and ``named_parameters`` yield references, as ``remote_parameters`` does;
    - ``state_dict`` has copies on the CPU, ``load_state_dict`` sends values to the worker, each in
      one call (torch refuses these four);
    - ``train(False)`` is not ``train()``, and returns this object instead of a copy of the module;
    - methods that would act on this object alone raise ``ValueError``: see ``REFUSED``. torch
      refuses ``named_modules`` too, and with it every walk over an enclosing module.

    Args:
        remote_device: ``"worker/device"``, ``"rank:number/device"``, or a device of this worker;
            the device is the CPU if it is missing. Tensors among the arguments are moved to it; on
            CUDA without a device map results come back on the CPU.
        module_cls: A class or function of the worker that returns a module.
        args: Its arguments.
        kwargs: Its keyword arguments.
        _module_interface_cls: A class decorated by ``torch.jit.interface``: the worker compiles the
            module, and ``torch.jit.script`` compiles this object.

    Raises:
        MpidistError: RPC is not initialised, or there is no such worker.
        ValueError: An address of another form; an interface that is none.

    What the constructor of the module raises there is raised by the first use here.
    """

    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., nn.Module],
        args: Any = None,
        kwargs: Mapping[str, Any] | None = None,
        _module_interface_cls: Any = None,
    ) -> None:
        super().__init__()
        if _module_interface_cls is not None:
            scripted.require_interface(_module_interface_cls)
        on, device = handle.place_of(remote_device)
        arguments = (
            module_cls,
            tuple(args or ()),
            dict(kwargs or {}),
            device,
            _module_interface_cls is not None,
        )
        module_rref = api.remote(on, remote.execute, (remote.CREATE, *arguments))
        self._set_up(on, device, module_rref, _module_interface_cls)

    @staticmethod
    def init_from_module_rref(
        remote_device: str, module_rref: RRef[nn.Module], _module_interface_cls: Any = None
    ) -> RemoteModule:
        """Return a ``RemoteModule`` of a module that exists; several may share one.

        Args:
            remote_device: Where the module is; calls go to the reference's owner.
            module_rref: A reference to it.
            _module_interface_cls: See the class.
        """
        return from_wire(*handle.place_of(remote_device), module_rref, _module_interface_cls)

    def get_module_rref(self) -> RRef[nn.Module]:
        """Return the reference to the module."""
        return self.module_rref

    def remote_parameters(self, recurse: bool = True) -> list[RRef[nn.Parameter]]:
        """Return references to the module's parameters, for ``DistributedOptimizer``.

        Args:
            recurse: Those of submodules, too.

        Blocks: for one call.
        """
        return [reference for _, reference in self.named_parameters(recurse=recurse)]

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        """Yield what ``remote_parameters`` returns."""
        yield from self.remote_parameters(recurse)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[Any]:
        """Yield names and references of the module's parameters.

        Args:
            prefix: Of all names.
            recurse: Those of submodules, too.
            remove_duplicate: Each parameter once, whatever its names.
        """
        start = f"{prefix}." if prefix else ""
        for name, reference in self._execute(remote.PARAMETERS, recurse, remove_duplicate):
            yield start + name, reference

    def named_modules(
        self, memo: Any = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[Any]:
        """Yield this object alone: what lies below it is on the worker."""
        memo = set() if memo is None else memo
        if self not in memo:
            if remove_duplicate:
                memo.add(self)
            yield prefix, self

    def train(self, mode: bool = True) -> RemoteModule:
        """Have the module train, or not; return this object.

        Blocks: for one call. ``training`` is what this object has set, not what others have.
        """
        if not isinstance(mode, bool):
            raise ValueError("training mode is expected to be boolean")
        self._execute(remote.TRAIN, mode)
        self.training = mode
        return self

    def extra_repr(self) -> str:
        """Return the worker and the device."""
        return f"on={self.on!r}, device={self.device!r}"

    def reduced(self) -> Any:
        """See ``Carried``."""
        if type(self) is RemoteModule:
            return from_wire, self.contents()
        return handle.rebuild, (type(self), *self.contents())

    def _execute(self, operation: str, *arguments: Any) -> Any:
        return api.rpc_sync(
            self.module_rref.owner(), remote.execute, (operation, self.module_rref, *arguments)
        )

    def _apply(self, fn: Any, recurse: bool = True) -> RemoteModule:
        # An enclosing module moves, or changes its element type: nothing of this one is here.
        return self

    def _save_to_state_dict(
        self, destination: MutableMapping[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        values, metadata = self._execute(remote.STATE)
        for name, value in values.items():
            destination[prefix + name] = value
        versions = getattr(destination, "_metadata", None)
        if versions is not None:
            rest = {name: entry for name, entry in metadata.items() if name}
            # torch gives a child its own entry alone when it loads, so the others are put there,
            # too.
            versions[prefix[:-1]] = {**metadata.get("", {}), _REST: rest}
            versions.update({prefix + name: entry for name, entry in rest.items()})

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
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


def from_wire(
    on: str | int, device: str, module_rref: RRef[nn.Module], interface: Any
) -> RemoteModule:
    """Make the ``RemoteModule`` that a message brought."""
    return handle.rebuild(RemoteModule, on, device, module_rref, interface)


def from_data(*contents: Any) -> RemoteModule:
    """Make the ``RemoteModule`` that a message of data brought, of what ``contents`` returned.

    Raises:
        FrameError: There is no such worker, device or interface, or the reference is none.
    """
    if len(contents) != 4:
        raise FrameError(f"a RemoteModule travels as 4 values; got {len(contents)}")
    on, device, module_rref, interface = contents
    if type(on) not in (str, int) or type(device) is not str or type(module_rref) is not RRef:
        raise FrameError(
            "a RemoteModule travels as a worker, a device, a reference and an interface; got "
            "something else"
        )
    try:
        current.require().workers.rank_of(on)
        torch.device(device)
        if interface is not None:
            scripted.require_interface(interface)
    except (RuntimeError, ValueError) as error:
        raise FrameError(f"no RemoteModule: {error}") from error
    return from_wire(on, device, module_rref, interface)


data_values.register_carried(1, RemoteModule, from_data)


def _refusal(name: str) -> Callable[..., Any]:
    def refuse(self: RemoteModule, *args: Any, **kwargs: Any) -> Any:
        raise ValueError(f"Method ``{name}`` not supported for RemoteModule")

    refuse.__name__ = name
    refuse.__qualname__ = f"RemoteModule.{name}"
    refuse.__doc__ = "Raise ``ValueError``: see ``REFUSED``."
    return refuse


for _name in REFUSED:
    setattr(RemoteModule, _name, _refusal(_name))
