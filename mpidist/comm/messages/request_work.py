"""``RequestWork``: the handle of a message, whose waiting thread calls MPI."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch.autograd import profiler as torch_profiler

from mpidist.comm.execution import profiling
from mpidist.comm.execution.group_state import GroupState
from mpidist.comm.execution.work import seconds
from mpidist.comm.memory.stream import Event
from mpidist.comm.messages.receive_poller import match_all
from mpidist.comm.mpi import backoff, exited_ranks
from mpidist.comm.mpi.library import MPI
from mpidist.comm.mpi.mpi_errors import is_over
from mpidist.comm.mpi.nonblocking import Request, keep
from mpidist.dynamo import untraced
from mpidist.errors import CommTimeout, MpidistError
from mpidist.future import Future

# A wait tests without a pause first, because most messages on a node arrive within this time; then
# it yields its core between tests, and later sleeps.
_SPIN_S = 200e-6
_YIELD_S = 5e-3
# Before that, tests of a message that the watchdog need not know of: both ranks of an exchange post
# and send at the same time.
_TESTS = 8

# Requests whose handles were dropped before the end, and the memory that MPI works on.
orphans: deque[tuple[Request, object]] = deque()
# Empty while a thread releases them, as in ``RequestWork``.
_turn_to_release = [None]


def release_orphans() -> None:
    """Free the memory of messages that have ended since their handles were dropped."""
    if not orphans:
        return
    try:
        del _turn_to_release[0]
    except IndexError:
        return  # another thread does, or one that a handler of a signal has interrupted
    try:
        # A request stays in the queue while it is tested: an exception may leave the test.
        for _ in range(len(orphans)):
            if is_over(orphans[0][0]):
                orphans.popleft()
            else:
                orphans.rotate(-1)
    finally:
        _turn_to_release.append(None)


def leave(request: Request | None, memory: object) -> None:
    """Keep the memory of a message that an exception has left until its end.

    Args:
        request: None if the exception came between MPI's call and its result: the memory is kept as
            long as the process lives.
    """
    if request is None:
        keep([memory])
    else:
        orphans.append((request, memory))


@untraced
class RequestWork:
    """Handle of a message; the thread that waits for it calls MPI.

    If the handle is dropped before the end, the message stays under way and its memory alive. One
    thread at a time calls MPI for it: MPI frees a request that it ends. Errors are MPI's and the
    library's; an exception of a signal's handler leaves the handle as it is.

    Args:
        state: The state of the message's group.
        operation: The name of the call.
        tensor: The tensor; None for a message that is none.
        request: The request of MPI, or one with its methods; None until there is one.
        peer: The other rank in the group; None for any.
        kept: Memory that MPI works on, kept alive as long as the request.
        entry: Number of the message's entry in the recorder; 0 for none.
    """

    # What is needed for an error or a long wait alone is asked of the group, because most messages
    # have ended before: each attribute of a handle costs a message 30 ns.
    __slots__ = (
        "_done", "_entry", "_error", "_events", "_future", "_kept", "_peer", "_request",
        "_source", "_state", "_turn",
        "operation", "tensor",
    )  # fmt: skip

    def __init__(
        self,
        state: GroupState,
        operation: str,
        tensor: torch.Tensor | None,
        request: Request | None,
        peer: int | None,
        kept: object = None,
        entry: int = 0,
    ) -> None:
        self._state = state
        self.operation = operation
        self.tensor: Any = tensor
        self._request: Any = request
        self._peer = peer
        self._kept = kept
        self._entry = entry
        # On a device the data is complete behind the events, and this is a list.
        self._events: Sequence[Event] = ()
        self._done = False
        self._error: BaseException | None = None
        self._source = -1
        self._future: Future[Sequence[torch.Tensor]] | None = None
        # Empty while a thread calls MPI for the message. To delete the item is one step for other
        # threads, and no call, behind which a handler of a signal may raise.
        self._turn = [None]

    def __del__(self) -> None:
        try:
            if self._done:
                return
        except AttributeError:  # an exception has left __init__; the caller has the request
            return
        if self._entry:
            self._state.recorder.end(self._entry)
        if self._request is not None:
            orphans.append((self._request, (self._kept, self.tensor)))

    @property
    def tensors(self) -> Sequence[Any]:
        """Return the tensor, as the handles of collectives return theirs."""
        return (self.tensor,)

    @property
    def where(self) -> str:
        """Return the beginning of an error's text."""
        return self._state.where(self.operation)

    def is_completed(self) -> bool:
        """Test once whether the message has ended."""
        return self._done or self._test()

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        """Wait for the end, at most ``timeout`` (the group's by default).

        Blocks: the calling thread, which calls MPI meanwhile. For a send: until the tensor may be
        changed.

        Raises:
            CommTimeout: Not ended in time. The message is still under way; ``wait`` may be called
                again.
            RankFailureError: The peer died, or its program has ended.
        """
        if not (self._done or self._test()):
            self._wait_longer(timeout)
        if self._error is not None:
            raise self._error
        for event in self._events:
            event.block_current_stream()
        return True

    def is_success(self) -> bool:
        """Test once whether the message has ended without an error."""
        return (self._done or self._test()) and self._error is None

    def cancel(self) -> None:
        """Withdraw a receive that is not matched; its tensor may be used again.

        No effect on a send, which MPI cannot withdraw safely (MPI-4.1 deprecates it).
        """

    def exception(self) -> BaseException | None:
        """Return the error of an ended message, else None."""
        return self._error

    def result(self) -> Sequence[torch.Tensor]:
        """Return the tensors of an ended operation."""
        self.wait()
        return self.tensors

    def get_future(self) -> Future[Sequence[torch.Tensor]]:
        """Return a future of the tensors, complete when ``wait`` returns."""
        self._wait_turn()
        try:
            if self._future is None:
                self._future = Future(self._events)
                if self._done:
                    self._complete_future()
            return self._future
        finally:
            self._turn.append(None)

    def source_rank(self) -> int:
        """Return the sender's rank in the group once a receive has ended, else -1."""
        return self._source if self._done else -1

    def _test(self) -> bool:
        try:
            del self._turn[0]
        except IndexError:
            return self._done
        try:
            if self._done:
                return True
            if not self._request.Test():
                return False
            self._store()
            self._done = True
            if self._entry:
                if self._peer is None:
                    self._name_sender()
                self._state.recorder.end(self._entry)
        except (MPI.Exception, MpidistError) as error:
            self._fail(error)
        finally:
            has_future = self._future is not None
            self._turn.append(None)
        if has_future:
            self._complete_future()
        return True

    def _wait_turn(self) -> None:
        """Wait until no other thread calls MPI for the message, and keep others from it."""
        while True:
            try:
                del self._turn[0]
                return
            except IndexError:
                os.sched_yield()

    def _name_sender(self) -> None:
        state = self._state
        state.recorder.name_peer(self._entry, state.world_ranks[self._source])

    def _fail(self, error: Exception) -> None:
        self._error = self._state.message_error(error, self.operation)
        self._done = True
        if self._entry:
            self._state.recorder.fail(self._entry)

    def _store(self) -> None:
        """Store the data of a message that has ended."""

    def _complete_future(self) -> None:
        if self._future is not None and not self._future.done():
            if self._error is not None:
                self._future.set_exception(self._error)
            else:
                self._future.set_result(self.tensors)

    def _wait_longer(self, timeout: float | timedelta | None) -> None:
        for _ in range(_TESTS):
            if self._test():
                return
        poll = (
            profiling.waiting(self._poll, self.operation)
            if torch_profiler._is_profiler_enabled
            else self._poll
        )
        poll(seconds(timeout) or self._state.timeout_s)

    def _poll(self, limit_s: float | None) -> None:
        state = self._state
        peers = state.peers_of(self._peer)
        check = partial(self._check, peers)
        state.journal.enter_wait(id(self), self.operation, self.tensor, peers)
        try:
            if not backoff.until(self._advance, check, limit_s, _SPIN_S, _YIELD_S):
                raise CommTimeout(f"{self.where} did not end within {limit_s:g} s")
        finally:
            state.journal.leave_wait(id(self))

    def _advance(self) -> bool:
        if self._done or self._test():
            return True
        # The message may depend on another receive of this rank.
        match_all()
        return False

    def _check(self, peers: Sequence[int]) -> None:
        if exited_ranks.all_ended(peers) and not self._test():
            raise exited_ranks.failure(self.where, peers)


class Series:
    """Requests of one message past MPI's count limit, or of one object, as one request.

    Attributes:
        requests: Those that have not ended.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests: list[Any] = list(requests)

    def Test(self, status: MPI.Status | None = None) -> bool:
        """See MPI_Test."""
        while self.requests and self.requests[0].Test(status):
            self.requests.pop(0)
        return not self.requests

    def Wait(self, status: MPI.Status | None = None) -> None:
        """See MPI_Wait."""
        for request in self.requests:
            request.Wait()

    def Cancel(self) -> None:
        """See MPI_Cancel."""
        for request in self.requests:
            request.Cancel()
