"""A request that waits for its answer, and the future that ``rpc_async`` returns."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from mpidist.errors import CommTimeout


class Call:
    """One request under way.

    Attributes:
        sequence: Its number on this worker.
        to: The callee's rank.
        what: For messages.
        deadline: When it times out (``time.monotonic``); infinite for no timeout.
        arrival: The answer, not decoded.
        error: What went wrong before an answer came.
        done: An answer or an error is there; of a call with a future, the future is complete.
        future: Of an asynchronous call.
        settle: Called in the polling thread with the call in place of completing anything; must not block.
    """

    __slots__ = ("arrival", "deadline", "done", "error", "future", "latch", "sequence", "settle", "timeout_s", "to", "what")

    def __init__(self, to: int, what: str, timeout_s: float) -> None:
        self.sequence = -1
        self.to = to
        self.what = what
        self.timeout_s = timeout_s
        self.deadline = time.monotonic() + timeout_s if timeout_s > 0 else float("inf")
        self.arrival: Any = None
        self.error: BaseException | None = None
        self.done = False
        self.future: RpcFuture | None = None
        self.latch: threading.Lock | None = None
        self.settle: Callable[[Call], None] | None = None

    def finish(self) -> None:
        """Note that it is done, and wake who waits for it."""
        self.done = True
        latch = self.latch
        if latch is not None:
            latch.release()

    def park(self, timeout_s: float) -> None:
        """Sleep until it is done, at most ``timeout_s`` seconds; one thread at a time per latch."""
        latch = threading.Lock()
        latch.acquire()
        before, self.latch = self.latch, latch
        if not self.done:
            latch.acquire(timeout=min(timeout_s, threading.TIMEOUT_MAX))
        if before is not None and self.done:
            before.release()  # two threads wait for one call: the later passes it on

    def timed_out(self) -> CommTimeout:
        """Return the error of a call that has had no answer in time."""
        return CommTimeout(
            f"RPC ran for more than set timeout ({self.timeout_s * 1e3:.0f} ms) and will now be marked with an error: "
            f"{self.what}; pass timeout= (0 for none), or set rpc_timeout of the options"
        )


class RpcFuture(torch.futures.Future):
    """A ``torch.futures.Future`` whose waiting thread looks for the answer by itself."""

    def __init__(self, wait_for: Callable[[Call, float], None], call: Call, devices: list[Any] | None = None) -> None:
        super().__init__(devices=devices)
        self.has_callbacks = False
        self._wait_for = wait_for
        self._call = call

    def wait(self) -> Any:
        """Return the call's result, or raise what it raised.

        Blocks: until the answer is there, at most the call's timeout.
        """
        # Not whether the call is done: within a callback the future is complete, and the call not yet.
        if not self.done():
            self._wait_for(self._call, self._call.deadline)
        return super().wait()

    def then(self, callback: Callable[[Any], Any]) -> Any:
        """See ``torch.futures.Future.then``; the callback runs where it may block."""
        self.has_callbacks = True
        return super().then(callback)

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """See ``torch.futures.Future.add_done_callback``."""
        self.has_callbacks = True
        super().add_done_callback(callback)
