"""Synchronization of a module's buffers by a broadcast or a hook, in the forward pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
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
    """The part of a data-parallel module that synchronizes buffers."""

    # Defined by the class that this one is mixed into.
    module: torch.nn.Module
    reducer: Reducer
    parameters_to_ignore: set[str]
    forward_sync_buffers: bool
    require_forward_param_sync: bool
    _group: Group

    buffer_hook: BufferHook | None = None

    @property
    def modules_buffers(self) -> list[Tensor]:
        """Return the synchronized buffers."""
        return list(self.named_module_buffers.values())

    @property
    def named_module_buffers(self) -> dict[str, Tensor]:
        """Return the synchronized buffers by name."""
        return {
            name: buffer
            for name, buffer in self.module.named_buffers()
            if name not in self.parameters_to_ignore
        }

    def _register_buffer_comm_hook(
        self,
        state: object,
        hook: BufferHookFunction,
        comm_hook_location: object = POST_FORWARD,
    ) -> None:
        """Synchronize the buffers by ``hook(state, buffers)`` instead of the broadcast from rank 0.

        The end of the backward pass waits for the futures that the hook returns; a forward pass
        that is not averaged waits at once.

        Args:
            state: Passed to each call.
            hook: Takes the buffers by name.
            comm_hook_location: torch's ``_BufferCommHookLocation``, or its name.

        Raises:
            TypeError: ``hook`` is not callable.
            ValueError: ``comm_hook_location`` is of another name.
        """
        if not callable(hook):
            raise TypeError(
                f"_register_buffer_comm_hook needs a callable; got {type(hook).__name__}"
            )
        location = getattr(comm_hook_location, "name", comm_hook_location)
        if location not in (PRE_FORWARD, POST_FORWARD):
            raise ValueError(
                f"comm_hook_location must be {PRE_FORWARD} or {POST_FORWARD}; got "
                f"{comm_hook_location!r}"
            )
        self.buffer_hook = BufferHook(hook, state, location)

    def will_sync_module_buffers(self) -> bool:
        """Say whether the next forward pass synchronizes buffers."""
        return (
            self.require_forward_param_sync
            and self.forward_sync_buffers
            and bool(self.named_module_buffers)
        )

    def _check_sync_bufs_pre_fwd(self) -> bool:
        return self.will_sync_module_buffers() and not self._syncs_behind()

    def _check_sync_bufs_post_fwd(self) -> bool:
        return self.will_sync_module_buffers() and self._syncs_behind()

    def _syncs_behind(self) -> bool:
        return self.buffer_hook is not None and self.buffer_hook.location == POST_FORWARD

    @untraced
    def _sync_buffers(self, root: int = 0, waits: bool = True) -> None:
        """Synchronize the buffers. Collective: over the group.

        Args:
            root: The rank whose buffers are broadcast, if there is no hook.
            waits: Wait for the hook's futures here, and not at the end of the backward pass.

        Raises:
            TypeError: The hook returned neither None nor futures.
        """
        if self.buffer_hook is None:
            broadcast_state(self._group, self.modules_buffers, root)
            return
        with torch.no_grad():
            futures = self.buffer_hook.hook(self.buffer_hook.state, self.named_module_buffers)
        if futures is None:
            return
        futures = futures if isinstance(futures, Sequence) else [futures]
        if not all(hasattr(future, "wait") for future in futures):
            raise TypeError(
                f"a buffer hook must return None, a future or a list of futures; got {futures}"
            )
        self.reducer._install_post_backward_futures(futures)
        if waits:
            self.reducer.wait_for_futures()

    def _sync_module_buffers(self, authoritative_rank: int) -> None:
        self._sync_buffers(authoritative_rank)

    def _default_broadcast_coalesced(
        self,
        bufs: Sequence[Tensor] | None = None,
        bucket_size: int | None = None,
        authoritative_rank: int = 0,
    ) -> None:
        """Broadcast buffers, all of them if ``bufs`` is None; called by buffer hooks.

        Collective: over the group.
        """
        broadcast_state(
            self._group, self.modules_buffers if bufs is None else bufs, authoritative_rank
        )

    def _distributed_broadcast_coalesced(
        self, tensors: Sequence[Tensor], buffer_size: int, authoritative_rank: int = 0
    ) -> None:
        broadcast_state(self._group, tensors, authoritative_rank)
