"""MPI communicator of a group for executors: ranks, nodes, tags, and memory kept between calls."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mpidist.comm.mpi import autograd_mode
from mpidist.comm.mpi.library import MPI
from mpidist.comm.mpi.nonblocking import Mpi, MpiCalls, wait_sleeping, wait_spinning
from mpidist.comm.mpi.scratch import Scratch
from mpidist.comm.mpi.tags import Tag
from mpidist.errors import GroupError

# The highest tags belong to the library's own algorithms, all lower ones to the user.
_RESERVED_TAGS = 64
_SHORT = 1 << 20  # elements of scratch memory


@dataclass(frozen=True)
class Levels:
    """A communicator's ranks by node.

    Attributes:
        node: The ranks on this rank's node; its rank 0 is the leader.
        leaders: The leaders of all nodes; None on other ranks.
    """

    node: Communicator
    leaders: Communicator | None


class Communicator:
    """One MPI communicator, with what an executor needs to know of it.

    Attributes:
        plain: The ``MPI.Comm``.
        mpi: What executors call: ``plain`` on one node; between nodes ``MpiCalls``, whose
            blocking calls are non-blocking ones and a wait.
        rank: This rank in it.
        size: W, its number of ranks.
        nodes: Node number of each rank; nodes are numbered in the order of their first ranks.
        is_single_node: All ranks share one node's memory.
        shares_nodes: There are several nodes, and several ranks on one of them.
        max_tag: Highest tag that a user may give to a message.
        device_operations: Results of ``capability.agreed_operations``, by device type.
        tuning_tables: The fastest all-reduce at each size, by device type.
        adds_in_rank_order: Sums are in the order of the ranks (``determinism``).
        kept: Objects that executors keep between calls, by names of their own.
    """

    def __init__(
        self,
        mpi: Mpi,
        nodes: Sequence[int],
        highest_tag: int,
        adds_in_rank_order: bool = False,
    ) -> None:
        count = len(set(nodes))
        is_single_node = count == 1
        self.plain: Any = mpi
        self.mpi: Mpi = mpi if is_single_node else MpiCalls(mpi, wait_spinning)
        self.rank: int = mpi.Get_rank()
        self.size: int = mpi.Get_size()
        self.nodes = tuple(nodes)
        self.shares_nodes = 1 < count < self.size
        self.is_single_node = is_single_node
        self.adds_in_rank_order = adds_in_rank_order
        self.max_tag = highest_tag - _RESERVED_TAGS
        self._highest_tag = highest_tag
        # Empty before the first use; shared by all copies of this object, as are the dicts below.
        self._levels: list[Levels] = []
        self._duplicates: list[Mpi] = []
        self.device_operations: dict[str, frozenset[str]] = {}
        self.tuning_tables: dict[str, Any] = {}
        self.kept: dict[str, Any] = {}
        self._scratch: dict[tuple[torch.dtype, Scratch], torch.Tensor] = {}

    def sleeping(self) -> Communicator:
        """Return the same communicator and memory for a thread that sleeps while it waits."""
        return self._calling(MpiCalls(self.plain, wait_sleeping))

    def blocking(self) -> Communicator:
        """Return the same communicator and memory for blocking calls (device memory needs them)."""
        return self if self.mpi is self.plain else self._calling(self.plain)

    def _calling(self, mpi: Mpi) -> Communicator:
        other = copy.copy(self)
        other.mpi = mpi
        return other

    def wait_all(self, requests: list[Any]) -> None:
        """Wait for requests of this communicator in the same way as its blocking calls."""
        if isinstance(self.mpi, MpiCalls):
            self.mpi.wait_all(requests)
        else:
            MPI.Request.Waitall(requests)

    def levels(self) -> Levels:
        """Return the ranks by node.

        Collective: the first call, over the communicator.
        """
        if not self._levels:
            # This barrier can be abandoned while a rank is missing; the two splits cannot.
            self.mpi.Barrier()
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
        # A rank executes in the caller's thread or in the group's: non-blocking calls match in both
        # cases, also on one node.
        assert isinstance(self.mpi, MpiCalls)
        node_comm, leader_comm = levels.node, levels.leaders
        return Levels(
            node_comm._calling(self.mpi.over(node_comm.plain)),
            leader_comm and leader_comm._calling(self.mpi.over(leader_comm.plain)),
        )

    def duplicate(self) -> Mpi:
        """Make an MPI communicator of the same ranks, whose calls have an order of their own.

        Collective: over the communicator.
        """
        # This barrier can be left while a rank is missing, and is resumed by the next call; the
        # call behind it cannot.
        if "is duplicating" in self.kept:
            raise GroupError(
                "an exception has left the making of a communicator of this group; make another"
            )
        if "barrier of duplicate" not in self.kept:
            self.kept["barrier of duplicate"] = self.plain.Ibarrier()
        self.wait_all([self.kept["barrier of duplicate"]])
        self.kept["is duplicating"] = True
        self._duplicates.append(self.plain.Dup())
        del self.kept["is duplicating"], self.kept["barrier of duplicate"]
        return self._duplicates[-1]

    def children(self) -> list[Mpi]:
        """Return the MPI communicators that were made from this one."""
        children = [comm for levels in self._levels for comm in (levels.node, levels.leaders)]
        return [comm.plain for comm in children if comm is not None] + self._duplicates

    def own_tag(self, use: Tag) -> int:
        """Return the tag of one of the library's own uses, above all tags of users' messages."""
        return self.max_tag + 1 + use

    def scratch(self, numel: int, dtype: torch.dtype, use: Scratch = Scratch.WORK) -> torch.Tensor:
        """Return host memory of at least ``numel`` elements; calls for one use and dtype share it.

        Fresh memory costs a page fault every 4 KiB, more than the transfer itself. A group executes
        one collective at a time, so one buffer for each dtype and use is enough.
        """
        held = self._scratch.get((dtype, use))
        if held is None or held.numel() < numel:
            # Prepared calls keep theirs: of growing lengths, by powers of two, twice the longest in
            # all.
            length = 1 << (numel - 1).bit_length() if 0 < numel <= _SHORT else numel
            with autograd_mode.allocating():
                held = torch.empty(length, dtype=dtype, device="cpu")
            self._scratch[dtype, use] = held
        return held[:numel]
