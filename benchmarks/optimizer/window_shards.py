"""All-gathers of a sharded optimizer's parameters, by windows: contenders beside OSS's own.

Letters: N bytes of one rank's shard; two ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from harness import timing
from mpidist.comm import shard_memory
from mpidist.comm.algorithms import sendrecv

SIZES = (64 << 10, 1 << 20, 4 << 20, 16 << 20)


class Shards:
    """One size: the parameters of both ranks, in the memory of each contender.

    Collective: constructed by both ranks.

    Args:
        group: Two ranks, on one node or on two.
        nbytes: N.
    """

    def __init__(self, group: Any, nbytes: int) -> None:
        self._group, self._nbytes = group, nbytes
        self._memory = shard_memory.allocate(group, 2 * nbytes)
        self._prepared = self._memory.prepare([[(0, nbytes)], [(nbytes, 2 * nbytes)]])
        self._flat = torch.zeros(2 * nbytes, dtype=torch.uint8)
        if group.is_single_node:
            self._window = group.window(size=2 * nbytes, dtype=torch.uint8)
        else:
            self._window = group.window(torch.zeros(2 * nbytes, dtype=torch.uint8))

    def contenders(self) -> list[timing.Contender]:
        """Return the contenders, checked. Collective.

        Raises:
            RuntimeError: A result is wrong, on this rank.
        """
        calls = {
            "mpidist": (self._gather, self._memory.own),
            "window": (self._put, self._window.tensor),
        }
        if not self._group.is_single_node:
            calls["leaders"] = self._exchange, self._flat
        for name, (call, whole) in calls.items():
            self._require(name, call, whole)
        return [timing.Contender(name, (call,), ()) for name, (call, _) in calls.items()]

    def free(self) -> None:
        """Give the window up. Collective."""
        self._window.tensor_deregister()

    def _gather(self) -> None:
        self._group.barrier()  # the all-reduce behind the step, in OSS
        self._prepared()

    def _exchange(self) -> None:
        """Send and receive as the first ranks of two nodes do for one copy on each."""
        own, other = self._parts(self._flat)
        group, peer = self._group, 1 - self._group.rank
        group.in_order(
            lambda: sendrecv.sendrecv(group._comm, [(peer, own)], [(peer, other)]), async_op=False
        )

    def _put(self) -> None:
        window, peer = self._window, 1 - self._group.rank
        own, _ = self._parts(window.tensor)
        work = window.put(own, peer, self._group.rank * self._nbytes, async_op=True)
        window.signal(peer)
        window.wait_signal(peer)
        work.wait()

    def _parts(self, whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's shard and the other's."""
        parts = whole.view(2, self._nbytes)
        return parts[self._group.rank], parts[1 - self._group.rank]

    def _require(self, name: str, call: Callable[[], object], whole: torch.Tensor) -> None:
        own, other = self._parts(whole)
        for step in (0, 10):
            # A rank that is ahead must not write before the other has cleared its memory.
            other.zero_()
            own.fill_(self._group.rank + 1 + step)
            self._group.barrier()
            call()
            wanted = torch.tensor([[1 + step], [2 + step]])
            if not bool((whole.view(2, self._nbytes) == wanted).all()):
                raise RuntimeError(f"{name} of {self._nbytes} bytes: wrong result")
            self._group.barrier()


def measure(
    group: Any, comm: Any, sizes: tuple[int, ...], rounds: int, burst_s: float
) -> list[tuple[str, int, list[timing.Series]]]:
    """Check and time all contenders; return operation, size and series.

    Collective: over the group, of two ranks.

    Args:
        comm: mpi4py communicator of both.
    """
    found = []
    for nbytes in sizes:
        shards = Shards(group, nbytes)
        series = timing.time_rounds(comm, shards.contenders(), rounds, burst_s)
        found.append(("shards", nbytes, series))
        shards.free()
    return found
