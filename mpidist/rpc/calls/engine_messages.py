"""One-way messages between the engines of distributed autograd; counted for quiescence."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

from mpidist.comm.transport.incoming import Incoming
from mpidist.errors import RankFailureError
from mpidist.rpc import message
from mpidist.rpc.calls.reader import Reader
from mpidist.rpc.calls.wire import Wire
from mpidist.rpc.message import Kind
from mpidist.rpc.threads import interceptor
from mpidist.rpc.threads.log import logger
from mpidist.rpc.threads.pool import Action, Task
from mpidist.rpc.values import codec
from mpidist.rpc.worker import Workers

KINDS = frozenset({Kind.GRADIENTS, Kind.REQUEST_GRADIENTS, Kind.AUTOGRAD_NOTICE})


class EngineMessages:
    """The engine's messages of one worker.

    Attributes:
        handled: The number of messages that have been handled. The messages that a handler sends
            are counted before the handler's own message.
    """

    def __init__(self, workers: Workers, wire: Wire, reader: Reader) -> None:
        self.handled = 0
        self._workers = workers
        self._wire = wire
        self._reader = reader
        self._lock = threading.Lock()  # for ``handled``

    def send(
        self, to: int, kind: int, obj: object, context: int | None = None, prefix: bytes = b""
    ) -> None:
        """Send a message to the engine of another worker.

        Args:
            to: The receiver's rank.
            kind: One of ``KINDS``.
            obj: The content.
            context: The context that records the tensors; 0 for none, None for the calling
                thread's.
            prefix: For gradients, the packed ``message.GRADIENTS``.

        Raises:
            RankFailureError: The worker has left.
            Exception: The message cannot be sent; nothing has been sent.
        """
        workers = self._workers
        if to in workers.left:
            raise RankFailureError(workers.loss_of(to), (workers.world_ranks[to],))
        if context is None:
            context = interceptor.current_context()
        content = codec.encode(obj, self._wire.data_only[to])
        self._wire.post_one_way(to, kind, prefix, content, context)

    def handle(self, incoming: Incoming) -> Action | None:
        """Pass a complete message to the engine, on the polling thread; return the rest to do.

        Gradients, whose decoding may run users' code, are decoded by the action.
        """
        engine = interceptor.engine
        action: Action | None = None
        if engine is None:
            logger.error(
                "%s dropped a message of kind %d: no autograd is in use",
                self._workers.me,
                incoming.kind,
            )
        elif incoming.kind == Kind.AUTOGRAD_NOTICE:
            try:
                obj = self._reader.decode(incoming, incoming.start, False)
                action = engine.handle_one_way(
                    incoming.source, incoming.kind, incoming.context, obj
                )
            except Exception:
                self._log(incoming.source)
        else:
            action = Task(partial(self._receive_gradients, engine, incoming))
        if action is None:
            self._count()
            return None
        return Task(partial(self._run, incoming.source, action.run), action.may_block)

    def _receive_gradients(self, engine: interceptor.Interceptor, incoming: Incoming) -> None:
        obj = self._decode(incoming)
        action = engine.handle_one_way(incoming.source, incoming.kind, incoming.context, obj)
        if action is not None:
            action.run()

    def _decode(self, incoming: Incoming) -> object:
        numbers = message.unpack_gradients(incoming.data, incoming.start, incoming.end)
        return (
            *numbers,
            self._reader.decode(incoming, incoming.start + message.GRADIENTS.size, False),
        )

    def _run(self, source: int, run: Callable[[], object]) -> None:
        try:
            run()
        except Exception:
            self._log(source)
        finally:
            self._count()

    def _count(self) -> None:
        with self._lock:
            self.handled += 1

    def _log(self, source: int) -> None:
        # A failed message must not end the polling thread. The engine itself reports errors of a
        # pass to that pass.
        logger.exception("%s: a one-way message of rank %d failed", self._workers.me, source)
