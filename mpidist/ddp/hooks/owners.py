"""Hook that reduces gradients to their owners, for an optimizer that is sharded over the ranks.

Each rank gets the average of the elements that it steps, and of no others: a reduce-scatter instead
of an all-reduce. In mpidist's DDP the buckets then rotate in a few buffers, and the elements that a
rank does not own are freed as soon as their bucket is reduced: apart from the buckets in use, a
rank holds only its own share of the gradients (ZeRO-2).

Within a node all ranks add up a bucket in shared memory, as in the plain average, and write each
range to its owner: the same bits. Between nodes, on devices, and around a half-precision copy
(``bf16_compress_wrapper(to_owners(bounds))``) elements are packed by owner and reduced by one
reduce-scatter, which may add up in another order.

Letters: W ranks of the group.

Source: Rajbhandari, Rasley, Ruwase, He, "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models", SC 2020 (arXiv 1910.02054), section 5.2, P_os+g.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist

from mpidist.comm.algorithms.reduce_op import AVG
from mpidist.comm.algorithms.shared_memory import SharedTensor
from mpidist.comm.consistency import comparing
from mpidist.comm.group_types import AnyGroup, Group
from mpidist.comm.world_group import native_group
from mpidist.ddp.buckets.ownership import (
    DEFAULT_BUFFERS,
    Bounds,
    Ownership,
    Range,
    Split,
    require_cover,
    split,
)
from mpidist.ddp.buckets.settings import require_int
from mpidist.ddp.hooks.grad_bucket import GradBucket
from mpidist.ddp.hooks.stages import (
    BucketFuture,
    Hook,
    applied,
    future_of,
    is_in_order,
    run_stages,
)
from mpidist.ddp.hooks.torch_bucket import torch_future
from mpidist.future import Future, completed

Tensor = torch.Tensor
AnyBucket: TypeAlias = "GradBucket | dist.GradBucket"


def to_owners(
    bounds: Mapping[Tensor, Bounds], hook: Hook | None = None, *, buffers: int = DEFAULT_BUFFERS
) -> ToOwners:
    """Return a communication hook that reduces gradients to their owners.

    ``ddp.register_comm_hook(None, to_owners(bounds))`` averages in the gradients' own dtype. Other
    hooks can be put around it and into it: ``bf16_compress_wrapper(to_owners(bounds))`` sends half
    precision; ``register_comm_hook(state, to_owners(bounds, powerSGD_hook))`` reduces by another
    hook on all ranks and frees the elements that a rank does not own.

    After the backward pass ``.grad`` of a parameter is None on a rank that owns no element of it,
    the average on a rank that owns all, and the average with zeros in the other ranks' ranges on a
    rank that owns a part. A pass that adds to averages of an earlier pass gives the sum of both, as
    in plain DDP. Under ``no_sync`` each rank keeps its own gradients of all parameters. Sparse
    gradients are always averaged on all ranks. Optimizers that step in the backward pass are
    refused.

    torch's DDP keeps its buckets and all gradients. There the other ranks' ranges become zeros: the
    same step, without less memory.

    Args:
        bounds: For each parameter its owners: (rank in the group, start, stop) in elements, in the
            order of memory, ascending, from 0 to the number of elements. A parameter without bounds
            is averaged on all ranks.
        hook: Reduces the buckets for all ranks, with the registered state; None for the average.
        buffers: Number of buffers, of the largest bucket's size, in which buckets rotate. With 1,
            no bucket can be filled while another is reduced.

    Raises:
        TypeError: ``hook`` is not callable, or ``buffers`` is no int.
        ValueError: ``buffers`` is not positive.
    """
    return ToOwners(bounds, hook, buffers)


class ToOwners:
    """The hook of ``to_owners``.

    Its state is a group of mpidist, or None for the module's group.

    Attributes:
        ownership: The owners, which a reducer reads.
        is_in_order: The hook starts its collectives in one order on all ranks by itself.
    """

    def __init__(self, bounds: Mapping[Tensor, Bounds], hook: Hook | None, buffers: int) -> None:
        if hook is not None and not callable(hook):
            raise TypeError(f"to_owners needs a hook that can be called; got {type(hook).__name__}")
        require_int("the number of buffers", buffers, least=1)
        self.ownership = Ownership(bounds, buffers)
        self.is_in_order = hook is None or is_in_order(hook)
        self._hook = hook
        # By bucket, with the parameters for which the split was computed.
        self._splits: dict[int, tuple[tuple[int, ...], Split]] = {}
        self._compared: set[str] = set()  # groups whose ranks have the same bounds
        # torch's DDP reads a hook's name and signature.
        self.__name__ = self.__qualname__ = "to_owners"
        names = ("state", "bucket")
        self.__signature__ = inspect.Signature(
            [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in names]
        )

    def __call__(self, state: AnyGroup, bucket: AnyBucket) -> BucketFuture:
        """Reduce one bucket, ours or torch's; return a future of its buffer, ours or torch's.

        Raises:
            TypeError, ValueError, DisagreementError: The bounds are wrong. mpidist's DDP raises
                this at the registration; torch's does not compare bounds.
        """
        own = bucket if isinstance(bucket, GradBucket) else None
        takes_turns = own is not None and own.takes_turns()
        if takes_turns and self._hook is not None:
            return self._hook(state, bucket)
        group = self._group_of(state, bucket)
        parts = self._split_of(group, bucket)
        buffer = bucket.buffer()
        if self._hook is not None:
            future = future_of(self._hook(state, bucket))
        else:
            future = _reduce(group, buffer, None if own is None else own.node_tensor(), parts)
        if takes_turns:
            return future

        def without_others(result: Tensor) -> Tensor:
            for rank, ranges in enumerate(parts.by_rank):
                if rank != group.rank:
                    for start, stop in ranges:
                        result.view(-1)[start:stop].zero_()
            return result

        result = future.then(applied(without_others, buffer.numel()))
        if own is None and isinstance(result, Future):
            return torch_future(result, buffer)
        return result

    def _group_of(self, state: AnyGroup, bucket: AnyBucket) -> Group:
        own = bucket.group() if isinstance(bucket, GradBucket) else None
        if own is not None and (state is None or self._hook is not None):
            return own
        group = native_group(None if self._hook is not None else state)
        if own is not None and group.world_ranks != own.world_ranks:
            raise ValueError(
                f"to_owners got a group of world ranks {list(group.world_ranks)} as its state; the "
                f"module is on ranks {list(own.world_ranks)}, to which the bounds belong"
            )
        return group

    def _split_of(self, group: Group, bucket: AnyBucket) -> Split:
        parameters = bucket.parameters()
        key = (group.size, *map(id, parameters))
        held = self._splits.get(bucket.index())
        if held is None or held[0] != key:
            if not (isinstance(bucket, GradBucket) and bucket.takes_turns()):
                self._require_agreed(group)
            bounds = [self.ownership.bounds.get(parameter) for parameter in parameters]
            held = self._splits[bucket.index()] = (
                key,
                split([p.numel() for p in parameters], bounds, group.size),
            )
        return held[1]

    def _require_agreed(self, group: Group) -> None:
        """Compare the bounds at the first bucket of a module whose reducer has not done so.

        Collective: over the group.
        """
        if group.key in self._compared:
            return
        with comparing(group, "to_owners") as rows:
            for number, (parameter, owners) in enumerate(self.ownership.bounds.items()):
                name = f"parameter number {number}"
                owned = require_cover(f"number {number}", owners, parameter.numel(), group.size)
                rows.append((f"{name} of shape {tuple(parameter.shape)} owned by", owned))
        self._compared.add(group.key)


def _reduce(
    group: Group, buffer: Tensor, node_tensor: SharedTensor | None, parts: Split
) -> Future[Tensor]:
    """Average each rank's ranges of a flat tensor in place; other ranges become undefined."""
    if group.size == 1:
        return completed(buffer)
    if node_tensor is not None and node_tensor.group is group:
        node_tensor.reduce_to_owners(parts.by_rank, parts.common)
        return completed(buffer)

    def stages() -> None:
        if parts.common:
            common = _packed(buffer, parts.common)
            group.all_reduce(common, AVG)
            _unpack(common, buffer, parts.common)
        if any(parts.by_rank):
            inputs = [_packed(buffer, ranges) for ranges in parts.by_rank]
            own = torch.empty_like(inputs[group.rank])
            group.reduce_scatter(own, inputs, AVG)
            _unpack(own, buffer, parts.by_rank[group.rank])

    return run_stages(group, buffer, stages)


def _packed(flat: Tensor, ranges: Sequence[Range]) -> Tensor:
    """Return the elements of ranges in one tensor, which is a view if there is one range."""
    pieces = [flat[start:stop] for start, stop in ranges]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces) if pieces else flat[:0]


def _unpack(packed: Tensor, flat: Tensor, ranges: Sequence[Range]) -> None:
    """Write elements that ``_packed`` returned back to their ranges."""
    targets = [flat[start:stop] for start, stop in ranges]
    if targets and packed.data_ptr() != targets[0].data_ptr():
        torch._foreach_copy_(targets, list(packed.split([stop - start for start, stop in ranges])))
