"""Outlet: samples that this process sends to another program, to the readers that ask for them."""

from __future__ import annotations

import operator
from collections import deque
from typing import Any

import numpy as np
import torch

from mpidist.comm.coupling.link import Link, Transfer
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
        self._asked: deque[list[int]] = deque()
        self._readers = set(link.partners)  # have not left
        self._silent = set(link.partners)  # have never asked
        self._is_closed = False
        link.at_exit = self.close

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
            CommTimeout: No reader has asked in time; or one has, and has not received the sample.
                It will, as after any other exception that leaves the wait (of a handler of a
                signal): its memory is kept and must not be changed.
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
        if wait:
            self._link.until(
                lambda: self._is_asked() or not self._readers,
                "put",
                "no reader asked for a sample",
            )
        if not self._is_asked():
            return False
        turn, sample = self._asked[0], Transfer(held)
        try:
            self._link.send(turn[0], numbers, parts(held), sample)
        finally:
            # Without a call, see ``link``: a sample that has been begun is one that was asked for.
            if sample.requests:
                turn[1] -= 1
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
        self._is_closed = True
        for reader in self._link.partners:
            self._link.end(reader)
        self._link.until(self._have_left, "close", self._problem, timeout_s)

    def _is_asked(self) -> bool:
        self._take_requests()
        while self._asked and not self._asked[0][1]:
            self._asked.popleft()
        return bool(self._asked)

    def _have_left(self) -> bool:
        self._take_requests()
        return not self._readers

    def _take_requests(self) -> None:
        link = self._link
        while (request := link.request()) is not None:
            reader, samples = request
            self._silent.discard(reader)
            if samples == LEAVES:
                link.end(reader)
                self._readers.discard(reader)
                for turn in self._asked:
                    turn[1] *= turn[0] != reader
                link.unserved = None
            else:
                # Without a call, see ``link``.
                self._asked += ([reader, samples],)
                link.unserved = None

    def _problem(self) -> str:
        """Return what ``close`` waits for: readers that have not come yet, or are still there."""
        silent = sorted(self._readers & self._silent)
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
        # Torch refuses strides below zero and those that are no multiple of an element, which numpy
        # calls contiguous in an axis of one element; and it warns of memory that must not be
        # written.
        array = np.ascontiguousarray(value).reshape(value.shape)
        is_odd = any(one < 0 or one % array.itemsize for one in array.strides)
        value = torch.from_numpy(array.copy() if is_odd or not array.flags.writeable else array)
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
