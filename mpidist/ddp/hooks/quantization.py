"""Quantization of gradients to uint8: each rank sends bytes, and all average what was sent.

Scales and zero points (one for the bucket, or one per channel of 512 elements) are sent with the
bytes, in one collective:

- up to five ranks, all to all: W · N bytes arrive at each rank;
- beyond, each rank's share to that rank, which averages the share, and the averages back to all in
  fp32: 5 · N bytes, for any W.

Both add up the same numbers in the order of the ranks: all ranks hold the same bits.

Letters: W ranks; N elements of a bucket.

Source: ``torch.distributed.algorithms.ddp_comm_hooks.quantization_hooks``, for names, blocks and
averages. torch sends scales and bytes in two collectives, and W · N bytes always; its hook per
channel needs NCCL. A block that is not finite becomes NaN on all ranks, which a GradScaler detects.
"""

from __future__ import annotations

import weakref

import torch

from mpidist.comm.group_types import AnyGroup, Group
from mpidist.comm.world_group import native_group
from mpidist.ddp.buckets.settings import require_int
from mpidist.ddp.hooks import uint8_blocks
from mpidist.ddp.hooks.grad_bucket import GradBucket
from mpidist.ddp.hooks.stages import in_order, run_stages
from mpidist.ddp.hooks.torch_bucket import on_either_module
from mpidist.future import Future

Tensor = torch.Tensor

CHANNEL = 512  # elements that share a scale in the hook per channel; torch's default
MOST_TO_ALL = 5  # ranks; above, the shares' 5 · N bytes are less than W · N

# One set of buffers per group, because a group reduces one bucket after the other.
_memory: weakref.WeakKeyDictionary[Group, dict[tuple[str, torch.device], Tensor]] = (
    weakref.WeakKeyDictionary()
)


@in_order
@on_either_module
def quantization_pertensor_hook(process_group: AnyGroup, bucket: GradBucket) -> Future[Tensor]:
    """Average the bucket in uint8, with one scale: a quarter of the bytes of fp32."""
    return _reduced(process_group, bucket, None)


@in_order
@on_either_module
def quantization_perchannel_hook(
    process_group: AnyGroup, bucket: GradBucket, bucket_size: int = CHANNEL
) -> Future[Tensor]:
    """Average the bucket in uint8, with one scale per ``bucket_size`` elements.

    Raises:
        TypeError: ``bucket_size`` is no int.
        ValueError: ``bucket_size`` is below 1.
    """
    require_int("bucket_size", bucket_size, least=1)
    return _reduced(process_group, bucket, bucket_size)


def _reduced(process_group: AnyGroup, bucket: GradBucket, block: int | None) -> Future[Tensor]:
    group, buffer = native_group(process_group), bucket.buffer()

    def stages() -> None:
        flat = torch.view_as_real(buffer).view(-1) if buffer.dtype.is_complex else buffer.view(-1)
        if flat.numel():
            average_quantized(group, flat, min(block or flat.numel(), flat.numel()))

    return run_stages(group, buffer, stages)


def average_quantized(group: Group, flat: Tensor, block: int) -> None:
    """Replace ``flat`` by the average of all ranks' quantized tensors.

    Collective: over the group, with as many elements and one ``block`` on all ranks.

    Args:
        flat: N > 0 elements of a real dtype, contiguous.
        block: Elements that share a scale, at most N.
    """
    if group.size <= MOST_TO_ALL:
        _to_all(group, flat, block)
    else:
        _by_shares(group, flat, block)


def _to_all(group: Group, flat: Tensor, block: int) -> None:
    length = uint8_blocks.packed_bytes(flat.numel(), block)
    own, rows = (
        _scratch(group, "sent", length, flat),
        _scratch(group, "received", group.size * length, flat),
    )
    uint8_blocks.pack(flat, block, own)
    group.all_gather_into_tensor(rows, own)
    uint8_blocks.average(rows.view(group.size, length), flat.numel(), block, flat)


def _by_shares(group: Group, flat: Tensor, block: int) -> None:
    bounds = share_bounds(flat.numel(), block, group.size)
    longest = bounds[0][1]
    length = uint8_blocks.packed_bytes(longest, block)
    sent, received = (
        _scratch(group, name, group.size * length, flat).view(group.size, length)
        for name in ("sent", "received")
    )
    whole = uint8_blocks.heads_of(flat, block) if block == flat.numel() else None
    for row, (start, stop) in zip(sent, bounds, strict=True):
        if start < stop:
            uint8_blocks.pack(flat[start:stop], block, row, whole)
    group.all_to_all_single(received, sent)
    start, stop = bounds[group.rank]
    averages = _scratch(group, "averages", group.size * longest, flat, torch.float32).view(
        group.size, longest
    )
    own = _scratch(group, "own", longest, flat, torch.float32)
    if start < stop:
        uint8_blocks.average(received, stop - start, block, own[: stop - start])
    group.all_gather_into_tensor(averages, own)
    for row, (start, stop) in zip(averages, bounds, strict=True):
        flat[start:stop].copy_(row[: stop - start])


def share_bounds(numel: int, block: int, ranks: int) -> list[tuple[int, int]]:
    """Return (start, stop) of each rank's share, the first of which is the longest.

    Shares are whole blocks, or any elements if there is one block.
    """
    unit = 1 if block >= numel else block
    longest = -(-numel // (unit * ranks)) * unit
    return [(min(rank * longest, numel), min((rank + 1) * longest, numel)) for rank in range(ranks)]


def _scratch(
    group: Group, name: str, numel: int, like: Tensor, dtype: torch.dtype = torch.uint8
) -> Tensor:
    """Return scratch memory, which the next call with this name reuses."""
    of_group = _memory.setdefault(group, {})
    held = of_group.get((name, like.device))
    if held is None or held.numel() < numel:
        held = of_group[name, like.device] = torch.zeros(numel, dtype=dtype, device=like.device)
    return held[:numel]
