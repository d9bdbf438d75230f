"""Outlet: samples that this process sends to another program, to the readers that ask for them."""

from __future__ import annotations

import operator
from collections import deque
from typing import Any

import numpy as np
import torch

from mpidist.comm.coupling.link import Link
from mpidist.comm.coupling.messages import (
    DTYPES,
    LEAVES,
    MOST_DIMENSIONS,
    MOST_NUMBER,
    Form,
    Head,
    pack,
)
from mpidist.comm.memory import buffer
from mpidist.comm.mpi import rank_ranges
from mpidist.errors import GroupError


class Outlet:
    """Sends samples to the readers of another program, one after the other as they ask.

    Readers ask for as many samples as they keep in advance, so a sender that is faster than its
    readers waits for them, and a reader that comes late takes its first sample when it comes.

    One thread uses an outlet at a time. Made by ``Coupling.outlet``.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        # Readers and the samples that they have room for, in the order of the requests.
        self._asked: deque[tuple[int, int]] = deque()
        self._readers = set(link.partners)
        self._silent = set(link.partners)  # have never asked
        self._is_closed = False

    def put(self, *tensors: torch.Tensor | np.ndarray, label: int = 0, wait: bool = True) -> bool:
        """Send a sample to the reader that has waited longest.

        Blocks: until a reader asks, and has received the sample; the memory may then be changed.

        Args:
            tensors: Torch tensors or numpy arrays of any shape, one or more. Contiguous ones of the
                host are sent from their own memory, others from a copy.
            label: A number that comes with the sample, for example the simulation's step.
            wait: False: do not wait for a reader that asks.

        Returns:
            False if the sample was not sent: every reader has left, or, without ``wait``, none has
            room for it now.

        Raises:
            TypeError, ValueError: No tensor, or none that can be sent, or the label is no int64.
            CommTimeout: No reader has asked in time; or one has, and has not received the sample,
                whose memory must then not be changed.
            RankFailureError: A process of the other program has died (ULFM).
            GroupError: The outlet is closed.
        """
        if self._is_closed:
            raise GroupError(f"{self._link.where}: put on an outlet that is closed")
        if not tensors:
            raise ValueError(f"{self._link.where}: put needs a tensor")
        held = [_contiguous(self._link.where, one) for one in tensors]
        number = operator.index(label)
        if not -MOST_NUMBER - 1 <= number <= MOST_NUMBER:
            raise ValueError(f"{self._link.where}: put needs a label that is an int64; got {label}")
        numbers = pack(Head(number, tuple(Form(t.dtype, tuple(t.shape)) for t in held)))
        self._take_requests()
        if wait:
            self._link.until(
                self._may_go_on,
                "put",
                "no reader asked for a sample",
            )
        if not self._asked:
            return False
        reader, samples = self._asked.popleft()
        if samples > 1:
            self._asked.appendleft((reader, samples - 1))
        self._link.send(reader, numbers, parts(held), held)
        return True

    def close(self, timeout_s: float | None = -1.0) -> None:
        """End the samples: the readers' iterations end.

        Blocks: until every reader has received what was sent to it.

        Args:
            timeout_s: Longest wait; -1 for the coupling's.

        Raises:
            CommTimeout: A reader has not received it in time; the text names those that have opened
                no inlet.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._take_requests()
        for reader in self._readers:
            self._link.end(reader)
        ended, self._readers = self._readers, set()
        self._link.until(
            lambda: self._take_leaves(ended), "close", lambda: self._problem(ended), timeout_s
        )

    def _may_go_on(self) -> bool:
        self._take_requests()
        return bool(self._asked) or not self._readers

    def _take_requests(self) -> None:
        while (request := self._request()) is not None:
            reader, samples = request
            if samples != LEAVES:
                self._asked.append((reader, samples))
            elif reader in self._readers:
                self._readers.remove(reader)
                self._asked = deque(each for each in self._asked if each[0] != reader)
                self._link.end(reader)

    def _take_leaves(self, readers: set[int]) -> bool:
        while readers and (request := self._request()) is not None:
            if request[1] == LEAVES:
                readers.discard(request[0])
        return not readers

    def _request(self) -> tuple[int, int] | None:
        request = self._link.request()
        if request is not None:
            self._silent.discard(request[0])
        return request

    def _problem(self, readers: set[int]) -> str:
        """Return what ``close`` waits for: readers that have not come yet, or are still there."""
        silent = sorted(readers & self._silent)
        if silent:
            return f"{rank_ranges.named(silent)} opened no inlet"
        return "a reader did not leave"


def parts(tensors: list[torch.Tensor]) -> list[buffer.Buffer]:
    """Return the memory of contiguous tensors in messages of MPI's size."""
    return [
        buffer.byte_range(tensor, start, length)
        for tensor in tensors
        for start, length in buffer.pieces(tensor.nbytes)
    ]


def _contiguous(where: str, value: Any) -> torch.Tensor:
    """Return a tensor whose memory can be sent."""
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{where}: put sends no masks; give filled() of a masked array")
    if isinstance(value, np.ndarray):
        # Torch has no strides below zero, and warns of memory that must not be written.
        array = np.ascontiguousarray(value).reshape(value.shape)
        value = torch.from_numpy(array if array.flags.writeable else array.copy())
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{where}: put needs tensors or arrays; got {type(value).__name__}")
    tensor = value.detach()
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        raise TypeError(f"{where}: put needs dense tensors; got {tensor.layout} on {tensor.device}")
    if tensor.dtype not in DTYPES or tensor.dim() > MOST_DIMENSIONS:
        raise TypeError(
            f"{where}: put cannot send {tensor.dtype} of {tensor.dim()} dimensions; it sends "
            f"{', '.join(str(dtype).removeprefix('torch.') for dtype in DTYPES)} of at most "
            f"{MOST_DIMENSIONS}"
        )
    return tensor.resolve_conj().resolve_neg().cpu().contiguous()
