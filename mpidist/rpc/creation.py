"""Calls of ``remote``: the owner's answer completes a future, and carries no value."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from mpidist.comm.transport.incoming import Incoming
from mpidist.errors import CommTimeout
from mpidist.rpc.call import Call
from mpidist.rpc.message import Kind
from mpidist.rpc.pool import Action

_EXCEPTION = int(Kind.EXCEPTION)

# Guards the choice of the thread that decodes a creation's answer and completes its future.
_completing = threading.RLock()


class Creation(Call):
    """A call of ``remote``. Its answer reports whether the owner has made the value.

    Args:
        to: The owner's rank.
        what: See ``Call``.
        timeout_s: For the answer; 0 for none.
        error_of: Decodes the exception in an answer.
        on_end: Called once, on the polling thread, when the answer or an error is there.
        function: See ``Call``.
    """

    __slots__ = ("_error_of", "_future", "_on_end", "_open_future")

    def __init__(
        self,
        to: int,
        what: str | bytes,
        timeout_s: float,
        error_of: Callable[[Call], BaseException],
        on_end: Callable[[], None] | None,
        function: object = None,
    ) -> None:
        super().__init__(to, what, timeout_s, function)
        self._error_of = error_of
        self._on_end = on_end
        self._future: torch.futures.Future | None = None
        # The same future until a thread completes it, then None.
        self._open_future: torch.futures.Future | None = None

    may_block = True
    is_creation = True

    @property
    def is_lost(self) -> bool:
        """Return whether the owner has not answered in time: the value may or may not exist."""
        return isinstance(self.error, CommTimeout)

    def complete(self, incoming: Incoming) -> Action | None:
        """See ``Call``."""
        if incoming.kind == _EXCEPTION:
            self.incoming = incoming
        return self._end()

    def fail(self, error: BaseException) -> Action | None:
        """See ``Call``."""
        self.error = error
        return self._end()

    def _end(self) -> Action | None:
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end()
        self.finish()
        return self if self._future is not None else None

    def reason(self) -> BaseException | None:
        """Return why the creation has failed, once it is done; None if the value exists."""
        with _completing:
            if self.incoming is not None and self.error is None:
                try:
                    self.error = self._error_of(self)
                except Exception as error:
                    # An unreadable answer must not end this thread, which serves all calls.
                    self.error = error
                self.incoming = None
            return self.error

    def future(self) -> torch.futures.Future:
        """Return a future that completes when the owner has answered, with None or its error."""
        with _completing:
            if self._future is None:
                self._open_future = self._future = torch.futures.Future()
        if self.done:
            self.run()
        return self._future

    def run(self) -> None:
        """Complete the future, unless another thread does."""
        with _completing:
            future, self._open_future = self._open_future, None
            if future is None:
                return
            error = self.reason()
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)
