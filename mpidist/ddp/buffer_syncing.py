"""Buffers of a data-parallel module: broadcast, or synchronised by a hook, ahead of the forward pass or behind it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mpidist.ddp.verification import broadcast_state
from mpidist.dynamo import untraced

Tensor = torch.Tensor

PRE_FORWARD, POST_FORWARD = "PRE_FORWARD", "POST_FORWARD"


@dataclasses.dataclass(frozen=True)
class BufferHook:
    """Synchronisation of a module's buffers in the place of the broadcast.

    Attributes:
        hook: Called as ``hook(state, buffers)``, with the buffers by name; returns None, a future
            or a list of them.
        state: Its state.
        location: Ahead of the forward pass, or behind it.
    """

    hook: Callable[[Any, dict[str, Tensor]], Any]
    state: Any
    location: str


class BufferSyncing:
    """The part of a data-parallel module that keeps buffers alike."""

    # Of the class that this one is mixed into.
    module: torch.nn.Module
    reducer: Any
    parameters_to_ignore: set[str]
    forward_sync_buffers: bool
    require_forward_param_sync: bool
    _group: Any

    buffer_hook: BufferHook | None = None

    @property
    def modules_buffers(self) -> list[Tensor]:
        """Return the buffers that are synchronised."""
        return list(self.named_module_buffers.values())

    @property
    def named_module_buffers(self) -> dict[str, Tensor]:
        """Return them by name."""
        return {
            name: buffer
            for name, buffer in self.module.named_buffers()
            if name not in self.parameters_to_ignore
        }

    def _register_buffer_comm_hook(
        self,
        state: Any,
        hook: Callable[[Any, dict[str, Tensor]], Any],
        comm_hook_location: Any = POST_FORWARD,
    ) -> None:
        """Have ``hook(state, buffers)`` synchronise the buffers in the place of the broadcast from rank 0.

        Futures that it returns are waited for at the end of the backward pass, or, where none is to
        come, at once.

        Args:
            state: Passed to each call.
            hook: Gets the buffers by name.
            comm_hook_location: torch's ``_BufferCommHookLocation``, or its name: ahead of the
                forward pass or behind it.

        Raises:
            TypeError: ``hook`` cannot be called.
            ValueError: Another location.
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
        """Say whether the next forward pass synchronises buffers."""
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
        """Synchronise the buffers. Collective: over the group.

        Args:
            root: The rank whose buffers hold, if no hook says otherwise.
            waits: Wait for the hook's futures here, and not at the end of the backward pass.

        Raises:
            TypeError: The hook returned something else.
        """
        if self.buffer_hook is None:
            broadcast_state(self._group, self.modules_buffers, root)
            return
        with torch.no_grad():
            futures = self.buffer_hook.hook(self.buffer_hook.state, self.named_module_buffers)
        if futures is None:
            return
        futures = futures if isinstance(futures, (list, tuple)) else [futures]
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
        """Broadcast buffers, all of them if none are given: what a buffer hook calls.

        Collective: over the group.
        """
        broadcast_state(
            self._group, self.modules_buffers if bufs is None else bufs, authoritative_rank
        )

    def _distributed_broadcast_coalesced(
        self, tensors: Sequence[Tensor], buffer_size: int, authoritative_rank: int = 0
    ) -> None:
        broadcast_state(self._group, tensors, authoritative_rank)
