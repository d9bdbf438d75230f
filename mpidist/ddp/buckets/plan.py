"""Assignment of gradients to buckets by size: pure.

The results of ``compute_bucket_assignment_by_size`` are torch's; the cap on the number of buckets
is not in torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TypeAlias

import torch

from mpidist.ddp.buckets.settings import require_int

FIRST_BUCKET_BYTES = 1 << 20  # small, so that communication starts early in the backward pass
DEFAULT_BUCKET_CAP_MB = 25.0
_MIB = 1 << 20

# One bucket of a plan: places of its tensors in the planned list, in the order of the bucket.
Places: TypeAlias = tuple[int, ...]
Kind: TypeAlias = tuple[torch.dtype, torch.device]


def limits_of(
    bucket_cap_mb: float | None = None,
    bucket_cap_mb_list: Sequence[float] | None = None,
    first_bucket_bytes: int = FIRST_BUCKET_BYTES,
) -> tuple[int, ...]:
    """Return DDP's caps as limits in bytes.

    Args:
        bucket_cap_mb: MiB of every bucket. None: 25, with a smaller first bucket.
        bucket_cap_mb_list: MiB of the first, the second, … bucket; the last value is used for all
            following buckets. Overrides ``bucket_cap_mb``.

    Raises:
        ValueError: A cap is not positive, or not finite.
        TypeError: A cap is no number, or ``bucket_cap_mb_list`` no list.

    Source:
        torch 2.13's ``_BucketCapacityConfig``.
    """
    if bucket_cap_mb_list is not None and not isinstance(bucket_cap_mb_list, (list, tuple)):
        raise TypeError(
            "bucket_cap_mb_list must be a list of numbers of MiB; got "
            f"{type(bucket_cap_mb_list).__name__}"
        )
    caps = tuple(
        bucket_cap_mb_list
        or (bucket_cap_mb if bucket_cap_mb is not None else DEFAULT_BUCKET_CAP_MB,)
    )
    if not all(isinstance(cap, (int, float)) and not isinstance(cap, bool) for cap in caps):
        raise TypeError(
            "a bucket's cap must be a number of MiB; got "
            f"{', '.join(type(cap).__name__ for cap in caps)}"
        )
    if not all(math.isfinite(cap) for cap in caps):
        raise ValueError(
            f"a bucket's cap must be finite; got {', '.join(f'{cap:g}' for cap in caps)} MiB"
        )
    limits = tuple(int(cap * _MIB) for cap in caps)
    if min(limits) <= 0:
        raise ValueError(
            f"a bucket's cap must be positive; got {', '.join(f'{cap:g}' for cap in caps)} MiB"
        )
    if bucket_cap_mb is None and not bucket_cap_mb_list and first_bucket_bytes < limits[0]:
        return (first_bucket_bytes, *limits)
    return limits


def compute_bucket_assignment_by_size(
    tensors: Sequence[torch.Tensor],
    limits: Sequence[int],
    order: Sequence[int] | None = None,
    expects_sparse: Sequence[bool] = (),
) -> list[list[int]]:
    """Assign tensors to buckets.

    Args:
        tensors: Tensors of any dtypes and devices; a bucket holds one dtype on one device.
        limits: Bytes at which a bucket closes. For each (dtype, device) the first bucket has the
            first limit, the second the second, and so on; the last is used for all that follow.
        order: Places of ``tensors`` in the order in which they fill buckets; None for the order of
            the list.
        expects_sparse: For each tensor whether its gradients are sparse, and the tensor has a
            bucket of its own; empty for none.

    Returns:
        For each bucket the places of its tensors. Without ``order``, sorted by each bucket's
        smallest place; with ``order``, closed buckets in the order in which they closed, then the
        others.

    Raises:
        ValueError: There is no tensor, no limit, or a limit is not positive.

    Source:
        ``torch.distributed._compute_bucket_assignment_by_size``
        (torch/csrc/distributed/c10d/reducer.cpp).
    """
    return [list(places) for places in assign(tensors, limits, order, expects_sparse)]


def assign(
    tensors: Sequence[torch.Tensor],
    limits: Sequence[int],
    order: Sequence[int] | None = None,
    expects_sparse: Sequence[bool] = (),
) -> list[Places]:
    """Assign tensors to buckets; see ``compute_bucket_assignment_by_size``."""
    if not tensors:
        raise ValueError("there is no tensor to put into a bucket")
    if not limits or min(limits) <= 0:
        raise ValueError(
            f"a bucket plan needs at least one limit, all of them positive; got {list(limits)}"
        )
    closed: list[Places] = []
    # Limits in use, and the open bucket with its size: by dtype and device.
    used: dict[Kind, int] = {}
    filling: dict[Kind, list[int]] = {}
    filled_bytes: dict[Kind, int] = {}
    for place in range(len(tensors)) if order is None else order:
        tensor = tensors[place]
        if expects_sparse and expects_sparse[place]:
            closed.append((place,))
            continue
        kind = (tensor.dtype, tensor.device)
        filling.setdefault(kind, []).append(place)
        filled_bytes[kind] = filled_bytes.get(kind, 0) + _size_bytes(tensor)
        if filled_bytes[kind] >= limits[min(used.get(kind, 0), len(limits) - 1)]:
            closed.append(tuple(filling.pop(kind)))
            used[kind] = used.get(kind, 0) + 1
            filled_bytes[kind] = 0
    buckets = [*closed, *map(tuple, filling.values())]
    return sorted(buckets, key=min) if order is None else buckets


def merge(
    tensors: Sequence[torch.Tensor],
    buckets: Sequence[Places],
    most: int,
    expects_sparse: Sequence[bool] = (),
) -> list[Places]:
    """Merge neighboring buckets, the smallest pair first, until at most ``most`` are left.

    Fewer buckets suit a network whose latency outweighs its bandwidth. A bucket holds one dtype on
    one device, so that more buckets may be left. Buckets of sparse gradients stay as they are.

    Raises:
        TypeError: ``most`` is no int.
        ValueError: ``most`` is not positive.
    """
    require_int("the number of buckets", most, least=1)
    merged = list(buckets)
    while len(merged) > most:
        pairs = [
            (size_bytes(tensors, left + right), index)
            for index, (left, right) in enumerate(pairwise(merged))
            if _kind(tensors, left) == _kind(tensors, right)
            and not (expects_sparse and (expects_sparse[left[0]] or expects_sparse[right[0]]))
        ]
        if not pairs:
            break
        _, index = min(pairs)
        merged[index : index + 2] = [merged[index] + merged[index + 1]]
    return merged


def by_place(buckets: Sequence[Sequence[str]], names: Sequence[str]) -> list[Places]:
    """Return buckets of names as buckets of places in ``names``.

    Raises:
        ValueError: The buckets do not hold each of ``names`` once.
    """
    place_of = {name: place for place, name in enumerate(names)}
    planned = [name for bucket in buckets for name in bucket]
    wrong = set(planned) ^ set(place_of) or {n for n in planned if planned.count(n) > 1}
    if wrong:
        raise ValueError(
            "the plan does not hold each parameter of this module once; look at "
            f"{', '.join(sorted(wrong)[:10])}"
        )
    return [tuple(place_of[name] for name in bucket) for bucket in buckets]


def size_bytes(tensors: Sequence[torch.Tensor], bucket: Sequence[int]) -> int:
    """Return the size of a bucket in bytes."""
    return sum(_size_bytes(tensors[place]) for place in bucket)


def _size_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()  # ``nbytes`` is not defined for sparse tensors


def _kind(tensors: Sequence[torch.Tensor], bucket: Places) -> Kind:
    first = tensors[bucket[0]]
    return first.dtype, first.device
