"""Interface of a process group, for annotations in modules that only use a group.

``ProcessGroup`` implements it. An annotation by the protocol needs no import of the class, so
modules below ``comm.group`` can use it as well, and tests can pass a substitute.
"""

# ruff: noqa: D102 - ProcessGroup documents the methods.

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch

from mpidist.comm.algorithms.reduce_op import SUM, ReduceOp
from mpidist.comm.mpi.communicator import Communicator
from mpidist.comm.operation import Operation
from mpidist.comm.work import RequestWork, Work

if TYPE_CHECKING:
    import torch.distributed

Tensor = torch.Tensor
Tensors = Sequence[torch.Tensor]


class Group(Protocol):
    """Ranks that communicate with each other.

    Attributes:
        name: The group's name in messages.
        key: Identifies the group; the same text on all its ranks.
        rank: This rank in the group.
        size: W, the number of ranks.
        world_ranks: The members' ranks in the world, in group order.
        timeout_s: Longest time of an operation; None for no limit.
    """

    name: str
    key: str
    rank: int
    size: int
    world_ranks: tuple[int, ...]
    timeout_s: float | None
    _comm: Communicator

    @property
    def is_single_node(self) -> bool: ...
    @property
    def is_closed(self) -> bool: ...
    def where(self, operation: str) -> str: ...

    def all_reduce(
        self, tensor: Tensor, op: ReduceOp = SUM, async_op: bool = False
    ) -> Work | None: ...
    def all_reduce_coalesced(
        self, tensors: Tensors, op: ReduceOp = SUM, async_op: bool = False
    ) -> Work | None: ...
    def reduce(
        self, tensor: Tensor, dst: int, op: ReduceOp = SUM, async_op: bool = False
    ) -> Work | None: ...
    def broadcast(self, tensor: Tensor, src: int, async_op: bool = False) -> Work | None: ...
    def broadcast_coalesced(
        self, tensors: Tensors, src: int, async_op: bool = False
    ) -> Work | None: ...
    def barrier(self, async_op: bool = False) -> Work | None: ...
    def all_gather(
        self, tensor_list: Tensors, tensor: Tensor, async_op: bool = False
    ) -> Work | None: ...
    def all_gather_into_tensor(
        self, output: Tensor, input: Tensor, async_op: bool = False
    ) -> Work | None: ...
    def gather(
        self,
        tensor: Tensor,
        gather_list: Tensors | None = None,
        dst: int = 0,
        async_op: bool = False,
    ) -> Work | None: ...
    def scatter(
        self,
        tensor: Tensor,
        scatter_list: Tensors | None = None,
        src: int = 0,
        async_op: bool = False,
    ) -> Work | None: ...
    def reduce_scatter(
        self, output: Tensor, input_list: Tensors, op: ReduceOp = SUM, async_op: bool = False
    ) -> Work | None: ...
    def reduce_scatter_tensor(
        self, output: Tensor, input: Tensor, op: ReduceOp = SUM, async_op: bool = False
    ) -> Work | None: ...
    def all_to_all(
        self, output_list: Tensors, input_list: Tensors, async_op: bool = False
    ) -> Work | None: ...
    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        async_op: bool = False,
    ) -> Work | None: ...
    def in_order(
        self,
        function: Callable[[], Any],
        async_op: bool = True,
        device: torch.device | None = None,
        *,
        operation: str = "in_order",
        facts: Sequence[tuple[str, Any]] = (),
        results: Tensors = (),
    ) -> Any: ...
    def _launch(self, operation: Operation, async_op: bool = False) -> Any: ...

    def send(self, tensor: Tensor, dst: int, tag: int = 0) -> None: ...
    def recv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> int: ...
    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> RequestWork: ...
    def irecv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> RequestWork: ...

    def broadcast_object(
        self, obj: Any = None, src: int = 0, *, data_only: bool | None = None
    ) -> Any: ...
    def all_gather_object(self, obj: Any, *, data_only: bool | None = None) -> list[Any]: ...
    def gather_object(
        self, obj: Any, dst: int = 0, *, data_only: bool | None = None
    ) -> list[Any] | None: ...
    def send_object(self, obj: Any, dst: int, *, data_only: bool | None = None) -> None: ...
    def recv_object(
        self, src: int | None = None, *, data_only: bool | None = None
    ) -> tuple[Any, int]: ...

    def split_by_node(self) -> Group: ...
    def clone(self, name: str | None = None) -> Group: ...
    def close(self) -> None: ...


# What users pass as a ``process_group``: a native group, a group of torch.distributed on the
# backend ``mpidist``, or None for the default group.
AnyGroup: TypeAlias = "Group | torch.distributed.ProcessGroup | None"
