"""Fault injection at the transport: random delays of all messages of a process."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from unittest import mock

from mpidist.comm.transport.transport import Transport

_send = Transport.send


@contextlib.contextmanager
def delayed(seed: int) -> Iterator[None]:
    """Delay each message by a random time; only messages of one pair of ranks keep their order."""
    rng, lock, end = random.Random(seed), threading.Lock(), threading.Event()
    queues: defaultdict[int, deque] = defaultdict(deque)

    def late(self, to, *args, **kwargs):
        with lock:
            if end.is_set() and not queues[to]:
                _send(self, to, *args, **kwargs)  # delivery has ended
            else:
                queues[to].append((self, to, args, kwargs))

    def deliver():
        while True:
            time.sleep(rng.choice([0.0, 0.0, 2e-4, 1e-3]))
            with lock:
                busy = [to for to, queue in queues.items() if queue]
                if end.is_set() and not busy:
                    return
            for to in rng.sample(busy, rng.randint(0, len(busy))):
                with lock:
                    transport, to, args, kwargs = queues[to].popleft()
                    _send(transport, to, *args, **kwargs)

    thread = threading.Thread(target=deliver, name="network", daemon=True)
    with mock.patch.object(Transport, "send", late):
        thread.start()
        try:
            yield
        finally:
            end.set()
            thread.join()
