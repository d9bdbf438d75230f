"""Inlet: samples from another program, which a thread receives in advance."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import NamedTuple

import torch

from mpidist.comm.coupling.link import Link
from mpidist.comm.coupling.messages import LEAVES, unpack
from mpidist.comm.coupling.outlet import parts
from mpidist.comm.coupling.places import Places
from mpidist.comm.mpi import runtime
from mpidist.errors import CommTimeout, GroupError, MpidistError


class Sample(NamedTuple):
    """What one ``put`` has sent.

    Attributes:
        tensors: On the host, in the order of ``put``.
        label: The sender's number.
        source: The sender's rank in its program.
    """

    tensors: tuple[torch.Tensor, ...]
    label: int
    source: int


class Inlet:
    """Receives samples of another program; iterate over it, or call ``get``.

    A thread receives up to ``depth`` samples of each sender in advance. The memory of a sample is
    used again when none of its tensors is left.

    Made by ``Coupling.inlet``.
    """

    def __init__(self, link: Link, depth: int, timeout_s: float | None) -> None:
        self._link = link
        self._timeout_s = timeout_s
        self._samples: queue.SimpleQueue[Sample | BaseException | None] = queue.SimpleQueue()
        self._places = Places()
        self._senders = set(link.partners)
        # A request and the leave of one sender must not overtake each other.
        self._asking = threading.Lock()
        self._is_leaving = self._stops = False
        for sender in link.partners:
            link.ask(sender, depth)
        self._at_exit = _Stop(self)
        runtime.close_at_exit(self._at_exit)
        self._thread = threading.Thread(
            target=runtime.guard_thread(self._run), name="mpidist-inlet", daemon=True
        )
        self._thread.start()

    def get(self, timeout_s: float | None = -1.0) -> Sample | None:
        """Return the next sample, of whichever sender; None when all senders have ended.

        Blocks: until a sample is here.

        Args:
            timeout_s: Longest wait; -1 for the coupling's.

        Raises:
            CommTimeout: No sample in time.
            MpidistError: A message cannot be read, or MPI failed.
            GroupError: The inlet is closed.
        """
        if self._is_leaving:
            raise GroupError(f"{self._link.where}: get on an inlet that is closed")
        limit_s = self._timeout_s if timeout_s == -1.0 else timeout_s
        try:
            found = self._wait(limit_s)
        except queue.Empty:
            raise CommTimeout(
                f'{self._link.where}: get from "{self._link.program}": no sample within '
                f"{limit_s:g} s"
            ) from None
        if found is None or isinstance(found, BaseException):
            # For the next call, and for other threads that wait.
            self._samples.put(found)
            if found is None:
                return None
            raise found
        with self._asking:
            if found.source in self._senders:
                self._link.ask(found.source, 1)
        return found

    def __iter__(self) -> Iterator[Sample]:
        while (sample := self.get()) is not None:
            yield sample

    def close(self, timeout_s: float | None = -1.0) -> None:
        """Leave: the senders send this process no more.

        Blocks: until each sender has noticed it, at its next ``put`` or its ``close``.

        Args:
            timeout_s: Longest wait; -1 for the coupling's.

        Raises:
            CommTimeout: A sender has not noticed it in time.
        """
        if self._is_leaving:
            return
        with self._asking:
            self._is_leaving = True
            for sender in self._senders:
                self._link.ask(sender, LEAVES)
        limit_s = self._timeout_s if timeout_s == -1.0 else timeout_s
        with self._link.waiting("close"):
            self._thread.join(limit_s)
        if self._thread.is_alive():
            raise CommTimeout(
                f'{self._link.where}: close of the inlet from "{self._link.program}": a sender '
                f"did not notice it within {limit_s:g} s"
            )

    def _wait(self, limit_s: float | None) -> Sample | BaseException | None:
        try:
            return self._samples.get_nowait()
        except queue.Empty:
            with self._link.waiting("get"):
                return self._samples.get(timeout=limit_s)

    def _run(self) -> None:
        try:
            while self._senders and not self._stops:
                self._receive()
        except Exception as error:
            self._samples.put(error)
        else:
            self._samples.put(None)

    def _receive(self) -> None:
        link, found = self._link, None

        def has_come() -> bool:
            nonlocal found
            found = link.header()
            return found is not None or self._stops

        link.until(has_come, "get", "no header came", None, is_recorded=False)
        if found is None:
            return
        sender, numbers = found
        try:
            head = unpack(numbers)
        except ValueError as error:
            raise MpidistError(
                f'{link.where} got of process {sender} of "{link.program}" {error}'
            ) from None
        if head is None:
            with self._asking:
                self._senders.discard(sender)
                if not self._is_leaving:
                    link.ask(sender, LEAVES)
            return
        tensors = [self._places.tensor(form) for form in head.forms]
        if link.receive(sender, parts(tensors), lambda: self._stops) and not self._is_leaving:
            self._samples.put(Sample(tuple(tensors), head.label, sender))


class _Stop:
    """End of an inlet's thread before the end of MPI, without a word to the senders."""

    def __init__(self, inlet: Inlet) -> None:
        self._inlet = inlet

    def close(self, timeout_s: float) -> None:
        """End the thread."""
        self._inlet._stops = True
        self._inlet._thread.join(timeout_s)
