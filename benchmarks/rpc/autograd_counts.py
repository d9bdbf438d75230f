"""Messages per pass of the distributed autograd engine, and growth of memory over many contexts."""

from __future__ import annotations

import time
from collections import Counter

import mpidist.comm
import mpidist.rpc
from harness import process_memory
from mpidist.autograd import _get_debug_info, _message_counts
from rpc import autograd_cases
from rpc.autograd_cases import Chain
from rpc.autograd_stacks import stack_of

_COUNTED = 20  # passes


_TIMEOUT_S = 30.0


def messages_per_pass(name: str, workers: int) -> dict[str, float]:
    """Count the engine's messages of one pass over 4 layers and its context, on all workers."""
    chain = Chain(stack_of(name), 4, with_step=False)
    chain.check()
    _wait_for_clean_up(workers)
    before = _all_counts(workers)
    autograd_cases.repeated(chain, _COUNTED)
    _wait_for_clean_up(workers)
    sent = _all_counts(workers)
    sent.subtract(before)
    return {kind: count / _COUNTED for kind, count in sorted(sent.items()) if count}


def _all_counts(workers: int) -> Counter[str]:
    total: Counter[str] = Counter()
    for rank in range(workers):
        total.update(mpidist.rpc.rpc_sync(f"worker{rank}", _message_counts))
    return total


def memory_growth(count: int, workers: int) -> dict[str, float]:
    """Train in ``count`` contexts in turn; return the growth of memory on the worker with the most.

    Raises:
        RuntimeError: A worker still holds entries of a context.
    """
    chain = Chain(stack_of("mpidist"), 4, with_step=False)
    # The first passes fill the memory pools.
    autograd_cases.repeated(chain, max(count // 5, 1))
    before = [
        mpidist.rpc.rpc_sync(f"worker{rank}", process_memory.resident_mib)
        for rank in range(workers)
    ]
    start = time.perf_counter()
    autograd_cases.repeated(chain, count)
    seconds = time.perf_counter() - start
    _wait_for_clean_up(workers)
    after = [
        mpidist.rpc.rpc_sync(f"worker{rank}", process_memory.resident_mib)
        for rank in range(workers)
    ]
    grown = max(late - early for late, early in zip(after, before, strict=True))
    return {"contexts": count, "seconds": seconds, "growth_mib": grown}


def _wait_for_clean_up(workers: int) -> None:
    # Clean-up messages are one-way, so they may arrive after the pass has ended.
    end = time.monotonic() + _TIMEOUT_S
    for rank in range(workers):
        while any(
            map(int, (left := mpidist.rpc.rpc_sync(f"worker{rank}", _get_debug_info)).values())
        ):
            if time.monotonic() > end:
                raise RuntimeError(
                    f"worker{rank} has something left of contexts that have ended: {left}"
                )
            time.sleep(1e-3)
