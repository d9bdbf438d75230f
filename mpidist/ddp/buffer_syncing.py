"""Synchronization of a module's buffers by a broadcast or a hook, in the forward pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import TypeAlias

import torch

from mpidist.comm.group_types import Group
from mpidist.ddp.reducer import Reducer, Waitable
from mpidist.ddp.verification import broadcast_state
from mpidist.dynamo import untraced

Tensor = torch.Tensor

# Called with the registered state and the buffers by name.
BufferHookFunction: TypeAlias = Callable[..., "Waitable | Sequence[Waitable] | None"]

PRE_FORWARD, POST_FORWARD = "PRE_FORWARD", "POST_FORWARD"


@dataclasses.dataclass(frozen=True)
class BufferHook:
    """Hook that synchronizes a module's buffers instead of the broadcast.

    Attributes:
        hook: Called as ``hook(state, buffers)`` with the buffers by name; returns None, a future
            or a list of futures.
        state: Its state.
        location: ``PRE_FORWARD`` or ``POST_FORWARD``.
    """

    hook: BufferHookFunction
    state: object
    location: str


class BufferSyncing:
    """Synchronization of one module's buffers.

    Args:
        module: The module.
        ignored: Names of buffers that stay each rank's own.
        is_enabled: Forward passes synchronize.

    Attributes:
        is_enabled: As the argument.
        is_due: The next forward pass synchronizes: the first, and each that follows an averaged
            one.
        hook: The hook; None for the broadcast.
    """

    def __init__(self, module: torch.nn.Module, ignored: Collection[str], is_enabled: bool) -> None:
        self.is_enabled = is_enabled
        self.is_due = True
        self.hook: BufferHook | None = None
        self._module = module
        self._ignored = ignored

    def named_buffers(self) -> dict[str, Tensor]:
        """Return the synchronized buffers by name."""
        return {
            name: buffer
            for name, buffer in self._module.named_buffers()
            if name not in self._ignored
        }

    def buffers(self) -> list[Tensor]:
        """Return the synchronized buffers."""
        return list(self.named_buffers().values())

    def is_next(self) -> bool:
        """Return whether the next forward pass synchronizes buffers."""
        return self.is_due and self.is_enabled and bool(self.named_buffers())

    def is_behind(self) -> bool:
        """Return whether buffers are synchronized behind the module's forward pass."""
        return self.hook is not None and self.hook.location == POST_FORWARD

    def register_hook(
        self, state: object, hook: BufferHookFunction, location: object = POST_FORWARD
    ) -> None:
        """Synchronize by ``hook(state, buffers)``; see ``_register_buffer_comm_hook`` of DDP.

        Raises:
            TypeError: ``hook`` is not callable.
            ValueError: ``location`` is of another name.
        """
        if not callable(hook):
            raise TypeError(
                f"_register_buffer_comm_hook needs a callable; got {type(hook).__name__}"
            )
        name = getattr(location, "name", location)
        if name not in (PRE_FORWARD, POST_FORWARD):
            raise ValueError(
                f"comm_hook_location must be {PRE_FORWARD} or {POST_FORWARD}; got {location!r}"
            )
        self.hook = BufferHook(hook, state, name)

    @untraced
    def sync(self, group: Group, reducer: Reducer, root: int = 0, waits: bool = True) -> None:
        """Synchronize the buffers. Collective: over the group.

        Args:
            reducer: The module's; the end of its backward pass waits for the hook's futures.
            root: The rank whose buffers are broadcast, if there is no hook.
            waits: Wait for the hook's futures here, and not at the end of the backward pass.

        Raises:
            TypeError: The hook returned neither None nor futures.
        """
        if self.hook is None:
            broadcast_state(group, self.buffers(), root)
            return
        with torch.no_grad():
            futures = self.hook.hook(self.hook.state, self.named_buffers())
        if futures is None:
            return
        futures = futures if isinstance(futures, Sequence) else [futures]
        if not all(hasattr(future, "wait") for future in futures):
            raise TypeError(
                f"a buffer hook must return None, a future or a list of futures; got {futures}"
            )
        reducer._install_post_backward_futures(futures)
        if waits:
            reducer.wait_for_futures()
