"""Half-precision wires: each rank sends its shard, rounded to bfloat16 or float16.

Each rank owns a contiguous shard of a flat parameter buffer, and keeps a *master* copy of that
shard in full precision, which its optimizer steps. A wire sends all masters to all ranks in a half
type. Afterwards the visible parameters (the flat buffer) have the same bits on all ranks, the owner
too; the masters keep the precision that the type loses.

Letters: W ranks of the group; N elements of the flat buffer.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import pairwise

import torch

from mpidist.comm.group_types import Group
from mpidist.kernels.launch import stream_of

Tensor = torch.Tensor
_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_DTYPES: dict[str | torch.dtype, torch.dtype] = {
    **{name: dtype for dtype, name in _NAMES.items()},
    **{dtype: dtype for dtype in _NAMES},
}


class HalfWire:
    """Wire of masters rounded to a half type; all ranks, the owner too, widen the rounded values.

    The master itself is not rounded, so that steps smaller than a unit of the half type add up. A
    buffer of the half type itself is sent without rounding. float16 makes infinities of magnitudes
    from 65520 on. One object may serve any number of flat buffers.

    Deviation: FairScale's ``OSS(broadcast_fp16=True)`` rounds the parameters that the owner steps,
    and such steps are lost.

    Args:
        dtype: ``torch.bfloat16`` or ``torch.float16``.

    Attributes:
        dtype: As given.
        name: As ``wire_of`` takes it.

    Raises:
        ValueError: Another dtype.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        if dtype not in _NAMES:
            raise ValueError(f"HalfWire needs {' or '.join(map(str, _NAMES))}; got {dtype}")
        self.dtype = dtype
        self.name = _NAMES[dtype]
        self._scratch = Scratch()

    def require(self, dtype: torch.dtype) -> None:
        """Refuse flat buffers of any dtype but float32, float64, and the wire's own.

        Raises:
            TypeError: Another dtype.
        """
        if dtype not in (torch.float32, torch.float64, self.dtype):
            raise TypeError(
                f"the wire {self.name} carries float32, float64 and {self.dtype}; got parameters "
                f"of {dtype}"
            )

    @torch.no_grad()
    def share(self, group: Group, master: Tensor, flat: Tensor, bounds: Sequence[int]) -> None:
        """Send this rank's shard to all ranks, and receive theirs into ``flat``.

        At W = 1 nothing is sent, and ``flat`` gets the master's values without rounding.

        Collective: over ``group``.

        Blocks: until this rank's part has ended; on CUDA the current stream waits for the rest.

        Args:
            master: Contiguous tensor of the elements of this rank's shard, of ``flat``'s dtype and
                on its device. Not changed.
            flat: Contiguous tensor of shape (N,); equal on all ranks before and after. Only the
                elements within the bounds are written.
            bounds: W + 1 ascending offsets; rank r owns ``flat[bounds[r]:bounds[r + 1]]``, which
                may be empty. Equal on all ranks.

        Raises:
            ValueError: Sizes, bounds, devices or strides do not fit; on this rank, before anything
                is sent.
            TypeError: The dtypes do not fit the wire; likewise.
        """
        self.require(flat.dtype)
        where, rank, size = group.where("share"), group.rank, group.size
        if len(bounds) != size + 1 or any(
            start > stop for start, stop in pairwise([0, *bounds, flat.numel()])
        ):
            raise ValueError(
                f"{where} needs {size + 1} ascending bounds within {flat.numel()} elements; got "
                f"{list(bounds)}"
            )
        numel = bounds[rank + 1] - bounds[rank]
        if master.dtype != flat.dtype:
            raise TypeError(
                f"{where} needs a master of flat's dtype, {flat.dtype}; got {master.dtype}"
            )
        if master.numel() != numel or master.device != flat.device:
            raise ValueError(
                f"{where} needs a master of {numel} elements on {flat.device}; got "
                f"{master.numel()} on {master.device}"
            )
        if flat.dim() != 1 or not flat.is_contiguous() or not master.is_contiguous():
            raise ValueError(
                f"{where} needs a contiguous master and a contiguous flat of one dimension; got "
                f"strides {master.stride()} and {flat.stride()}"
            )
        visible = flat.detach()
        if size == 1:
            visible[bounds[0] : bounds[1]].copy_(master)
        else:
            self._exchange(group, master.detach(), visible, bounds)

    def _exchange(self, group: Group, master: Tensor, flat: Tensor, bounds: Sequence[int]) -> None:
        if flat.dtype is self.dtype:
            shards = [flat[start:stop] for start, stop in pairwise(bounds)]
            group.all_gather(shards, shards[group.rank].copy_(master))
        elif bounds[-1] > bounds[0]:
            nbytes = (bounds[-1] - bounds[0]) * self.dtype.itemsize
            narrow = self._scratch.take(nbytes, flat.device).view(self.dtype)
            parts = narrow.split([stop - start for start, stop in pairwise(bounds)])
            group.all_gather(parts, parts[group.rank].copy_(master))
            flat[bounds[0] : bounds[-1]].copy_(narrow)


class Scratch:
    """Memory kept between calls: one block for each thread and stream, of the largest size so far.

    Buffers shared one after the other use the same block. Other threads and streams, which may
    share a buffer at the same time, have their own. A copied or pickled ``Scratch`` has no memory.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[torch.device, int, int], Tensor] = {}

    def __reduce__(self) -> tuple[type[Scratch], tuple[()]]:
        return Scratch, ()

    def take(self, nbytes: int, device: torch.device) -> Tensor:
        """Return ``nbytes`` undefined bytes, valid until this thread and stream call again."""
        key = (device, stream_of(device), threading.get_ident())
        held = self._held.get(key)
        if held is None or held.numel() < nbytes:
            held = self._held[key] = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return held[:nbytes]


def wire_of(name: str | torch.dtype | None) -> HalfWire | None:
    """Return a new wire by its name or dtype; None for None: shards are sent in their own dtype.

    Raises:
        ValueError: No such wire.
    """
    if name is None:
        return None
    dtype = _DTYPES.get(name) if isinstance(name, (str, torch.dtype)) else None
    if dtype is None:
        raise ValueError(
            f"wire must be None or one of {', '.join(map(repr, _DTYPES))}; got {name!r}"
        )
    return HalfWire(dtype)
