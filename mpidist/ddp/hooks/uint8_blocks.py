"""Blocks of a tensor quantized to uint8, and the average of several ranks' blocks.

A block from min to max, 0 included: scale = (max - min) / 255, zero = -round(min / scale), q =
round(x / scale) + zero; back, x ≈ scale · (q - zero). A packed tensor is [scale and zero of each
block, fp32][N bytes][padding to 8 bytes].

Letters: N elements; B = ⌈N / block⌉ blocks.

Source: the arithmetic of torch's ``MinMaxObserver`` for ``quint8``. Its scales are at least 1.2e-7;
here the smallest normal number is the least.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

Tensor = torch.Tensor

_LEVELS = 255
_LEAST = torch.finfo(torch.float32).tiny
_HEAD_BYTES = 8
# Elements per pass: on the host they stay in the processor's cache, a GPU needs large passes.
_PIECE_NUMEL, _DEVICE_PIECE_NUMEL = 1 << 16, 1 << 26


def packed_bytes(numel: int, block: int) -> int:
    """Return the length of a packed tensor."""
    return -(-numel // block) * _HEAD_BYTES + -(-numel // 8) * 8


def heads_of(x: Tensor, block: int) -> Tensor:
    """Return B × 2: scale and zero point of each block; NaN for one that is not finite.

    Args:
        x: N > 0 elements of a real dtype, contiguous.
    """
    whole = x.numel() - x.numel() % block
    bounds = [
        torch.stack(part.aminmax(dim=1))
        for part in (x[:whole].view(-1, block), x[whole:].view(1, -1))
        if part.numel()
    ]
    low, high = torch.cat(bounds, dim=1).float()
    low, high = low.clamp_max(0), high.clamp_min(0)
    scale = ((high - low) / _LEVELS).clamp_min(_LEAST)
    scale = torch.where(scale.isfinite(), scale, torch.nan)
    return torch.stack([scale, (low / scale).round().neg().clamp(0, _LEVELS)], dim=1)


def pack(x: Tensor, block: int, packed: Tensor, heads: Tensor | None = None) -> None:
    """Quantize a tensor.

    Args:
        x: N elements of a real dtype, contiguous.
        packed: Receives the result: at least ``packed_bytes(N, block)`` elements of uint8, the
            first at a multiple of 4 bytes.
        heads: ``heads_of(x, block)``, or the heads of a longer tensor, of one block, of which ``x``
            is a part; None to compute them.
    """
    if heads is None:
        heads = heads_of(x, block)
    packed_heads, q = _parts(packed, x.numel(), block)
    packed_heads.copy_(heads)
    for start, stop, first, rows in _pieces(x, block):
        scale, zero = heads[first : first + rows].split(1, dim=1)
        wide = x[start:stop].view(rows, -1).float() / scale
        q[start:stop].view(rows, -1).copy_(wide.round_().add_(zero).clamp_(0, _LEVELS))


def average(packed: Tensor, numel: int, block: int, out: Tensor) -> None:
    """Add up the tensors of W ranks in the order of the ranks, in fp32, and divide by W.

    Args:
        packed: W × at least ``packed_bytes(numel, block)`` elements of uint8.
        out: Receives the average: ``numel`` elements of any real dtype, contiguous.
    """
    ranks = [_parts(row, numel, block) for row in packed]
    for start, stop, first, rows in _pieces(out, block):
        total: Tensor | None = None
        for heads, q in ranks:
            scale, zero = heads[first : first + rows].split(1, dim=1)
            wide = q[start:stop].view(rows, -1).float().sub_(zero).mul_(scale)
            total = wide if total is None else total.add_(wide)
        assert total is not None
        out[start:stop].view(rows, -1).copy_(total.div_(len(ranks)))


def _parts(packed: Tensor, numel: int, block: int) -> tuple[Tensor, Tensor]:
    """Return the heads (B × 2, fp32) and the bytes of a packed tensor, as views."""
    head_bytes = -(-numel // block) * _HEAD_BYTES
    return packed[:head_bytes].view(torch.float32).view(-1, 2), packed[
        head_bytes : head_bytes + numel
    ]


def _pieces(x: Tensor, block: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (start, stop, first block, blocks) of pieces: whole blocks, or a part of one block."""
    numel, most = x.numel(), _PIECE_NUMEL if x.is_cpu else _DEVICE_PIECE_NUMEL
    if block > most:
        for first, start in enumerate(range(0, numel, block)):
            stop = min(start + block, numel)
            yield from (
                (piece, min(piece + most, stop), first, 1) for piece in range(start, stop, most)
            )
        return
    whole, step = numel - numel % block, most // block * block
    for start in range(0, whole, step):
        stop = min(start + step, whole)
        yield start, stop, start // block, (stop - start) // block
    if whole < numel:
        yield whole, numel, whole // block, 1
