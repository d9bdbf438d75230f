"""``GradBucket``: the argument of communication hooks."""

from __future__ import annotations

import torch

from mpidist.comm.algorithms.shared_memory import SharedTensor
from mpidist.comm.group_types import Group
from mpidist.ddp.buckets.bucket import Bucket

Tensor = torch.Tensor


class GradBucket:
    """Argument of a communication hook: one bucket of gradients that are complete on this rank.

    Source:
        ``torch.distributed.GradBucket``, whose methods these are.
    """

    def __init__(
        self, bucket: Bucket, index: int, is_last: bool, group: Group | None = None
    ) -> None:
        self._bucket = bucket
        self._group = group
        self._buffer = bucket.flat
        self._index = index
        self._is_last = is_last

    def index(self) -> int:
        """Return the bucket's index in launch order, from 0."""
        return self._index

    def is_last(self) -> bool:
        """Return whether this is the last bucket to be launched in this backward pass."""
        return self._is_last

    def group(self) -> Group | None:
        """Return the module's native group; None if the bucket was constructed without one."""
        return self._group

    def takes_turns(self) -> bool:
        """Return whether several buckets rotate in the memory, as they are reduced to owners."""
        return self._bucket.buffer is not None

    def names(self) -> tuple[str, ...]:
        """Return the parameters' names, by which a hook keeps state: buckets are rebuilt.

        In torch's DistributedDataParallel, whose buckets have no names, they are empty.
        """
        return self._bucket.names

    def buffer(self) -> Tensor:
        """Return the flat tensor of N elements."""
        return self._buffer

    def node_tensor(self) -> SharedTensor | None:
        """Return the buffers of all ranks in shared memory; None if a hook replaced the buffer."""
        return self._bucket.node_tensor if self._buffer is self._bucket.flat else None

    def set_buffer(self, buffer: Tensor) -> None:
        """Replace the flat tensor.

        Raises:
            ValueError: The tensor has another number of elements.
        """
        if buffer.numel() != self._bucket.flat.numel():
            raise ValueError(
                f"set_buffer needs a tensor of {self._bucket.flat.numel()} elements for bucket "
                f"{self._index}; "
                f"got shape {tuple(buffer.shape)}"
            )
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        """Return one view of the buffer for each parameter, in the parameter's shape."""
        if self._buffer is self._bucket.flat:
            return list(self._bucket.views)
        parts = self._buffer.view(-1).split([view.numel() for view in self._bucket.views])
        forms = self._bucket.forms
        return [
            part.as_strided(*form, part.storage_offset())
            for part, form in zip(parts, forms, strict=True)
        ]

    def forms(self) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
        """Return shape and strides of each gradient; one object until buckets are rebuilt."""
        return self._bucket.forms

    def parameters(self) -> list[Tensor]:
        """Return the parameters, in the order of their gradients in the buffer."""
        return list(self._bucket.parameters)
