"""Communicator that counts the calls of the library: collectives, new communicators, messages."""

from __future__ import annotations

import collections
import threading
from typing import Any

_COLLECTIVES = (
    "Allreduce", "allreduce", "Allgather", "allgather", "Allgatherv", "Bcast", "bcast", "Barrier",
    "Gather", "gather", "Scatter", "scatter", "Alltoall", "alltoall", "Reduce",
    "Reduce_scatter_block", "Iallreduce", "Ibarrier", "Iallgather", "Ibcast",
)  # fmt: skip


_MESSAGES = ("Send", "Isend", "Ssend", "Issend", "send", "isend", "Sendrecv", "sendrecv")


_MAKERS = ("Dup", "Split", "Split_type", "Create_group")


def counted(comm: Any, counts: collections.Counter[str]) -> Any:
    """Return a communicator like ``comm`` that counts collectives, new communicators, and sends.

    Communicators derived from it count, too.
    """
    base = type(comm)
    lock = threading.Lock()

    def count(kind: str, name: str) -> None:
        with lock:
            counts[f"{kind} {name}"] += 1

    def counting(kind: str, name: str) -> Any:
        call = getattr(base, name)

        def method(self: Any, *args: Any, **options: Any) -> Any:
            count(kind, name)
            result = call(self, *args, **options)
            return kind_of(result) if kind == "maker" and result else result

        return method

    def idup(self: Any) -> Any:
        count("maker", "Idup")
        result, request = base.Idup(self)
        # The handle can be copied after the request has completed.
        request.Wait()
        return kind_of(result), request

    methods = {name: counting("collective", name) for name in _COLLECTIVES if hasattr(base, name)}
    methods |= {name: counting("message", name) for name in _MESSAGES} | {
        name: counting("maker", name) for name in _MAKERS
    }
    kind_of: Any = type("Counted", (base,), {**methods, "Idup": idup})
    return kind_of(comm)


def counts_by_kind(counts: collections.Counter[str], when: str) -> dict[str, float]:
    """Return this rank's calls so far by kind."""
    kinds: collections.Counter[str] = collections.Counter()
    for name, number in counts.items():
        kinds[name.split()[0]] += number
    return {f"{when}_{kind}s": float(kinds[kind]) for kind in ("collective", "maker", "message")}
