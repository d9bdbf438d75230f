"""Lock under which one thread of this process alone calls MPI while it takes part in an agreement.

A message of an agreement (ULFM) that one thread receives while another one starts the agreement, or
handles a death in it, is put off by Open MPI, which then writes pointers of its own over the
message's contents. What the processes agree on, and who has died, is arbitrary then: a process may
end with any status, or crash. So ``Iagree``, its tests and ``Shrink`` hold the lock, and so does
each call of the threads that call MPI all the time: the watchdog's, the store's, that of posted
receives, and those of an RPC that is left running when the training has ended. Nothing else is
locked while it is held. Without other threads in MPI it costs nothing.

Source: Open MPI 5.0, ompi/mca/coll/ftagree/coll_ftagree_earlyreturning.c: ``era_cb_fn`` copies the
message behind the header of an ``era_bounce_event_s``, whose last fields it sets afterwards.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

lock = threading.RLock()


def holding(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function that holds the lock in each call."""

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with lock:
            return function(*args, **kwargs)

    return call
