"""What an executor needs of a group: MPI's communicator, the place in it, and memory that is kept between calls."""

from __future__ import annotations

import copy
from typing import Any

import torch

from mpidist.comm import autograd_mode
from mpidist.comm.patience import TwinComm, patiently, promptly

_RESERVED_TAGS = 64  # the highest tags belong to the library's own algorithms, all below them to the user


class Communicator:
    """One MPI communicator, as executors see it.

    Attributes:
        plain: The ``MPI.Comm``, or at MPI_THREAD_SERIALIZED its wrapper.
        mpi: The same for executors; between nodes with non-blocking twins in the place of blocking calls (``patience``).
        rank: This rank in it.
        size: W, its number of ranks.
        is_single_node: All ranks share one node's memory.
        max_tag: Highest tag that a user may give to a message.
        device_operations: What ``capability.agreed_operations`` has found out, by device type.
    """

    def __init__(self, mpi: Any, is_single_node: bool, highest_tag: int) -> None:
        self.plain = mpi
        self.mpi = mpi if is_single_node else TwinComm(mpi, promptly)
        self.rank: int = mpi.Get_rank()
        self.size: int = mpi.Get_size()
        self.is_single_node = is_single_node
        self.max_tag = highest_tag - _RESERVED_TAGS
        self.device_operations: dict[str, frozenset[str]] = {}
        self.tuning_tables: dict[str, Any] = {}  # by device type: which all-reduce is the fastest at which size
        self._scratch: dict[tuple[torch.dtype, int], torch.Tensor] = {}

    def patient(self) -> Communicator:
        """Return the same communicator, with the same memory, for a thread that gives its core away while it waits."""
        other = copy.copy(self)
        other.mpi = TwinComm(self.plain, patiently)
        return other

    def blocking(self) -> Communicator:
        """Return the same communicator, with the same memory, for blocking calls: those of device memory, on all ranks."""
        if self.mpi is self.plain:
            return self
        other = copy.copy(self)
        other.mpi = self.plain
        return other

    def own_tag(self, number: int) -> int:
        """Return the library's ``number``-th reserved tag, out of reach of users' messages."""
        return self.max_tag + 1 + number

    def scratch(self, numel: int, dtype: torch.dtype, slot: int = 0) -> torch.Tensor:
        """Return host memory of at least ``numel`` elements that later calls of the same slot use again.

        Fresh memory costs a page fault every 4 KiB, more than the transfer itself; a group executes one collective at a time, so
        one buffer a dtype and slot is enough.
        """
        held = self._scratch.get((dtype, slot))
        if held is None or held.numel() < numel:
            with autograd_mode.allocating():
                held = torch.empty(numel, dtype=dtype, device="cpu")
            self._scratch[dtype, slot] = held
        return held[:numel]
