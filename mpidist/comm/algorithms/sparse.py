"""All-reduce of sparse COO tensors, by a group's own dense collectives.

Ranks hold different elements, in any order, some of them twice. Each rank sums its duplicates and
encodes an element's indices as one number, its key; an all-gather distributes the keys of all
ranks. Over the union of the keys the values are a dense tensor of the same shape on all ranks,
which the dense all-reduce reduces: for every dtype, with the same bits on all ranks. The transfer
is 2·U·D elements, where an all-gather of the values would be W·n·D.

Letters: W ranks; n keys of one rank; U keys of all ranks; D elements of the dense dimensions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from mpidist.comm.algorithms import fingerprint, reduce_op
from mpidist.comm.algorithms.reduce_op import ReduceOp
from mpidist.comm.mpi.communicator import Communicator

Tensor = torch.Tensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def facts(tensor: Tensor, op: ReduceOp) -> tuple[tuple[str, object], ...]:
    """Return the facts that must be equal on all ranks."""
    dims = f"{tensor.sparse_dim()} sparse and {tensor.dense_dim()} dense"
    return (("layout", tensor.layout), ("dimensions", dims), ("tensor", tensor), ("op", op))


@torch.no_grad()
def all_reduce(group: Any, comm: Communicator, where: str, tensor: Tensor, op: ReduceOp) -> None:
    """Reduce a sparse COO tensor over all ranks, in place; the result is coalesced.

    Collective: over the group, within ``in_order``.

    Args:
        group: The group.
        comm: The group's communicator, to compare the facts.
        where: Rank, group and operation, for errors.
        tensor: The tensor.
        op: The reduction.

    Raises:
        DisagreementError: On all ranks, if shapes, dimensions, dtypes or operations differ.
    """
    keys, values = coalesce(tensor)
    counts = _exchange_counts(
        group, comm, where, keys.numel(), fingerprint.describe("all_reduce", 0, facts(tensor, op))
    )
    gathered = keys.new_empty(sum(counts))
    if sum(counts):
        group.all_gather(list(gathered.split(counts)), keys)
    union = torch.unique(gathered)  # sorted, as a coalesced tensor's indices are
    total = torch.zeros(union.numel(), *values.shape[1:], dtype=tensor.dtype, device=tensor.device)
    if values.numel():
        _as_rows(total).index_copy_(0, torch.searchsorted(union, keys), _as_rows(values))
    if total.numel():
        group.all_reduce(total, op)
    indices = _indices_of(union, tensor.shape[: tensor.sparse_dim()])
    result = torch.sparse_coo_tensor(
        indices, total, tensor.shape, is_coalesced=True, check_invariants=False
    )
    # Inference tensors can be written in inference mode only, and a mode belongs to a thread.
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        tensor.copy_(result)


def coalesce(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return unique keys and their values (n × the dense dimensions); duplicates are summed.

    Half types and narrower types are summed in fp32 and rounded once.
    """
    values = tensor._values().contiguous()
    keys = _keys_of(tensor._indices(), tensor.shape[: tensor.sparse_dim()])
    if tensor.is_coalesced():
        return keys, values
    unique, places = torch.unique(keys, return_inverse=True)
    if unique.numel() == keys.numel():
        return keys, values
    dtype = values.dtype
    if dtype in reduce_op.SIGNED:
        total = _sum_by_key(values.view(reduce_op.SIGNED[dtype]), places, unique.numel()).view(
            dtype
        )
    elif dtype is torch.bool:
        total = _sum_by_key(values.to(torch.int64), places, unique.numel()) != 0
    else:
        total = _sum_by_key(
            values.to(reduce_op.ACCUMULATES_IN.get(dtype, dtype)), places, unique.numel()
        ).to(dtype)
    return unique, total


def _sum_by_key(values: Tensor, places: Tensor, count: int) -> Tensor:
    return values.new_zeros(count, *values.shape[1:]).index_add_(0, places, values)


def _exchange_counts(
    group: Any, comm: Communicator, where: str, count: int, line: str
) -> list[int]:
    """Return each rank's number of keys; the same message compares the ranks' facts."""
    digest = int.from_bytes(hashlib.blake2b(line.encode(), digest_size=7).digest(), "little")
    table = torch.empty(2 * group.size, dtype=torch.int64, device="cpu")
    group.all_gather_into_tensor(table, torch.tensor([count, digest], device="cpu"))
    counts, digests = table.view(-1, 2).t().tolist()
    if len(set(digests)) > 1:
        fingerprint.check(comm, where, line)
    return [int(number) for number in counts]


def _keys_of(indices: Tensor, shape: Sequence[int]) -> Tensor:
    keys = indices.new_zeros(indices.shape[1])
    for row, size in zip(indices, shape, strict=True):
        keys = keys * size + row
    return keys


def _indices_of(keys: Tensor, shape: Sequence[int]) -> Tensor:
    indices = keys.new_empty(len(shape), keys.numel())
    rest = keys
    for dim in reversed(range(len(shape))):
        indices[dim] = rest % max(shape[dim], 1)
        rest = rest // max(shape[dim], 1)
    return indices


def _as_rows(values: Tensor) -> Tensor:
    """Return a tensor's memory as rows of integers, which torch can index for every size."""
    return values.view(values.shape[0], -1).view(_INTEGERS[values.element_size()])
