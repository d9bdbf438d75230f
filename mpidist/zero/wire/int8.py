"""Int8 wire: changes of shards as blockwise int8, with error feedback."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from mpidist.comm.group_types import Group
from mpidist.kernels.quantize import BLOCK, DTYPES, blocks_in, dequantize_add, quantize_change
from mpidist.zero.wire.wire import Wire

Tensor = torch.Tensor

# Bytes that kernels read and write at once.
_ALIGNMENT = 16
# Elements in one message where the tuning table has none. While it is sent, the next segment is
# quantized and the last one added. At 1 Gbit/s, 1 MiB takes 8 ms.
SEGMENT_NUMEL = 1 << 20
# On a device a segment costs the host some 200 us, in which a link of 25 GB/s sends 4 MiB. Those of
# all ranks together stay below what a staged gather pins (``host_copies.PINNED_BYTES``).
_DEVICE_SEGMENT_NUMEL, _DEVICE_GATHER_NUMEL = 4 << 20, 24 << 20


class Int8Wire(Wire):
    """Wire of each shard's change, ``master - flat``, as int8 with an fp32 scale per 256 elements.

    Every rank, the owner too, adds the dequantized changes to its own ``flat`` with the same
    arithmetic, so equal parameters stay equal to the bit. The rounding error of a change stays in
    ``master - flat`` and is part of the next change, so error feedback needs no extra memory. After
    a call, each element of ``flat`` differs from its master by at most half a quantization step of
    its block, absmax / 254 of the block's change, plus the rounding of ``flat`` itself.

    A change that is not finite makes its block of ``flat`` NaN on all ranks.

    Args:
        segment_numel: Elements of a segment, a multiple of 256; the same on all ranks. By default
            the tuning table's for the group, the device and the longest shard
            (``python -m mpidist.tune``), or a constant. Values do not depend on it.

    Source: error feedback by Seide et al., 1-bit SGD (2014), and Karimireddy et al.,
    arXiv:1901.09847; blocks as ZeRO++ (arXiv:2306.10209) quantizes weights. Deviation: changes are
    sent, not weights; see ``docs/decisions/0014``.
    """

    name = "int8"
    is_rounding = False

    def __init__(self, segment_numel: int | None = None) -> None:
        super().__init__()
        self._segment_numel = segment_numel

    def require(self, dtype: torch.dtype) -> None:
        """Refuse any dtype but float32 and float64.

        Raises:
            TypeError: Another dtype; a narrower one would lose what error feedback keeps.
        """
        if dtype not in DTYPES:
            raise TypeError(f"the wire int8 carries float32 and float64; got parameters of {dtype}")

    def _exchange(self, group: Group, master: Tensor, flat: Tensor, bounds: Sequence[int]) -> None:
        segments = segments_of(bounds, self._segment_of(group, flat.device, bounds))
        sizes = [[section_nbytes(stop - start) for start, stop in spans] for spans in segments]
        memory = self._scratch.take(sum(map(sum, sizes)), flat.device).split(
            [sum(of_ranks) for of_ranks in sizes]
        )
        under_way = []
        for spans, of_ranks, held in zip(segments, sizes, memory, strict=True):
            sections = held.split(of_ranks)
            fields = [
                _fields(section, stop - start)
                for section, (start, stop) in zip(sections, spans, strict=True)
            ]
            start, stop = spans[group.rank]
            own = master[start - bounds[group.rank] : stop - bounds[group.rank]]
            quantize_change(own, flat[start:stop], *fields[group.rank])
            under_way.append(
                (
                    spans,
                    fields,
                    group.all_gather(sections, sections[group.rank], async_op=len(segments) > 1),
                )
            )
        for spans, fields, work in under_way:
            if work is not None:
                work.wait()
            for (start, stop), (q, scales) in zip(spans, fields, strict=True):
                dequantize_add(flat[start:stop], q, scales)

    def _segment_of(self, group: Group, device: torch.device, bounds: Sequence[int]) -> int:
        if self._segment_numel is not None:
            return self._segment_numel
        tuned = group.tuning_table(device).segment_numel(longest_shard(bounds))
        return tuned or unmeasured_segment(device, group.size)


def longest_shard(bounds: Sequence[int]) -> int:
    """Return the elements of the longest shard."""
    return max(stop - start for start, stop in pairwise(bounds))


def unmeasured_segment(device: torch.device, size: int) -> int:
    """Return the elements of a segment for a device and W ranks without a tuning table."""
    if device.type == "cpu":
        return SEGMENT_NUMEL
    pinned = _DEVICE_GATHER_NUMEL // size // BLOCK * BLOCK
    return max(SEGMENT_NUMEL, min(_DEVICE_SEGMENT_NUMEL, pinned))


def segments_of(bounds: Sequence[int], segment_numel: int) -> list[list[tuple[int, int]]]:
    """Cut the shards into segments, sent one after the other; return each rank's (start, stop).

    Blocks are not cut, so the length of a segment does not change the values. Without elements the
    shards have no segments.
    """
    shards = list(pairwise(bounds))
    return [
        [(min(start + at, stop), min(start + at + segment_numel, stop)) for start, stop in shards]
        for at in range(0, longest_shard(bounds), segment_numel)
    ]


def section_nbytes(numel: int) -> int:
    """Return the bytes of ``numel`` elements: integers and scales, each padded to 16."""
    return _padded(numel) + _padded(4 * blocks_in(numel))


def _fields(section: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the integers and the scales of a section."""
    scales = section[_padded(numel) :][: 4 * blocks_in(numel)]
    return section[:numel].view(torch.int8), scales.view(torch.float32)


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
