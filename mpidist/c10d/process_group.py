"""``torch.distributed.ProcessGroup`` on MPI, with a ``Backend`` of ours registered on it.

Callers in Python reach the methods of ``TorchProcessGroup``, and with them the native group, in one
step. Callers in C++ reach its ``MpiBackend`` (``torch.ops.c10d``), or these methods again by way of
torch's trampoline (DDP's reducer, functional collectives). While a ``TorchDispatchMode`` is active
or the group has hooks, a method calls torch's own method of its name, which calls the operator,
which calls the Backend: modes (``CommDebugMode``, ``FakeTensorMode``) and hooks (``NanCheckHook``)
see the call. Decision 0018 has the latencies.

pybind11 does not call an override again from within that override. It knows it by the name and the
first argument of the innermost Python frame, so torch's method is called in the override's own
frame, never in a function that several of them share.

Source: torch/csrc/distributed/c10d/py/PyProcessGroup.hpp.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import Store, Work

from mpidist.c10d.calls import Answer, Calls
from mpidist.c10d.collectives import Collectives, TensorList
from mpidist.c10d.mpi_backend import MpiBackend
from mpidist.c10d.native import KEY
from mpidist.c10d.reductions import Options, Reducing
from mpidist.c10d.short_forms import full
from mpidist.c10d.window import TorchWindow
from mpidist.comm.group import ProcessGroup
from mpidist.dynamo import untraced
from mpidist.errors import GroupError

Tensor = torch.Tensor

DEVICES = ("cpu", "cuda")
_TorchGroup: Any = dist.ProcessGroup
# Number of active modes of this thread.
_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
# Attached by torch itself, in C++, to every group that it creates.
_NAN_CHECK = "TORCH_DIST_NAN_CHECK"


def _always() -> int:
    return 1


@untraced
class TorchProcessGroup(Collectives, dist.ProcessGroup):
    """A ``torch.distributed.ProcessGroup`` on MPI.

    Args:
        native: The native group.
        store: The store that torch created the group with.
        name: torch's name of the group.

    Attributes:
        native: The native group, whose methods torch's API partly lacks.
        backend: The ``Backend`` of its devices.
    """

    def __init__(self, native: ProcessGroup, store: Store, name: str) -> None:
        super().__init__(store, native.rank, native.size)
        self.native = native
        self.calls = Calls(native)
        self.backend = MpiBackend(self.calls)
        self._is_observed = _always if os.environ.get(_NAN_CHECK) == "1" else _modes
        self._register(dict.fromkeys(DEVICES, self.backend))
        _TorchGroup._set_group_name(self, name)

    def _register(self, backends: dict[str, Any]) -> None:
        """Register a Backend for each device type, the last one also as the default."""
        kind = dist.ProcessGroup.BackendType.CUSTOM
        self._set_default_backend(kind)
        for device, backend in backends.items():
            self._register_backend(torch.device(device), kind, backend)

    def observe(self) -> None:
        """Make every call from here on an operator call, which hooks of the group see."""
        self._is_observed = _always

    def register_pre_hook(self, hook_id: int, hook: Callable[..., None]) -> None:
        """See ProcessGroup.register_pre_hook of torch."""
        self.observe()
        _TorchGroup.register_pre_hook(self, hook_id, hook)

    def register_post_hook(self, hook_id: int, hook: Callable[..., None]) -> None:
        """See ProcessGroup.register_post_hook of torch."""
        self.observe()
        _TorchGroup.register_post_hook(self, hook_id, hook)

    # --- reductions ---

    def allreduce(self, tensors: TensorList, opts: Any = None, *rest: Any, **named: Any) -> Work:
        """See all_reduce."""
        if opts.__class__ is not distributed_c10d.AllreduceOptions:
            (tensors,), opts = full("allreduce", (tensors,), opts, rest, named)
        if self._is_observed():
            with Answer() as answer:
                return answer.to(_TorchGroup.allreduce(self, tensors, opts))
        return Collectives.allreduce(self, tensors, opts)

    def allreduce_coalesced(self, tensors: TensorList, opts: Reducing | None = None) -> Work:
        """See all_reduce_coalesced."""
        if self._is_observed():
            with Answer() as answer:
                chosen = opts or distributed_c10d.AllreduceCoalescedOptions()
                return answer.to(_TorchGroup.allreduce_coalesced(self, tensors, chosen))
        return Collectives.allreduce_coalesced(self, tensors, opts)

    def reduce(self, tensors: TensorList, opts: Any = None, *rest: Any, **named: Any) -> Work:
        """See reduce."""
        if opts.__class__ is not distributed_c10d.ReduceOptions:
            (tensors,), opts = full("reduce", (tensors,), opts, rest, named)
        if self._is_observed():
            with Answer() as answer:
                return answer.to(_TorchGroup.reduce(self, tensors, opts))
        return Collectives.reduce(self, tensors, opts)

    def reduce_scatter(
        self,
        outputs: TensorList,
        inputs: Sequence[TensorList],
        opts: Any = None,
        *rest: Any,
        **named: Any,
    ) -> Work:
        """See reduce_scatter."""
        if opts.__class__ is not distributed_c10d.ReduceScatterOptions:
            (outputs, inputs), opts = full("reduce_scatter", (outputs, inputs), opts, rest, named)
        if self._is_observed():
            with Answer() as answer:
                return answer.to(_TorchGroup.reduce_scatter(self, outputs, inputs, opts))
        return Collectives.reduce_scatter(self, outputs, inputs, opts)

    def reduce_scatter_single(
        self, output: Tensor, input: Tensor, opts: Reducing | None = None
    ) -> Work:
        """See reduce_scatter_tensor."""
        if self._is_observed():
            with Answer() as answer:
                chosen = opts or distributed_c10d.ReduceScatterOptions()
                return answer.to(_TorchGroup.reduce_scatter_single(self, output, input, chosen))
        return Collectives.reduce_scatter_single(self, output, input, opts)

    def reduce_scatter_single_coalesced(
        self, outputs: TensorList, inputs: TensorList, opts: Reducing | None = None
    ) -> Work:
        """See reduce_scatter_tensor_coalesced."""
        if self._is_observed():
            with Answer() as answer:
                chosen = opts or distributed_c10d.ReduceScatterOptions()
                return answer.to(
                    _TorchGroup.reduce_scatter_single_coalesced(self, outputs, inputs, chosen)
                )
        return Collectives.reduce_scatter_single_coalesced(self, outputs, inputs, opts)

    # --- movement ---

    def broadcast(self, tensors: TensorList, opts: Any = None, *rest: Any, **named: Any) -> Work:
        """See broadcast."""
        if opts.__class__ is not distributed_c10d.BroadcastOptions:
            (tensors,), opts = full("broadcast", (tensors,), opts, rest, named)
        if self._is_observed():
            with Answer() as answer:
                return answer.to(_TorchGroup.broadcast(self, tensors, opts))
        return Collectives.broadcast(self, tensors, opts)

    def allgather(
        self,
        outputs: Sequence[TensorList],
        inputs: TensorList,
        opts: Any = None,
        *rest: Any,
        **named: Any,
    ) -> Work:
        """See all_gather."""
        if opts.__class__ is not distributed_c10d.AllgatherOptions:
            (outputs, inputs), opts = full("allgather", (outputs, inputs), opts, rest, named)
        if self._is_observed():
            with Answer() as answer:
                return answer.to(_TorchGroup.allgather(self, outputs, inputs, opts))
        return Collectives.allgather(self, outputs, inputs, opts)

    def allgather_coalesced(
        self, outputs: Sequence[TensorList], inputs: TensorList, opts: Options | None = None
    ) -> Work:
        """See all_gather; one list of outputs for each rank, one tensor of it for each input."""
        if self._is_observed():
            with Answer() as answer:
                chosen = opts or distributed_c10d.AllgatherOptions()
                return answer.to(_TorchGroup.allgather_coalesced(self, outputs, inputs, chosen))
        return Collectives.allgather_coalesced(self, outputs, inputs, opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Options | None = None) -> Work:
        """See all_gather_into_tensor."""
        if self._is_observed():
            with Answer() as answer:
                chosen = opts or distributed_c10d.AllgatherOptions()
                return answer.to(_TorchGroup.all_gather_single(self, output, input, chosen))
        return Collectives.all_gather_single(self, output, input, opts)

    def all_gather_single_coalesced(
        self, outputs: TensorList, inputs: TensorList, opts: Options | None = None
    ) -> Work:
        """See all_gather_into_tensor_coalesced."""
        if self._is_observed():
            with Answer() as answer:
                chosen = opts or distributed_c10d.AllgatherOptions()
                return answer.to(
                    _TorchGroup.all_gather_single_coalesced(self, outputs, inputs, chosen)
                )
        return Collectives.all_gather_single_coalesced(self, outputs, inputs, opts)

    def gather(
        self,
        outputs: Sequence[TensorList],
        inputs: TensorList,
        opts: Any = None,
        *rest: Any,
        **named: Any,
    ) -> Work:
        """See gather."""
        if opts.__class__ is not distributed_c10d.GatherOptions:
            (outputs, inputs), opts = full("gather", (outputs, inputs), opts, rest, named)
        if self._is_observed():
            with Answer() as answer:
                return answer.to(_TorchGroup.gather(self, outputs, inputs, opts))
        return Collectives.gather(self, outputs, inputs, opts)

    def scatter(
        self,
        outputs: TensorList,
        inputs: Sequence[TensorList],
        opts: Any = None,
        *rest: Any,
        **named: Any,
    ) -> Work:
        """See scatter."""
        if opts.__class__ is not distributed_c10d.ScatterOptions:
            (outputs, inputs), opts = full("scatter", (outputs, inputs), opts, rest, named)
        if self._is_observed():
            with Answer() as answer:
                return answer.to(_TorchGroup.scatter(self, outputs, inputs, opts))
        return Collectives.scatter(self, outputs, inputs, opts)

    def alltoall(
        self, outputs: TensorList, inputs: TensorList, opts: Options | None = None
    ) -> Work:
        """See all_to_all."""
        if self._is_observed():
            with Answer() as answer:
                chosen = opts or distributed_c10d.AllToAllOptions()
                return answer.to(_TorchGroup.alltoall(self, outputs, inputs, chosen))
        return Collectives.alltoall(self, outputs, inputs, opts)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        opts: Any = None,
        **named: Any,
    ) -> Work:
        """See all_to_all_single."""
        if opts.__class__ is not distributed_c10d.AllToAllOptions:
            _, opts = full("all_to_all_single", (), opts, (), named)
        if self._is_observed():
            with Answer() as answer:
                return answer.to(
                    _TorchGroup.all_to_all_single(
                        self, output, input, output_sizes or [], input_sizes or [], opts
                    )
                )
        return Collectives.all_to_all_single(self, output, input, output_sizes, input_sizes, opts)

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """See barrier; the wait applies a timeout in the options."""
        if opts.__class__ is not distributed_c10d.BarrierOptions:
            _, opts = full("barrier", (), timeout if opts is None else opts)
        if self._is_observed():
            with Answer() as answer:
                return answer.to(_TorchGroup.barrier(self, opts))
        return Collectives.barrier(self, opts)

    # --- messages ---

    def send(self, tensors: TensorList, dst: int, tag: int = 0) -> Work:
        """See isend."""
        if self._is_observed():
            with Answer() as answer:
                return answer.to(_TorchGroup.send(self, tensors, dst, tag))
        return Collectives.send(self, tensors, dst, tag)

    def recv(self, tensors: TensorList, src: int, tag: int = 0) -> Work:
        """See irecv."""
        if self._is_observed():
            with Answer() as answer:
                return answer.to(_TorchGroup.recv(self, tensors, src, tag))
        return Collectives.recv(self, tensors, src, tag)

    def recv_anysource(self, tensors: TensorList, tag: int = 0) -> Work:
        """See irecv."""
        if self._is_observed():
            with Answer() as answer:
                return answer.to(_TorchGroup.recv_anysource(self, tensors, tag))
        return Collectives.recv_anysource(self, tensors, tag)

    # --- torch's coalescing manager ---

    def start_coalescing(self, device: torch.device | None = None) -> None:
        """Begin a batch; torch's C++ calls it by this name."""
        self.calls.begin_batch()

    def end_coalescing(self, device: torch.device | None = None) -> Work:
        """End the batch, and return one work for its calls."""
        return self.calls.end_batch()

    _start_coalescing = start_coalescing
    _end_coalescing = end_coalescing

    # --- management ---

    def name(self) -> str:
        """See ProcessGroup.name."""
        return "mpidist"

    getBackendName = name

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the timeout after which the watchdog reports."""
        self.backend.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: object = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Sequence[torch.device] | None = None,
    ) -> TorchProcessGroup | None:
        """Create a group of some ranks; see ``torch.distributed.split_group``.

        Collective: over ``ranks``; other ranks get None.

        Args:
            ranks: Ranks of this group, in the new group's order.
            timeout: Timeout of the new group; None for this group's.
            opts: Not used.
            group_name: Unique name; None for a generated one.
            group_desc: Description for messages.
            device_types: Not used: the new group supports the same devices.
        """
        native = self.native.new_group(ranks, group_name, timeout, key=KEY)
        if native is None:
            return None
        store = dist.PrefixStore(f"{native.name}/", self.get_group_store())
        child = TorchProcessGroup(native, store, native.name)
        if group_desc is not None:
            child._set_group_desc(group_desc)
        return child

    @property
    def supports_window(self) -> bool:
        """Return True: callers in Python get windows."""
        return True

    def new_window(self, tensor: Tensor | None = None) -> TorchWindow:
        """Return a window; see ``ProcessGroup.window`` of ``comm/group``.

        Collective: over the group, with a tensor; else not.

        Args:
            tensor: This rank's host tensor; one of ``native.allocate`` can be mapped.
        """
        return TorchWindow(self.native.window(tensor))

    def merge_remote_group(self, *args: object, **kwargs: object) -> NoReturn:
        """Refuse, because the ranks of an MPI job are fixed at its start.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(
            f"{self.native.where('merge_remote_group')} is not supported: start all ranks in one "
            "job of MPI"
        )

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """See ``ProcessGroup.monitored_barrier`` of ``comm/group``."""
        self.native.monitored_barrier(timeout, wait_all_ranks)

    def shutdown(self) -> None:
        """Close the group."""
        self.native.close()

    def abort(self) -> None:
        """Fail new calls; running calls return with an error if the MPI library has ULFM."""
        self.native.fail(GroupError(self.native.where("abort") + " was called"))
        self.native.revoke()
