"""Parameters as views of flat buffers, which all ranks fill together.

Letters: W ranks; N elements of a buffer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from mpidist.comm import shard_memory
from mpidist.comm.shard_memory import ShardMemory
from mpidist.comm.work import Work
from mpidist.kernels.view import is_dense, laid_out
from mpidist.zero.buffer_plan import UNIT, BufferPlan

Tensor = torch.Tensor
Spans = list[tuple[int, int]]  # for each rank its elements, as first and end


class FlatBuffers:
    """Memory of some parameters: one flat buffer for each plan.

    Collective: constructed by all ranks of the group with the same plans; the parameters stay where
    they are until ``place_parameters``.

    Args:
        parameters: By number; those that the plans name.
        one_copy: The ranks of a node hold one copy of host memory.
        order: Tensors in whose strides the parameters are laid out; their own if None.

    Attributes:
        plans: The plans.
        flats: For each plan its N elements.
        is_one_copy: Host memory is the node's, and what one rank writes all its ranks read.
    """

    def __init__(
        self,
        group: Any,
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
        self._memories: list[tuple[ShardMemory, list[int]]] = []
        self._starts = [0] * len(plans)  # bytes, in the memory of each plan
        flats: dict[int, Tensor] = {}
        for device in dict.fromkeys(plan.device for plan in plans):
            places = [place for place, plan in enumerate(plans) if plan.device == device]
            memory = self._allocated(device, places, one_copy)
            self._memories.append((memory, places))
            for place in places:
                start, plan = self._starts[place], plans[place]
                flats[place] = memory.own[start : start + plan.nbytes].view(plan.dtype)
        self.flats = [flats[place] for place in range(len(plans))]
        self.is_one_copy = any(memory.is_one_copy for memory, _ in self._memories)
        self._views = {
            slot.number: laid_out(
                flat[slot.offset : slot.offset + slot.numel],
                (order or self._parameters)[slot.number],
            )
            for plan, flat in zip(self.plans, self.flats, strict=True)
            for slot in plan.slots
        }
        self._addresses: dict[int, int] = {}  # of the parameters that lie here

    def _allocated(
        self, device: torch.device, places: Sequence[int], one_copy: bool
    ) -> ShardMemory:
        nbytes = 0
        for place in places:  # 64 elements are a multiple of every dtype's size
            self._starts[place] = nbytes
            nbytes += self.plans[place].nbytes
        if device.type == "cpu":
            return shard_memory.allocate(self._group, nbytes, one_copy)
        return shard_memory.on_device(self._group, nbytes, device)

    def place_parameters(self) -> None:
        """Move the parameters here, with their values.

        Collective: over the group. Where a node holds one copy, the values of its first rank hold.
        """
        self.place(self._views)

    def place(self, numbers: Sequence[int] | Mapping[int, Any]) -> None:
        """Move some of the parameters here, with their values. Collective: over the group."""
        if not self.is_one_copy or self._memories[0][0].leads:
            for number in numbers:
                self._views[number].copy_(self._parameters[number].detach())
        if self.is_one_copy:
            self._group.barrier()  # the values are there
        for number in numbers:
            view = self._views[number]
            self._parameters[number].data = view
            self._addresses[number] = view.data_ptr()

    def release(self, number: int) -> None:
        """Give a parameter memory of its own, with its value; its place here stays."""
        parameter = self._parameters[number]
        parameter.data = parameter.detach().clone(memory_format=torch.preserve_format)
        del self._addresses[number]

    def holds(self, number: int) -> bool:
        """Say whether a parameter lies here."""
        return number in self._addresses

    def view(self, number: int) -> Tensor:
        """Return the place of a parameter, in its shape."""
        return self._views[number]

    def moved(self) -> bool:
        """Say whether somebody has put parameters elsewhere that lay here (``module.to``), or changed others' dtype or device."""
        parameters, addresses = self._parameters, self._addresses
        if any(parameters[number].data_ptr() != address for number, address in addresses.items()):
            return True
        if len(addresses) == len(parameters):
            return False
        return any(
            (parameters[number].dtype, parameters[number].device) != (view.dtype, view.device)
            for number, view in self._views.items()
            if number not in addresses
        )

    def require_shapes(self) -> None:
        """Refuse parameters that have another shape than their places.

        Raises:
            ValueError: There is one.
        """
        for number, view in self._views.items():
            if self._parameters[number].shape != view.shape:
                raise ValueError(
                    f"parameter {number} had shape {tuple(view.shape)} and now has "
                    f"{tuple(self._parameters[number].shape)}: its "
                    "state does not fit it any more; build another optimizer"
                )

    def gather(self) -> None:
        """Bring every rank's shard into all copies.

        Collective: over the group.

        Blocks: until the copies of this rank are complete.
        """
        for memory, places in self._memories:
            memory.gather(self._ranges(places, BufferPlan.parts))

    def gather_slices(self, cap_bytes: float) -> list[tuple[list[int], list[Work]]]:
        """Start to bring every rank's shard into all copies, slice by slice: the first part of each, then the second.

        So all ranks send at a time, whoever owns the parameters that are used next.

        Collective: over the group, in the order of its operations.

        Args:
            cap_bytes: At most so many bytes in one slice of all shards together, up to rounding.

        Returns:
            For each slice the numbers of the parameters of which it holds anything, and its works.
        """
        count = max(math.ceil(sum(plan.nbytes for plan in self.plans) / cap_bytes), 1)
        found = []
        for index in range(count):
            numbers: dict[int, None] = {}
            works = []
            for memory, places in self._memories:
                sliced = partial(_slices, index=index, count=count)
                for place in places:
                    plan = self.plans[place]
                    for first, end in sliced(plan):
                        for slot in plan.slots:
                            if first < slot.offset + slot.numel and slot.offset < end:
                                numbers[slot.number] = None
                work = memory.gather(self._ranges(places, sliced), async_op=True)
                if work is not None:
                    works.append(work)
            found.append((list(numbers), works))
        return found

    def _ranges(
        self, places: Sequence[int], parts: Callable[[BufferPlan], Sequence[tuple[int, int]]]
    ) -> list[list[tuple[int, int]]]:
        """Return for each rank the bytes, in a memory of some plans, of its part of each plan's elements."""
        ranges: list[list[tuple[int, int]]] = [[] for _ in range(self._group.size)]
        for place in places:
            start, size = self._starts[place], self.plans[place].dtype.itemsize
            for rank, (first, end) in enumerate(parts(self.plans[place])):
                ranges[rank].append((start + first * size, start + end * size))
        return ranges


def _slices(plan: BufferPlan, index: int, count: int) -> Spans:
    """Return for each rank the ``index``-th of ``count`` slices of its shard."""
    return [_sliced(low, high, index, count) for low, high in plan.parts()]


def _sliced(low: int, high: int, index: int, count: int) -> tuple[int, int]:
    """Return the ``index``-th of ``count`` slices of elements ``low`` to ``high``, as first and end."""
    bounds = [low + (high - low) * place // count // UNIT * UNIT for place in range(count)] + [high]
    return bounds[index], bounds[index + 1]


def in_memory_order(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Return a tensor's elements as one vector, in the order in which its parameter's elements lie; a view if it lies so, too."""
    if is_dense(parameter) and not parameter.is_contiguous():
        if tensor.stride() != parameter.stride():
            tensor = torch.empty_strided(
                parameter.shape, parameter.stride(), dtype=tensor.dtype, device=tensor.device
            ).copy_(tensor)
        return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return tensor.reshape(-1)
