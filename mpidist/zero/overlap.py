"""Gathers of shards during the next forward pass: a read of a parameter waits for its bucket.

``PendingGathers`` holds the works in progress. Meanwhile a torch function mode at the bottom of the
stepping thread's stack checks the arguments of each torch function and method, and waits before one
reads a parameter. No module call is needed (``F.linear(x, other.weight)``, ``state_dict``, averages
of weights). Code without this dispatch (TorchScript, ``torch.compile``, other threads) waits for
all gathers when its module is called.
"""

from __future__ import annotations

import bisect
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch.nn.modules import module as modules
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils.hooks import RemovableHandle

from mpidist.comm.serialization.tensor_spans import span
from mpidist.comm.work import Work

Tensor = torch.Tensor
T = TypeVar("T")

# Getters that return memory, a tensor on it or its address. All other getters return metadata.
_OF_VALUES = {
    "T",
    "mT",
    "H",
    "mH",
    "data",
    "real",
    "imag",
    "__cuda_array_interface__",
    "__array_interface__",
}
_PLAIN_METHODS = (
    "size",
    "dim",
    "ndimension",
    "numel",
    "nelement",
    "stride",
    "storage_offset",
    "element_size",
    "is_contiguous",
    "is_floating_point",
    "is_complex",
    "get_device",
    "requires_grad_",
    "register_hook",
    "register_post_accumulate_grad_hook",
    "__hash__",
    "__len__",
    "type_as",
)


def _of_metadata() -> frozenset[Callable[..., object]]:
    found = {getattr(Tensor, name) for name in _PLAIN_METHODS}
    for name in dir(Tensor):
        attribute = getattr(Tensor, name)
        if (
            hasattr(attribute, "__get__")
            and hasattr(attribute, "__set__")
            and name not in _OF_VALUES
        ):
            found.add(attribute.__get__)
    found |= {getattr(Tensor, name).__set__ for name in ("grad", "requires_grad")}
    return frozenset(found)


_METADATA = _of_metadata()


class Gather(NamedTuple):
    """Works that copy some parameters, or parts of them, to this rank."""

    parameters: list[Tensor]
    works: Sequence[Work]


class PendingGathers:
    """Gathers in progress, and the hooks that make reads of their parameters wait.

    The hooks keep this object alive while a gather is pending, because parameters outlive their
    optimizer. After the optimizer is gone and all gathers have completed, the next call of any
    module removes the hooks, also if the parameters were never read.

    Args:
        owner: The optimizer.
    """

    def __init__(self, owner: object = None) -> None:
        self._owner = None if owner is None else weakref.ref(owner)
        self._works: list[Sequence[Work]] = []
        self._places: dict[int, list[int]] = {}  # buckets by the id of a parameter
        self._parameters: list[Tensor] = []
        # First address, end address and bucket of each parameter, in ascending order.
        self._memory: list[tuple[int, int, int]] = []
        self._left = 0
        self._mode = _ReadsWait(self)
        self._thread = 0  # ident of the thread with the mode on its stack; 0: none
        self._handles: list[RemovableHandle] = []

    @property
    def is_open(self) -> bool:
        """Return whether a gather is pending: no thread has waited for it."""
        return self._left > 0

    def begin(self, gathers: Sequence[Gather]) -> None:
        """Watch started gathers; no earlier gather may be pending."""
        if not gathers:
            return
        self._works = [gather.works for gather in gathers]
        self._parameters = [parameter for gather in gathers for parameter in gather.parameters]
        self._places = {}
        for place, gather in enumerate(gathers):
            for parameter in gather.parameters:
                self._places.setdefault(id(parameter), []).append(place)
        self._memory = sorted(
            (*span(p), place) for place, gather in enumerate(gathers) for p in gather.parameters
        )
        self._left = len(gathers)
        self._watch()

    def wait(self) -> None:
        """Wait for all gathers.

        Blocks: the host, until this rank's parameters are complete; on a device, the current
        stream.
        """
        for place in range(len(self._works)):
            self._wait_for(place)
        self.retire()

    def wait_for(self, parameters: Iterable[Tensor]) -> None:
        """Wait for the gathers of some parameters."""
        if self.is_open:
            for parameter in parameters:
                for place in self._places.get(id(parameter), ()):
                    self._wait_for(place)

    def before(self, arguments: Iterable[object]) -> None:
        """Wait for the tensors among a function's arguments, also in lists, tuples and dicts."""
        for argument in arguments:
            if isinstance(argument, Tensor):
                places = self._places.get(id(argument))
                if places is None:
                    self._wait_for_alias(argument)
                else:
                    for place in places:
                        self._wait_for(place)
            elif isinstance(argument, (list, tuple)):
                self.before(argument)
            elif isinstance(argument, dict):
                self.before(argument.values())

    def retire(self) -> None:
        """Remove the hooks if no gather is pending; only in the thread that called ``begin``."""
        if self.is_open or threading.get_ident() != self._thread:
            return
        if _removed(self._mode):
            self._thread = 0
            for handle in self._handles:
                handle.remove()
            self._handles = []
            self._works, self._parameters, self._places, self._memory = [], [], {}, []

    def _wait_for(self, place: int) -> None:
        works = self._works[place]
        if works:
            with torch._C.DisableTorchFunction():
                for work in works:
                    work.wait()
            self._works[place] = ()
            self._left -= 1

    def _wait_for_alias(self, tensor: Tensor) -> None:
        """Wait for the parameters that share memory with a tensor."""
        if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
            return
        try:
            first, end = span(tensor)
        except RuntimeError:  # without memory
            return
        if not self._memory or end <= self._memory[0][0] or first >= self._memory[-1][1]:
            return
        at = bisect.bisect_left(self._memory, (end,))
        # Parameters do not overlap, so their ends ascend like their first addresses.
        while at and self._memory[at - 1][1] > first:
            at -= 1
            self._wait_for(self._memory[at][2])

    def _watch(self) -> None:
        self._thread = threading.get_ident()
        if self._mode not in _get_current_function_mode_stack():
            _insert(self._mode)
        if not self._handles:
            self._handles = [
                modules.register_module_forward_pre_hook(self._called),
                modules.register_module_forward_hook(self._returned),
            ]

    def _called(self, module: torch.nn.Module, arguments: object) -> None:
        if self.is_open and (
            threading.get_ident() != self._thread
            or _is_opaque(module)
            or any(map(_is_opaque, module.children()))
        ):
            self.wait()
        elif not self.is_open:
            self.retire()
        elif self._is_abandoned():
            self.wait()

    def _is_abandoned(self) -> bool:
        """Return whether the optimizer is gone and all gathers have completed.

        This object may then hold the last references to the parameters.
        """
        if self._owner is None or self._owner() is not None:
            return False
        return all(work.is_completed() for works in reversed(self._works) for work in works)

    def _returned(self, module: torch.nn.Module, arguments: object, output: object) -> None:
        if not self.is_open:
            self.retire()


class _ReadsWait(TorchFunctionMode):
    """Mode that waits before a torch function reads a parameter with a pending gather."""

    def __init__(self, pending: PendingGathers) -> None:
        super().__init__()
        self._pending = pending

    def __torch_function__(
        self,
        func: Callable[..., T],
        types: object,
        args: Iterable[object] = (),
        kwargs: dict[str, object] | None = None,
    ) -> T:
        if self._pending.is_open and func not in _METADATA:
            self._pending.before(args)
            if kwargs:
                self._pending.before(kwargs.values())
        return func(*args, **(kwargs or {}))


def _is_opaque(module: torch.nn.Module) -> bool:
    """Return whether a module runs code without torch's function dispatch."""
    return (
        isinstance(module, torch.jit.ScriptModule)
        or type(module).__name__ == "OptimizedModule"
        or getattr(module, "_compiled_call_impl", None) is not None
    )


def _insert(mode: TorchFunctionMode) -> None:
    """Push a mode below all others, so that they can be pushed and popped as usual.

    The mode of torch's default device stays at the bottom, where torch expects it.
    """
    stack = _get_current_function_mode_stack()
    default = getattr(getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None), "device_context", None)
    place = 1 if stack and stack[0] is default else 0
    _replace(stack, [*stack[:place], mode, *stack[place:]])


def _removed(mode: TorchFunctionMode) -> bool:
    """Remove a mode from the stack; return False if torch has popped it to dispatch a function."""
    stack = _get_current_function_mode_stack()
    rest = [each for each in stack if each is not mode]
    if len(rest) == len(stack):
        return False
    _replace(stack, rest)
    return True


def _replace(old: Sequence[TorchFunctionMode], new: Sequence[TorchFunctionMode]) -> None:
    for _ in old:
        _pop_mode()
    for mode in new:
        _push_mode(mode)
