"""Wire: one format of shards on the network, with the memory of its messages.

Letters: W ranks of the group; N elements of the flat buffer.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise

import torch

from mpidist.comm.group_types import Group
from mpidist.kernels.launch import stream_of

Tensor = torch.Tensor


class Wire(ABC):
    """A format of shards on the network; one object may serve any number of flat buffers.

    Attributes:
        name: As ``wire_of`` takes it.
    """

    name: str

    def __init__(self) -> None:
        self._scratch = Scratch()

    @abstractmethod
    def require(self, dtype: torch.dtype) -> None:
        """Refuse a dtype of flat buffers that the format cannot carry; masters have it, too.

        Raises:
            TypeError: The dtype is such a one.
        """

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

    @abstractmethod
    def _exchange(self, group: Group, master: Tensor, flat: Tensor, bounds: Sequence[int]) -> None:
        """Send and receive, between at least 2 ranks; arguments as of ``share``, and checked."""


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
