"""torch's ``Backend`` on MPI: where callers in C++ find a group's collectives.

torch's operators (``torch.ops.c10d``), functional collectives, and queries about capabilities look
for the ``Backend`` that is registered on a group for a device type. Since 2.14 a Python class may
be one: torch calls its methods by the names in PyBackend.hpp.

Source: torch/csrc/distributed/c10d/py/PyBackend.hpp.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
from torch._C._distributed_c10d import Backend
from torch.distributed.distributed_c10d import Store, Work

from mpidist.c10d.calls import Calls, answered
from mpidist.c10d.collectives import OPERATORS, Collectives
from mpidist.c10d.management import Management
from mpidist.c10d.reductions import Options
from mpidist.c10d.shrinking import shrunk
from mpidist.dynamo import untraced


@untraced
class MpiBackend(Collectives, Management, Backend):
    """A ``Backend`` over a native group.

    Args:
        calls: The calls of the group that it is registered on; a batch of either is one.

    Attributes:
        supports_coalescing: Whether ``batch_isend_irecv`` needs one launch for all calls; MPI
            messages need none.
        supports_shrinking: Whether ``shrink_group`` can leave ranks out; not where other backends
            share the group.
        origin: Of a group that can change its members (``reconfiguring``); None of others.
    """

    origin: str | None = None
    supports_coalescing = False
    supports_shrinking = True
    # C++ calls a property that a Python class inherits without end. Groups that can change their
    # members answer by themselves (``reconfiguring``).
    supports_reconfigure = False
    # Whether Inductor can get a collective's duration without running it: torch 2.15, 2.14.
    _supports_time_estimate = False
    supports_time_estimate = False

    def __init__(self, calls: Calls) -> None:
        super().__init__(calls.native.rank, calls.native.size)
        self.serve(calls)
        self._options: Any = Backend.Options("mpidist", self._timeout)
        self._options.group_name = calls.native.name

    def serve(self, calls: Calls) -> None:
        """Serve a group from here on; torch keeps the first Backend that a group registers."""
        self.native, self.calls = calls.native, calls

    def rank(self) -> int:
        """Return this process's rank in the group."""
        return self.native.rank

    def size(self) -> int:
        """Return the number of ranks."""
        return self.native.size

    @property
    def options(self) -> Backend.Options:
        """Name, timeout and ranks, in torch's form."""
        return self._options

    @property
    def _timeout(self) -> timedelta:
        return timedelta(seconds=self.native.timeout_s or 0)

    @property
    def supports_splitting(self) -> bool:
        """Permission of ``dist.split_group`` to divide the group.

        False where torch looks for a communicator that the backend of a new group could split: a
        group of mpidist is made without its parent, and torch 2.14 would pass this object to NCCL.
        """
        return sys._getframe(1).f_code.co_name != "_get_split_source"

    # --- what C++ calls under other names than those of a group ---

    def start_coalescing(self) -> None:
        """Begin a batch."""
        self.calls.begin_batch()

    def end_coalescing(self) -> Work:
        """End the batch, and return one work for its calls."""
        return answered(self.calls.end_batch())

    def monitored_barrier(self, opts: Options, wait_all_ranks: bool = False) -> None:
        """See ``ProcessGroup.monitored_barrier`` of ``comm/group``."""
        self.native.monitored_barrier(opts.timeout, wait_all_ranks)

    # --- management ---

    def split(self, store: Store, ranks: Sequence[int], opts: object) -> MpiBackend | None:
        """Return a backend for some ranks of the group, None on the others.

        Collective: over ``ranks``, which are in the new group's order.
        """
        child = self.native.new_group(ranks, None, None)
        return None if child is None else MpiBackend(Calls(child))

    def shrink(
        self, ranks_to_exclude: Sequence[int], shrink_flags: int = 0, opts_override: object = None
    ) -> MpiBackend:
        """Return a backend for the ranks that remain; see ``torch.distributed.shrink_group``.

        Collective: over the ranks that remain.
        """
        remaining = MpiBackend(Calls(shrunk(self.native, ranks_to_exclude, shrink_flags)))
        remaining.origin = self.origin
        return remaining

    def reconfigure(self, opts: object = None) -> NoReturn:
        """Say what a group needs that can change its members (``reconfiguring``).

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(
            f"{self.native.where('reconfigure')} needs a default group that was made with "
            'init_process_group("mpidist", enable_reconfigure=True), and shares no device with '
            "other backends"
        )

    get_reconfigure_handle = reconfigure

    def eager_connect_single_device(self, device: torch.device | None = None) -> None:
        """Do nothing, because MPI has connected the ranks."""


def _answering(name: str) -> Callable[..., Work]:
    method = getattr(Collectives, name)

    def call(self: MpiBackend, *args: Any, **named: Any) -> Work:
        return answered(method(self, *args, **named))

    return untraced(functools.wraps(method)(call))


for _name in OPERATORS:
    setattr(MpiBackend, _name, _answering(_name))
