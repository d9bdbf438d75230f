"""Host copies of tensors whose memory MPI cannot use: strided tensors, and device tensors.

Copies of short operations on device tensors are pinned memory, which torch's allocator keeps for
the rest of the process, in powers of two. Copies of long operations are ordinary memory, and the
data passes through a few pinned chunks (``staging``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from mpidist.comm.algorithms import staging
from mpidist.comm.memory import buffer
from mpidist.comm.memory.buffer_pool import BufferPool
from mpidist.comm.memory.fence import StreamFence
from mpidist.comm.mpi import autograd_mode
from mpidist.comm.mpi.communicator import Communicator

# Limit for one operation. Above it, two copies of each chunk cost less than memory that stays
# pinned.
PINNED_BYTES = 32 << 20

# Fresh memory of this length costs more in page faults than the copy.
_pool = BufferPool()


class HostCopies:
    """Host copies of the operands of one operation: ``load``, the operation, ``store``.

    Args:
        inputs: The tensors that the operation reads.
        outputs: The tensors that it writes.
        fence: The fence of operands on a device; None for host tensors.
    """

    def __init__(
        self,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        fence: StreamFence | None = None,
    ) -> None:
        self._inputs = inputs
        self._outputs = outputs
        self._fence = fence
        self._copies: dict[int, torch.Tensor] = {}
        # Copies of host tensors are never pinned.
        self._is_pinned = (
            fence is not None
            and sum({id(t): t.nbytes for t in (*inputs, *outputs)}.values()) <= PINNED_BYTES
        )

    def load(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return contiguous host tensors for inputs and outputs; those of inputs hold the data.

        Blocks: until the work that produces a device input is complete on the stream that was
        current when the operation was issued.
        """
        inputs = [self._copy(t, filled=True) for t in self._inputs]
        outputs = [self._copy(t, filled=False) for t in self._outputs]
        if self._fence is not None and inputs:
            self._fence.synchronize()
        return inputs, outputs

    def store(self) -> None:
        """Write the outputs back; device outputs are complete in the order of the stream ``up``."""
        for tensor in self._outputs:
            copy = self._copies[id(tensor)]
            if copy is tensor:
                continue
            if self._fence is None:
                buffer.overwrite(tensor, copy)
            elif self._is_pinned:
                self._fence.device.up.do(partial(buffer.overwrite, tensor, copy))
            else:
                _bring_up(self._fence, tensor, copy)

    def _copy(self, tensor: torch.Tensor, filled: bool) -> torch.Tensor:
        copy = self._copies.get(id(tensor))
        if copy is not None:
            return copy
        if self._fence is not None:
            copy = self._copy_of_device(self._fence, tensor, filled)
        elif buffer.is_direct(tensor):
            copy = tensor
        elif filled:
            copy = tensor.detach().resolve_conj().resolve_neg().contiguous()
        else:
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        self._copies[id(tensor)] = copy
        return copy

    def _copy_of_device(
        self, fence: StreamFence, tensor: torch.Tensor, filled: bool
    ) -> torch.Tensor:
        if self._is_pinned or not tensor.numel():
            copy = fence.device.staging(tensor.numel(), tensor.dtype).view(tensor.shape)
            if filled:
                fence.device.down.do(partial(_copy_plain, copy, tensor.detach()))
            return copy
        copy = torch.frombuffer(_pool.acquire(tensor.nbytes), dtype=tensor.dtype).view(tensor.shape)
        if filled:
            _bring_down(fence, copy, tensor.detach())
        return copy


def on_host(execute: Callable[..., None], fence: StreamFence | None = None) -> Callable[..., None]:
    """Return an executor that runs ``execute`` on host copies of its operands."""

    def run(
        comm: Communicator,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        *args: object,
    ) -> None:
        copies = HostCopies(inputs, outputs, fence)
        execute(comm, *copies.load(), *args)
        copies.store()

    return run


def _copy_plain(copy: torch.Tensor, tensor: torch.Tensor) -> None:
    # Resolved on the device: on the host copy torch would conjugate at once, before the data has
    # arrived.
    copy.copy_(tensor.resolve_conj().resolve_neg(), non_blocking=True)


def flattened(fence: StreamFence, tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a device tensor as a flat one: its memory, or a copy on ``down``."""
    flat = _flat(fence, tensor)
    if flat.data_ptr() != tensor.data_ptr():
        fence.device.down.do(lambda: flat.view(tensor.shape).copy_(tensor))
    return flat


def _bring_down(fence: StreamFence, copy: torch.Tensor, tensor: torch.Tensor) -> None:
    flat = flattened(fence, tensor)
    part_for = _parts(copy)
    staging.through_host(fence, flat, lambda chunk: part_for(chunk).copy_(chunk), writes=False)


def _bring_up(fence: StreamFence, tensor: torch.Tensor, copy: torch.Tensor) -> None:
    flat = _flat(fence, tensor.detach())
    part_for = _parts(copy)
    with autograd_mode.writing((flat,)):
        staging.through_host(fence, flat, lambda chunk: chunk.copy_(part_for(chunk)), reads=False)
    if flat.data_ptr() != tensor.data_ptr():
        # ``flat`` was allocated for use on ``down``.
        fence.device.down.wait(fence.device.up.record())
        fence.device.down.do(lambda: buffer.overwrite(tensor, flat.view(tensor.shape)))


def _flat(fence: StreamFence, tensor: torch.Tensor) -> torch.Tensor:
    """Return a flat device tensor: the tensor's memory if it is contiguous, else new memory."""
    return (
        tensor.view(-1)
        if buffer.is_plain(tensor)
        else fence.device.empty(tensor.numel(), tensor.dtype)
    )


def _parts(copy: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that returns successive parts of a host copy, as long as its argument."""
    flat, start = copy.view(-1), 0

    def part_for(chunk: torch.Tensor) -> torch.Tensor:
        nonlocal start
        start += chunk.numel()
        return flat[start - chunk.numel() : start]

    return part_for
