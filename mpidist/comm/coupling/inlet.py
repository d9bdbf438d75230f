"""Inlet: samples from another program, which a thread receives in advance."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import torch

from mpidist.comm.coupling.link import Link
from mpidist.comm.coupling.messages import unpack
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
        # Samples, and behind them the end (None) or an error, which stays; and a word for each to
        # the threads that wait. A thread takes a sample when nothing can keep it any more.
        self._samples: deque[Sample | BaseException | None] = deque()
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._places = Places()
        self._senders = set(link.partners)
        # A request and the leave of one sender must not overtake each other.
        self._asking = threading.Lock()
        self._is_leaving = self._stops = False
        for sender in link.partners:
            link.ask(sender, depth)
        link.at_exit = self._leave
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
            found = self._next(limit_s)
        except queue.Empty:
            raise CommTimeout(
                f'{self._link.where}: get from "{self._link.program}": no sample within '
                f"{limit_s:g} s"
            ) from None
        if isinstance(found, BaseException):
            raise found
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
        with self._asking:
            self._is_leaving = True
            for sender in self._link.partners:
                self._link.leave(sender)
        limit_s = self._timeout_s if timeout_s == -1.0 else timeout_s
        with self._link.waiting("close"):
            self._thread.join(limit_s)
        if self._thread.is_alive():
            raise CommTimeout(
                f'{self._link.where}: close of the inlet from "{self._link.program}": a sender '
                f"did not notice it within {limit_s:g} s"
            )

    def _next(self, limit_s: float | None) -> Sample | BaseException | None:
        """Take the next sample, or look at what stays.

        Raises:
            queue.Empty: None in time.
        """
        found, is_taken = None, False
        try:
            while not is_taken:
                limit_s = self._wait(limit_s)
                with self._asking:
                    if self._samples:
                        found = self._samples[0]
                        if not isinstance(found, Sample):
                            self._news.put(None)  # for other threads that wait
                            return found
                        if found.source in self._senders:
                            self._link.ask(found.source, 1)
                        # Without a call, as in ``link``.
                        del self._samples[0]
                        is_taken = True
        except BaseException:
            if is_taken:
                self._samples.appendleft(found)
            self._news.put(None)
            raise
        return found

    def _wait(self, limit_s: float | None) -> float | None:
        """Wait for news; return the rest of the time."""
        start = time.monotonic()
        try:
            self._news.get_nowait()
        except queue.Empty:
            with self._link.waiting("get"):
                self._news.get(timeout=limit_s)
        return None if limit_s is None else max(limit_s - (time.monotonic() - start), 0.0)

    def _add(self, found: Sample | BaseException | None) -> None:
        self._samples.append(found)
        self._news.put(None)

    def _run(self) -> None:
        try:
            while self._senders and not self._stops:
                self._receive()
        except Exception as error:
            self._add(error)
        else:
            self._add(None)

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
                link.leave(sender)
            return
        tensors = [self._places.tensor(form) for form in head.forms]
        is_complete = link.receive(sender, parts(tensors), tensors, lambda: self._stops)
        if is_complete and not self._is_leaving:
            self._add(Sample(tuple(tensors), head.label, sender))

    def _leave(self, timeout_s: float) -> None:
        """Leave, and end the thread, before the end of MPI."""
        try:
            with self._asking:
                for sender in self._link.partners:
                    self._link.leave(sender)
        finally:
            self._stops = True
            self._thread.join(timeout_s)
