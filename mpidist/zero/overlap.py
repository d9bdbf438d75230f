"""Shards that are brought together while the next forward pass runs: each read of a parameter waits for its own bucket.

``PendingGathers`` holds the works under way. Meanwhile a mode of torch's function dispatch is at
the bottom of the stack of the thread that took the step: it sees the arguments of each torch
function and method, and waits before one reads a parameter. Modules need not be called for that
(``F.linear(x, other.weight)``, ``state_dict``, averages of weights). Code that torch dispatches
elsewhere is waited for as a whole, when its module is called: TorchScript, ``torch.compile``, other
threads.
"""

from __future__ import annotations

import bisect
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.modules import module as modules
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)

from mpidist.comm.serialization.tensor_spans import span

Tensor = torch.Tensor

# Getters that hand out memory, a tensor on it or its address; all others tell of a tensor without
# reading it.
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
    "size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size", "is_contiguous",
    "is_floating_point", "is_complex", "get_device", "requires_grad_", "register_hook", "register_post_accumulate_grad_hook",
    "__hash__", "__len__", "type_as",
)  # fmt: skip


def _of_metadata() -> frozenset[Any]:
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
    """Works that bring some parameters, or parts of them, to this rank."""

    parameters: list[Tensor]
    works: Sequence[Any]


class PendingGathers:
    """Gathers under way, and what is done so that nobody reads what they still write.

    It keeps itself alive as long as there are any: parameters outlive their optimizer. Once that is
    gone, the next call of any module ends it as soon as all gathers have ended, although nobody has
    read the parameters.

    Args:
        owner: The optimizer.
    """

    def __init__(self, owner: Any = None) -> None:
        self._owner = None if owner is None else weakref.ref(owner)
        self._works: list[Sequence[Any]] = []
        self._places: dict[int, list[int]] = {}  # by the id of a parameter
        self._parameters: list[Tensor] = []
        # of each parameter: first and end address, bucket; in ascending order
        self._memory: list[tuple[int, int, int]] = []
        self._left = 0
        self._mode = _ReadsWait(self)
        self._thread = 0  # that has the mode on its stack, as far as we know
        self._handles: list[Any] = []

    @property
    def is_open(self) -> bool:
        """Say whether a gather has not been waited for."""
        return self._left > 0

    def begin(self, gathers: Sequence[Gather]) -> None:
        """Take over gathers that have been started; all earlier ones have been waited for."""
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
        """Wait for all of them.

        Blocks: the host, until this rank's parameters are complete; on a device, the current
        stream.
        """
        for place in range(len(self._works)):
            self._wait_for(place)
        self.retire()

    def wait_for(self, parameters: Iterable[Tensor]) -> None:
        """Wait for those that bring some parameters."""
        if self.is_open:
            for parameter in parameters:
                for place in self._places.get(id(parameter), ()):
                    self._wait_for(place)

    def before(self, arguments: Iterable[Any]) -> None:
        """Wait for what a function is about to read: tensors among its arguments, in lists, tuples and dicts too."""
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
        """Stop watching once all have been waited for; in the thread that began."""
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
        """Wait for the parameters in whose memory another tensor lies."""
        if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
            return
        try:
            first, end = span(tensor)
        except RuntimeError:  # without memory
            return
        if not self._memory or end <= self._memory[0][0] or first >= self._memory[-1][1]:
            return
        at = bisect.bisect_left(self._memory, (end,))
        # Parameters do not overlap, so their ends ascend as their beginnings do.
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

    def _called(self, module: torch.nn.Module, arguments: Any) -> None:
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
        """Say whether the optimizer is gone and all gathers have ended: the parameters may be gone, too, but for us."""
        if self._owner is None or self._owner() is not None:
            return False
        return all(work.is_completed() for works in reversed(self._works) for work in works)

    def _returned(self, module: torch.nn.Module, arguments: Any, output: Any) -> None:
        if not self.is_open:
            self.retire()


class _ReadsWait(TorchFunctionMode):
    """Waits before a torch function reads a parameter that is still being brought."""

    def __init__(self, pending: PendingGathers) -> None:
        super().__init__()
        self._pending = pending

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._pending.is_open and func not in _METADATA:
            self._pending.before(args)
            if kwargs:
                self._pending.before(kwargs.values())
        return func(*args, **(kwargs or {}))


def _is_opaque(module: torch.nn.Module) -> bool:
    """Say whether a module runs code that modes do not see."""
    return (
        isinstance(module, torch.jit.ScriptModule)
        or type(module).__name__ == "OptimizedModule"
        or getattr(module, "_compiled_call_impl", None) is not None
    )


def _insert(mode: TorchFunctionMode) -> None:
    """Put a mode below all others, which then come and go as if it were not there.

    torch's default device stays at the very bottom, where torch looks for it.
    """
    stack = _get_current_function_mode_stack()
    default = getattr(getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None), "device_context", None)
    place = 1 if stack and stack[0] is default else 0
    _replace(stack, [*stack[:place], mode, *stack[place:]])


def _removed(mode: TorchFunctionMode) -> bool:
    """Take a mode off the stack; False if it is not there, because a function is being dispatched by it."""
    stack = _get_current_function_mode_stack()
    rest = [each for each in stack if each is not mode]
    if len(rest) == len(stack):
        return False
    _replace(stack, rest)
    return True


def _replace(old: Sequence[Any], new: Sequence[Any]) -> None:
    for _ in old:
        _pop_mode()
    for mode in new:
        _push_mode(mode)
