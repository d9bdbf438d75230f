"""From tensors to memory that MPI may touch: address, count and datatype; contiguous host copies; large counts; streams.

This is the one place that decides how a tensor reaches MPI. A contiguous CPU tensor goes in by address. Anything else (strided,
expanded, on a CUDA device) is executed on a host copy, and outputs are written back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from mpidist.comm.library import MPI

# MPI's classic interface counts in a C int. Half of it keeps every sum of two counts inside, too.
MAX_COUNT = 1 << 30


@functools.cache
def datatypes() -> dict[torch.dtype, Any]:
    """Return MPI's datatype of each dtype whose arithmetic MPI knows; others move as bytes or are summed by ourselves."""
    return {
        torch.bool: MPI.C_BOOL,
        torch.uint8: MPI.UINT8_T,
        torch.uint16: MPI.UINT16_T,
        torch.uint32: MPI.UINT32_T,
        torch.uint64: MPI.UINT64_T,
        torch.int8: MPI.INT8_T,
        torch.int16: MPI.INT16_T,
        torch.int32: MPI.INT32_T,
        torch.int64: MPI.INT64_T,
        torch.float32: MPI.FLOAT,
        torch.float64: MPI.DOUBLE,
        torch.complex64: MPI.C_FLOAT_COMPLEX,
        torch.complex128: MPI.C_DOUBLE_COMPLEX,
    }


def pieces(count: int, limit: int | None = None) -> Iterator[tuple[int, int]]:
    """Cut ``count`` items into runs that MPI can count.

    Args:
        count: Items, ≥ 0; may be past 2³¹.
        limit: Longest run; ``MAX_COUNT`` if None.

    Yields:
        (start, length) of each run; one empty run for ``count`` 0, so that every rank enters MPI the same number of times.
    """
    limit = MAX_COUNT if limit is None else limit
    if count <= limit:
        yield 0, count
        return
    for start in range(0, count, limit):
        yield start, min(limit, count - start)


def memory(address: int, nbytes: int) -> Any:
    """Return ``nbytes`` of memory at ``address`` as MPI's buffer; nobody's lifetime is extended."""
    return MPI.buffer.fromaddress(address, nbytes)


def as_bytes(tensor: torch.Tensor) -> tuple[Any, int, Any]:
    """Describe a contiguous host tensor of at most ``MAX_COUNT`` bytes."""
    nbytes = tensor.nbytes
    return (MPI.buffer.fromaddress(tensor.data_ptr(), nbytes), nbytes, MPI.BYTE)


def byte_range(tensor: torch.Tensor, start: int, nbytes: int) -> tuple[Any, int, Any]:
    """Describe ``nbytes`` of a contiguous host tensor from byte ``start`` on."""
    return (MPI.buffer.fromaddress(tensor.data_ptr() + start, nbytes), nbytes, MPI.BYTE)


def elements(tensor: torch.Tensor, start: int, count: int, datatype: Any) -> tuple[Any, int, Any]:
    """Describe ``count`` elements of a contiguous host tensor from element ``start`` on."""
    size = tensor.element_size()
    return (MPI.buffer.fromaddress(tensor.data_ptr() + start * size, count * size), count, datatype)


def is_direct(tensor: torch.Tensor) -> bool:
    """Say whether MPI can work on the tensor's own memory."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


class HostCopies:
    """Host twins of the operands of one operation.

    Made by the thread that issues the operation, so that the order against the caller's stream is known; used by the thread that
    executes it: ``load``, the operation, ``store``.
    """

    def __init__(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        self._inputs = inputs
        self._outputs = outputs
        self._twins: dict[int, torch.Tensor] = {}
        devices = {t.device for t in (*inputs, *outputs) if t.is_cuda}
        self._ready = {device: _record_event(device) for device in devices}
        self._streams = {device: _copy_stream(device) for device in devices}

    def load(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return contiguous host tensors in the place of inputs and outputs; inputs hold their data.

        Blocks: until the work that produces a CUDA input has ended on the stream that was current when the operation was issued.
        """
        for device, stream in self._streams.items():
            stream.wait_event(self._ready[device])
        inputs = [self._twin(t, filled=True) for t in self._inputs]
        outputs = [self._twin(t, filled=False) for t in self._outputs]
        for stream in self._streams.values():
            stream.synchronize()
        return inputs, outputs

    def store(self) -> list[Any]:
        """Write the outputs back; return the CUDA events after which they are on the device."""
        for tensor in self._outputs:
            twin = self._twins[id(tensor)]
            if twin is tensor:
                continue
            if tensor.is_cuda:
                stream = self._streams[tensor.device]
                with torch.cuda.stream(stream):
                    _overwrite(tensor, twin)
                    tensor.record_stream(stream)
            else:
                _overwrite(tensor, twin)
        events = []
        for stream in self._streams.values():
            events.append(stream.record_event())
        return events

    def _twin(self, tensor: torch.Tensor, filled: bool) -> torch.Tensor:
        twin = self._twins.get(id(tensor))
        if twin is not None:
            return twin
        if is_direct(tensor):
            twin = tensor
        elif tensor.is_cuda:
            twin = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            if filled:
                stream = self._streams[tensor.device]
                with torch.cuda.stream(stream):
                    twin.copy_(tensor.detach(), non_blocking=True)
                    tensor.record_stream(stream)
        elif filled:
            twin = tensor.detach().resolve_conj().resolve_neg().contiguous()
        else:
            twin = torch.empty(tensor.shape, dtype=tensor.dtype)
        self._twins[id(tensor)] = twin
        return twin


def on_host(execute: Callable[..., None], copies: HostCopies, events: list[Any]) -> Callable[..., None]:
    """Wrap an executor so that it works on host twins; ``events`` receives what the caller's stream has to wait for."""

    def run(comm: Any, inputs: Any, outputs: Any, *args: Any) -> None:
        del inputs, outputs
        execute(comm, *copies.load(), *args)
        events.extend(copies.store())

    return run


def _overwrite(tensor: torch.Tensor, values: torch.Tensor) -> None:
    # Several elements of an expanded tensor are one in memory: write it once.
    target, source = tensor.detach(), values
    for dim, (size, stride) in enumerate(zip(target.shape, target.stride(), strict=True)):
        if stride == 0 and size > 1:
            target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    target.copy_(source, non_blocking=tensor.is_cuda)


def _record_event(device: torch.device) -> Any:
    return torch.cuda.current_stream(device).record_event()


@functools.cache
def _copy_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)
