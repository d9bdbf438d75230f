"""Flat buffers whose views are the parameters; each rank writes its shard, all ranks gather all.

Letters: W ranks; N elements of a buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise

import torch

from mpidist.comm import shard_memory
from mpidist.comm.group_types import Group
from mpidist.comm.shard_memory import ShardMemory
from mpidist.kernels.view import is_dense, laid_out
from mpidist.zero.shards.buffer_plan import BufferPlan

Tensor = torch.Tensor


class FlatBuffers:
    """Memory of some parameters: one flat buffer for each plan.

    Collective: constructed by all ranks of the group with the same plans; the parameters do not
    move until ``place``.

    Args:
        parameters: By number; at least those in the plans.
        one_copy: The ranks of a node hold one copy of host memory.
        order: Tensors with the strides of the parameters' places; the parameters if None.

    Attributes:
        plans: The plans.
        flats: The N elements of each plan.
        is_one_copy: All ranks of the node read the host memory that one of them writes.
    """

    def __init__(
        self,
        group: Group,
        plans: Sequence[BufferPlan],
        parameters: Mapping[int, Tensor],
        one_copy: bool = False,
        order: Mapping[int, Tensor] | None = None,
    ) -> None:
        self.plans = list(plans)
        self._group = group
        self._parameters = {
            slot.number: parameters[slot.number] for plan in plans for slot in plan.slots
        }
        self._memories: list[ShardMemory] = []  # one for each device
        self._gathers: list[Callable[[], None]] = []
        flats: dict[int, Tensor] = {}
        for device in dict.fromkeys(plan.device for plan in plans):
            alike = {index: plan for index, plan in enumerate(plans) if plan.device == device}
            nbytes = sum(plan.nbytes for plan in alike.values())
            memory = (
                shard_memory.allocate(group, nbytes, one_copy)
                if device.type == "cpu"
                else shard_memory.on_device(group, nbytes, device)
            )
            ranges: list[list[tuple[int, int]]] = [[] for _ in range(group.size)]
            start = 0  # the plan's first byte
            for index, plan in alike.items():
                flats[index] = memory.own[start : start + plan.nbytes].view(plan.dtype)
                for found, part in zip(ranges, pairwise(plan.bounds), strict=True):
                    first, end = (start + bound * plan.dtype.itemsize for bound in part)
                    found.append((first, end))
                # No padding is needed: 64 elements are a multiple of every dtype's size.
                start += plan.nbytes
            self._memories.append(memory)
            self._gathers.append(memory.prepare(ranges))
        self.flats = [flats[index] for index in range(len(plans))]
        self.is_one_copy = any(memory.is_one_copy for memory in self._memories)
        self._views = {
            slot.number: laid_out(
                flat[slot.offset : slot.offset + slot.numel],
                (order or self._parameters)[slot.number],
            )
            for plan, flat in zip(self.plans, self.flats, strict=True)
            for slot in plan.slots
        }
        self._addresses: dict[int, int] = {}  # of the parameters in their places

    def place(self, numbers: Collection[int]) -> None:
        """Move some parameters to their places, with their values.

        Collective: over the group. One copy of a node gets the values of the node's first rank.
        """
        if not self.is_one_copy or self._memories[0].leads:
            for number in numbers:
                self._views[number].copy_(self._parameters[number].detach())
        if self.is_one_copy:
            self._group.barrier()  # after the first rank's copies
        for number in numbers:
            view = self._views[number]
            self._parameters[number].data = view
            self._addresses[number] = view.data_ptr()

    def release(self, number: int) -> None:
        """Copy a parameter to separate memory; its place in the buffer stays unused."""
        parameter = self._parameters[number]
        parameter.data = parameter.detach().clone(memory_format=torch.preserve_format)
        del self._addresses[number]

    def holds(self, number: int) -> bool:
        """Return whether a parameter is in its place."""
        return number in self._addresses

    def view(self, number: int) -> Tensor:
        """Return a parameter's place, in the parameter's shape."""
        return self._views[number]

    def moved(self) -> bool:
        """Return whether a parameter has left its place or changed its dtype or device.

        ``module.to`` and ``module.half`` do so.
        """
        parameters, addresses = self._parameters, self._addresses
        for number, address in addresses.items():
            if parameters[number].data_ptr() != address:
                return True
        if len(addresses) == len(parameters):
            return False
        return any(
            (parameters[number].dtype, parameters[number].device) != (view.dtype, view.device)
            for number, view in self._views.items()
            if number not in addresses
        )

    def require_shapes(self) -> None:
        """Refuse parameters of another shape than their places.

        Raises:
            ValueError: A shape differs.
        """
        for number, view in self._views.items():
            if self._parameters[number].shape != view.shape:
                raise ValueError(
                    f"parameter {number} had shape {tuple(view.shape)} and now has "
                    f"{tuple(self._parameters[number].shape)}: its state does not fit it any more; "
                    "build another optimizer"
                )

    def gather(self) -> None:
        """Copy every rank's shards to all ranks.

        Collective: over the group.

        Blocks: until this rank's copy is complete.
        """
        for gather in self._gathers:
            gather()


def in_memory_order(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Return a tensor's elements as a vector, in the order of its parameter's elements in memory.

    The vector is a view if the tensor has the same order.
    """
    if is_dense(parameter) and not parameter.is_contiguous():
        if tensor.stride() != parameter.stride():
            tensor = torch.empty_strided(
                parameter.shape, parameter.stride(), dtype=tensor.dtype, device=tensor.device
            ).copy_(tensor)
        return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return tensor.reshape(-1)
