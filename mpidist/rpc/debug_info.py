"""Counters of this worker's RPC, with torch's names."""

from __future__ import annotations

from mpidist.rpc import current, interceptor


def enable_gil_profiling(flag: bool) -> None:
    """Measure the time for which handlers wait for the GIL: ``agent.gil_average_wait_time_us``."""
    current.require().gil_waits = [] if flag else None


def _rref_context_get_debug_info() -> dict[str, str]:
    """Return counters of references, with torch's names."""
    agent = current.require()
    entries, forks = agent.references.store.counts()
    creations = str(agent.calls.creations())
    return {
        "num_owner_rrefs": str(entries),
        "num_pending_users": creations,
        "num_pending_futures": creations,
        # No message of the protocol is confirmed (``rref_store``).
        "num_pending_children": "0",
        "num_forks": str(forks),
    }


def _get_debug_info() -> dict[str, str]:
    """Return all counters, with torch's names."""
    info = _rref_context_get_debug_info() | current.require().get_debug_info()
    engine = interceptor.engine
    return info | engine.debug_info() if engine is not None else info
