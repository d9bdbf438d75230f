"""Host copies of tensors whose memory MPI cannot, or may not, be given: strided ones, and those on a device.

What is copied from a device at once is pinned, which torch's allocator keeps for the rest of the
process, in powers of two. So a long operation's copies are ordinary memory, and the data passes
through a few pinned chunks (``staging``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from mpidist.comm.algorithms import staging
from mpidist.comm.memory import buffer
from mpidist.comm.memory.buffer_pool import BufferPool
from mpidist.comm.memory.fence import StreamFence
from mpidist.comm.mpi import autograd_mode

# of one operation; beyond, a chunk's two copies cost less than what stays pinned
PINNED_BYTES = 32 << 20

_memory = BufferPool()  # fresh memory of this length costs more in page faults than the copy


class HostCopies:
    """Host twins of the operands of one operation: ``load``, the operation, ``store``.

    Args:
        fence: Of operands on a device.
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
        self._twins: dict[int, torch.Tensor] = {}
        # Of the host's own tensors, whose copies are never pinned, nobody asks.
        self._is_pinned = (
            fence is not None
            and sum({id(t): t.nbytes for t in (*inputs, *outputs)}.values()) <= PINNED_BYTES
        )

    def load(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return contiguous host tensors in the place of inputs and outputs; inputs hold their data.

        Blocks: until the work that produces an input on a device has ended on the stream that was
        current when the operation was issued.
        """
        inputs = [self._twin(t, filled=True) for t in self._inputs]
        outputs = [self._twin(t, filled=False) for t in self._outputs]
        if self._fence is not None and inputs:
            self._fence.synchronize()
        return inputs, outputs

    def store(self) -> None:
        """Write the outputs back; on a device in the order of its ``up``."""
        for tensor in self._outputs:
            twin = self._twins[id(tensor)]
            if twin is tensor:
                continue
            if self._fence is None:
                buffer.overwrite(tensor, twin)
            elif self._is_pinned:
                self._fence.device.up.do(partial(buffer.overwrite, tensor, twin))
            else:
                _bring_up(self._fence, tensor, twin)

    def _twin(self, tensor: torch.Tensor, filled: bool) -> torch.Tensor:
        twin = self._twins.get(id(tensor))
        if twin is not None:
            return twin
        if self._fence is not None:
            twin = self._twin_of_device(self._fence, tensor, filled)
        elif buffer.is_direct(tensor):
            twin = tensor
        elif filled:
            twin = tensor.detach().resolve_conj().resolve_neg().contiguous()
        else:
            twin = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        self._twins[id(tensor)] = twin
        return twin

    def _twin_of_device(
        self, fence: StreamFence, tensor: torch.Tensor, filled: bool
    ) -> torch.Tensor:
        if self._is_pinned or not tensor.numel():
            twin = fence.device.staging(tensor.numel(), tensor.dtype).view(tensor.shape)
            if filled:
                fence.device.down.do(partial(_copy_plain, twin, tensor.detach()))
            return twin
        twin = torch.frombuffer(_memory.acquire(tensor.nbytes), dtype=tensor.dtype).view(
            tensor.shape
        )
        if filled:
            _bring_down(fence, twin, tensor.detach())
        return twin


def on_host(execute: Callable[..., None], fence: StreamFence | None = None) -> Callable[..., None]:
    """Wrap an executor so that it works on host twins."""

    def run(comm: Any, inputs: Any, outputs: Any, *args: Any) -> None:
        copies = HostCopies(inputs, outputs, fence)
        execute(comm, *copies.load(), *args)
        copies.store()

    return run


def _copy_plain(twin: torch.Tensor, tensor: torch.Tensor) -> None:
    # Conjugated on the device: torch would do it to the host's copy at once, before the data has
    # come.
    twin.copy_(tensor.resolve_conj().resolve_neg(), non_blocking=True)


def _bring_down(fence: StreamFence, twin: torch.Tensor, tensor: torch.Tensor) -> None:
    flat = _flat(fence, tensor)
    if flat.data_ptr() != tensor.data_ptr():
        fence.device.down.do(lambda: flat.view(tensor.shape).copy_(tensor))
    part_for = _parts(twin)
    staging.through_host(fence, flat, lambda chunk: part_for(chunk).copy_(chunk), writes=False)


def _bring_up(fence: StreamFence, tensor: torch.Tensor, twin: torch.Tensor) -> None:
    flat = _flat(fence, tensor.detach())
    part_for = _parts(twin)
    with autograd_mode.writing((flat,)):
        staging.through_host(fence, flat, lambda chunk: chunk.copy_(part_for(chunk)), reads=False)
    if flat.data_ptr() != tensor.data_ptr():
        # On the stream that the copy's memory was made for.
        fence.device.down.wait(fence.device.up.record())
        fence.device.down.do(lambda: buffer.overwrite(tensor, flat.view(tensor.shape)))


def _flat(fence: StreamFence, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's own memory on the device, or as much, if its elements do not lie there in their order."""
    return (
        tensor.view(-1)
        if buffer.is_plain(tensor)
        else fence.device.empty(tensor.numel(), tensor.dtype)
    )


def _parts(twin: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that returns a twin's parts one behind the other, each as long as the chunk that it is called with."""
    flat, start = twin.view(-1), 0

    def part_for(chunk: torch.Tensor) -> torch.Tensor:
        nonlocal start
        start += chunk.numel()
        return flat[start - chunk.numel() : start]

    return part_for
