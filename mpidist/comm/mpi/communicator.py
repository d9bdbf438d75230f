"""A group's MPI communicator as executors see it: with the rank's place in it, its nodes, and memory kept between calls."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mpidist.comm.mpi import autograd_mode
from mpidist.comm.mpi.library import MPI
from mpidist.comm.mpi.nonblocking import MpiCalls, wait_sleeping, wait_spinning
from mpidist.comm.mpi.scratch import Scratch
from mpidist.comm.mpi.tags import Tag

# the highest tags belong to the library's own algorithms, all below them to the user
_RESERVED_TAGS = 64


@dataclass(frozen=True)
class Levels:
    """A communicator's ranks by node.

    Attributes:
        node: The ranks on this rank's node; the first of them leads.
        leaders: The leaders of all nodes; None on a rank that is none.
    """

    node: Communicator
    leaders: Communicator | None


class Communicator:
    """One MPI communicator, as executors see it.

    Attributes:
        plain: The ``MPI.Comm``, or at MPI_THREAD_SERIALIZED its wrapper.
        mpi: The same for executors; between nodes with non-blocking twins in the place of blocking
            calls (``patience``).
        rank: This rank in it.
        size: W, its number of ranks.
        nodes: For each rank the number of the node whose memory it shares, in the order of their
            first ranks.
        is_single_node: All ranks share one node's memory.
        shares_nodes: There are several nodes, and several ranks on one of them.
        max_tag: Highest tag that a user may give to a message.
        device_operations: What ``capability.agreed_operations`` has found out, by device type.
    """

    def __init__(self, mpi: Any, nodes: Sequence[int], highest_tag: int) -> None:
        count = len(set(nodes))
        is_single_node = count == 1
        self.plain = mpi
        self.mpi = mpi if is_single_node else MpiCalls(mpi, wait_spinning)
        self.rank: int = mpi.Get_rank()
        self.size: int = mpi.Get_size()
        self.nodes = tuple(nodes)
        self.shares_nodes = 1 < count < self.size
        self.is_single_node = is_single_node
        self.max_tag = highest_tag - _RESERVED_TAGS
        self._highest_tag = highest_tag
        # none before the first use; one for all copies of this object
        self._levels: list[Levels] = []
        self.device_operations: dict[str, frozenset[str]] = {}
        # by device type: which all-reduce is the fastest at which size
        self.tuning_tables: dict[str, Any] = {}
        self.kept: dict[str, Any] = {}  # what executors keep between calls, by their names for it
        self._scratch: dict[tuple[torch.dtype, Scratch], torch.Tensor] = {}

    def sleeping(self) -> Communicator:
        """Return the same communicator, with the same memory, for a thread that sleeps while it waits."""
        other = copy.copy(self)
        other.mpi = MpiCalls(self.plain, wait_sleeping)
        return other

    def blocking(self) -> Communicator:
        """Return the same communicator, with the same memory, for blocking calls: those of device memory, on all ranks."""
        if self.mpi is self.plain:
            return self
        other = copy.copy(self)
        other.mpi = self.plain
        return other

    def wait_all(self, requests: list[Any]) -> None:
        """Wait for requests of this communicator as its blocking calls wait."""
        if isinstance(self.mpi, MpiCalls):
            self.mpi.wait_all(requests)
        else:
            MPI.Request.Waitall(requests)

    def levels(self) -> Levels:
        """Return the ranks by node.

        Collective: the first call, over the communicator.
        """
        if not self._levels:
            self.mpi.Barrier()  # may be left while a rank is missing; the calls below may not
            node = self.nodes[self.rank]
            leads = self.nodes.index(node) == self.rank
            within = self.plain.Split(node, self.rank)
            between = self.plain.Split(0 if leads else MPI.UNDEFINED, self.rank)
            ranks = Communicator(within, [0] * self.nodes.count(node), self._highest_tag)
            leaders = (
                Communicator(between, range(len(set(self.nodes))), self._highest_tag)
                if leads
                else None
            )
            self._levels.append(Levels(ranks, leaders))
        (levels,) = self._levels
        return Levels(
            self._waiting_alike(levels.node), levels.leaders and self._waiting_alike(levels.leaders)
        )

    def _waiting_alike(self, child: Communicator) -> Communicator:
        # A rank executes in its own thread or in the group's: non-blocking calls match in either,
        # on one node as well.
        other = copy.copy(child)
        other.mpi = self.mpi.over(child.plain)
        return other

    def children(self) -> list[Any]:
        """Return MPI's communicators that were made from this one."""
        made = [comm for levels in self._levels for comm in (levels.node, levels.leaders)]
        return [comm.plain for comm in made if comm is not None]

    def own_tag(self, use: Tag) -> int:
        """Return the tag of one of the library's own uses, out of reach of users' messages."""
        return self.max_tag + 1 + use

    def scratch(self, numel: int, dtype: torch.dtype, use: Scratch = Scratch.WORK) -> torch.Tensor:
        """Return host memory of at least ``numel`` elements that later calls for the same use get again.

        Fresh memory costs a page fault every 4 KiB, more than the transfer itself; a group executes
        one collective at a time, so one buffer a dtype and use is enough.
        """
        held = self._scratch.get((dtype, use))
        if held is None or held.numel() < numel:
            with autograd_mode.allocating():
                held = torch.empty(numel, dtype=dtype, device="cpu")
            self._scratch[dtype, use] = held
        return held[:numel]
