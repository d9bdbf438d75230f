"""Collectives of a program, through the native API or through ``torch.distributed``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mpidist.comm.algorithms.reduce_op import PremulSum
from tests.fuzz.operands import exchanged
from tests.fuzz.programs import Call
from tests.fuzz.values import obj

_TORCH_OPS = {
    "sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX, "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR, "bxor": dist.ReduceOp.BXOR,
}  # fmt: skip


# Renamed in torch 2.12.
_all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@dataclass
class Handle:
    """Group of a program on this rank."""

    native: Any
    torch: Any = None

    @property
    def rank(self) -> int:
        return self.native.rank

    @property
    def size(self) -> int:
        return self.native.size


def issue(handle: Handle, call: Call, inputs: list[Any], outputs: list[Any]) -> Any:
    """Issue a collective of tensors; return its API's result: None if synchronous, else a Work."""
    is_async = call.is_async[handle.rank]
    if call.apis[handle.rank] == "torch":
        return _torch(handle, call, inputs, outputs, is_async)
    return _native(handle, call, inputs, outputs, is_async)


def _native(
    handle: Handle, call: Call, inputs: list[Any], outputs: list[Any], is_async: bool
) -> Any:
    group, kind, root, rank = handle.native, call.kind, call.root, handle.rank
    op: Any = PremulSum(call.factors[rank]) if call.factors else call.op
    is_root = rank == root
    if kind == "barrier":
        return group.barrier(is_async)
    if kind == "all_reduce":
        return group.all_reduce(inputs[0], op, is_async)
    if kind == "all_reduce_coalesced":
        return group.all_reduce_coalesced(inputs, op, is_async)
    if kind == "reduce":
        return group.reduce(inputs[0], root, op, is_async)
    if kind == "broadcast":
        return group.broadcast((inputs or outputs)[0], root, is_async)
    if kind == "broadcast_coalesced":
        return group.broadcast_coalesced(inputs or outputs, root, is_async)
    if kind == "all_gather":
        return group.all_gather(outputs, inputs[0], is_async)
    if kind == "all_gather_into_tensor":
        return group.all_gather_into_tensor(outputs[0], inputs[0], is_async)
    if kind == "all_gather_into_tensor_coalesced":
        return group.all_gather_into_tensor_coalesced(outputs, inputs, is_async)
    if kind == "gather":
        return group.gather(inputs[0], outputs if is_root else None, root, is_async)
    if kind == "scatter":
        return group.scatter(outputs[0], inputs if is_root else None, root, is_async)
    if kind == "reduce_scatter":
        return group.reduce_scatter(outputs[0], inputs, op, is_async)
    if kind == "reduce_scatter_tensor":
        return group.reduce_scatter_tensor(outputs[0], inputs[0], op, is_async)
    if kind == "reduce_scatter_tensor_coalesced":
        return group.reduce_scatter_tensor_coalesced(outputs, inputs, op, is_async)
    if kind == "all_to_all":
        return group.all_to_all(outputs, inputs, is_async)
    assert kind == "all_to_all_single"
    return group.all_to_all_single(outputs[0], inputs[0], *_splits(handle, call), is_async)


def _torch(
    handle: Handle, call: Call, inputs: list[Any], outputs: list[Any], is_async: bool
) -> Any:
    group, kind, root, rank = handle.torch, call.kind, call.root, handle.rank
    op: Any = (
        dist._make_nccl_premul_sum(float(call.factors[rank]))
        if call.factors
        else _TORCH_OPS[call.op]
    )
    is_root = rank == root
    if kind == "barrier":
        return dist.barrier(group, is_async)
    if kind == "all_reduce":
        return dist.all_reduce(inputs[0], op, group, is_async)
    if kind == "all_reduce_coalesced":
        return _coalesced(
            group, is_async, lambda: [dist.all_reduce(tensor, op, group) for tensor in inputs]
        )
    if kind == "reduce":
        return dist.reduce(inputs[0], group_dst=root, op=op, group=group, async_op=is_async)
    if kind == "broadcast":
        return dist.broadcast(
            (inputs or outputs)[0], group_src=root, group=group, async_op=is_async
        )
    if kind == "broadcast_coalesced":
        options = dist.BroadcastOptions()
        options.rootRank, options.asyncOp = root, is_async
        tensors = inputs or outputs
        work = group.broadcast(tensors, options)
        return work if is_async else work.wait() and None
    if kind == "all_gather":
        return dist.all_gather(outputs, inputs[0], group, is_async)
    if kind == "all_gather_into_tensor":
        return _all_gather_single(outputs[0], inputs[0], group, is_async)
    if kind == "all_gather_into_tensor_coalesced":
        return _coalesced(
            group,
            is_async,
            lambda: [
                _all_gather_single(*pair, group) for pair in zip(outputs, inputs, strict=True)
            ],
        )
    if kind == "gather":
        return dist.gather(
            inputs[0], outputs if is_root else None, group_dst=root, group=group, async_op=is_async
        )
    if kind == "scatter":
        return dist.scatter(
            outputs[0], inputs if is_root else None, group_src=root, group=group, async_op=is_async
        )
    if kind == "reduce_scatter":
        return dist.reduce_scatter(outputs[0], inputs, op, group, is_async)
    if kind == "reduce_scatter_tensor":
        return _reduce_scatter_single(outputs[0], inputs[0], op, group, is_async)
    if kind == "reduce_scatter_tensor_coalesced":
        return _coalesced(
            group,
            is_async,
            lambda: [
                _reduce_scatter_single(*pair, op, group)
                for pair in zip(outputs, inputs, strict=True)
            ],
        )
    if kind == "all_to_all":
        return dist.all_to_all(outputs, inputs, group, is_async)
    assert kind == "all_to_all_single"
    return dist.all_to_all_single(outputs[0], inputs[0], *_splits(handle, call), group, is_async)


def _splits(handle: Handle, call: Call) -> tuple[Any, Any]:
    sends, receives = exchanged(call, handle.rank, handle.size)
    if len(set(call.counts)) == 1 and call.seed % 2:
        return None, None
    return receives, sends


def _coalesced(group: Any, is_async: bool, calls: Any) -> Any:
    with dist.distributed_c10d._coalescing_manager(group, async_ops=is_async) as manager:
        calls()
    return manager.works[0] if is_async else None


# --- objects ---


def objects(handle: Handle, call: Call) -> str:
    """Execute a collective of objects; return a description of a wrong result."""
    rank, root, size = handle.rank, call.root, handle.size
    is_torch = call.apis[rank] == "torch"
    objects_by_rank = [
        obj(f"{call.seed} {place}", call.counts[place], call.odd_strides, is_torch)
        for place in range(size)
    ]
    got = (_torch_objects if is_torch else _native_objects)(handle, call, objects_by_rank)
    if call.kind in ("broadcast_object", "broadcast_object_list"):
        want: Any = (
            objects_by_rank[root]
            if call.kind == "broadcast_object"
            else [objects_by_rank[root], root]
        )
    elif call.kind == "scatter_object":
        want = objects_by_rank[rank]
    else:
        want = objects_by_rank if call.kind == "all_gather_object" or rank == root else None
    return "" if equal(got, want) else f"expected {str(want)[:300]}, got {str(got)[:300]}"


def _native_objects(handle: Handle, call: Call, objects_by_rank: list[Any]) -> Any:
    group, rank, root = handle.native, handle.rank, call.root
    if call.kind == "broadcast_object":
        return group.broadcast_object(objects_by_rank[root] if rank == root else None, root)
    if call.kind == "broadcast_object_list":
        received = [objects_by_rank[root], root] if rank == root else [None, None]
        group.broadcast_object_list(received, root)
        return received
    if call.kind == "all_gather_object":
        return group.all_gather_object(objects_by_rank[rank])
    if call.kind == "gather_object":
        return group.gather_object(objects_by_rank[rank], root)
    return group.scatter_object(objects_by_rank if rank == root else None, root)


def _torch_objects(handle: Handle, call: Call, objects_by_rank: list[Any]) -> Any:
    group, rank, root, size = handle.torch, handle.rank, call.root, handle.size
    if call.kind in ("broadcast_object", "broadcast_object_list"):
        received: list[Any] = [objects_by_rank[root], root] if rank == root else [None, None]
        dist.broadcast_object_list(received, group_src=root, group=group)
        return received if call.kind == "broadcast_object_list" else received[0]
    if call.kind == "all_gather_object":
        received = [None] * size
        dist.all_gather_object(received, objects_by_rank[rank], group)
        return received
    if call.kind == "gather_object":
        target: list[Any] | None = [None] * size if rank == root else None
        dist.gather_object(objects_by_rank[rank], target, group_dst=root, group=group)
        return target
    received = [None]
    dist.scatter_object_list(
        received, objects_by_rank if rank == root else None, group_src=root, group=group
    )
    return received[0]


def equal(got: Any, want: Any) -> bool:
    """Compare nested objects with tensors and arrays in them."""
    if type(got) is not type(want):
        return False
    if isinstance(want, torch.Tensor):
        return (
            got.dtype == want.dtype
            and got.shape == want.shape
            and got.contiguous().flatten().tolist() == want.contiguous().flatten().tolist()
        )
    if isinstance(want, dict):
        return got.keys() == want.keys() and all(equal(got[key], want[key]) for key in want)
    if isinstance(want, (list, tuple)):
        return len(got) == len(want) and all(equal(*pair) for pair in zip(got, want, strict=True))
    if hasattr(want, "dtype"):
        return got.dtype == want.dtype and bool((got == want).all())
    return bool(got == want)
