"""Fragment of a module whose parameters are averaged together, from one outer step to the next."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch

from mpidist.comm.group_types import Group
from mpidist.ddp.buckets import plan
from mpidist.ddp.buckets.bucket import Bucket
from mpidist.ddp.buckets.buffers import BucketAllocator
from mpidist.ddp.hooks.grad_bucket import GradBucket
from mpidist.ddp.hooks.stages import BucketFuture, value_of
from mpidist.kernels.powersgd import is_finite

Tensor = torch.Tensor

# Bytes at which a bucket closes: never, a fragment's size is its own.
_NO_LIMIT = 1 << 62


class OuterFragment:
    """Parameters, their global copies, and the buckets of their pseudo-gradients.

    There is one bucket for each dtype and device.

    Args:
        names: Names of the parameters in the module.
        parameters: This rank's parameters, which the inner optimizer steps.

    Attributes:
        global_parameters: The values after the last outer step, the same on all ranks.
        buckets: Flat memory of the pseudo-gradients, then of their averages.
    """

    def __init__(self, names: Sequence[str], parameters: Sequence[Tensor]) -> None:
        self.names = tuple(names)
        self.parameters = list(parameters)
        self.global_parameters = [parameter.detach().clone() for parameter in parameters]
        self.buckets: list[Bucket] = []
        self._plan = plan.assign(self.parameters, [_NO_LIMIT])
        self._futures: list[BucketFuture] = []

    def allocate(self, group: Group) -> None:
        """Allocate the buckets, in memory of the node where the ranks share it.

        Collective: over the group.
        """
        shares = all(parameter.is_cpu for parameter in self.parameters)
        allocator = BucketAllocator(self.global_parameters, self.names, self._plan, ())
        self.buckets = [
            bucket for bucket in allocator.separate(group, shares) if isinstance(bucket, Bucket)
        ]
        self._futures = []

    def subtract(self) -> None:
        """Fill the buckets with the pseudo-gradient: the global parameters minus this rank's."""
        for bucket in self.buckets:
            torch._foreach_copy_(bucket.views, bucket.parameters)
            torch._foreach_sub_(bucket.views, self._own(bucket))

    def is_finite(self) -> bool:
        """Return whether the buckets hold neither infinity nor NaN."""
        return all(is_finite(_real(bucket.flat)) for bucket in self.buckets)

    def is_zero(self) -> bool:
        """Return whether all elements of the buckets are zero."""
        return not any(bucket.flat.any() for bucket in self.buckets)

    def average(
        self, call: Callable[[GradBucket], BucketFuture], group: Group, index: int, is_last: bool
    ) -> None:
        """Begin the average of the buckets.

        Collective: over the group.

        Args:
            call: Calls the communication hook.
            index: Of the first bucket.
            is_last: The fragment is the last of a round.
        """
        last = len(self.buckets) - 1
        self._futures = [
            call(GradBucket(bucket, index + place, is_last and place == last, group))
            for place, bucket in enumerate(self.buckets)
        ]

    def wait(self) -> None:
        """Wait until the buckets hold the averages.

        Raises:
            TypeError, ValueError: The hook returned something else than the reduced bucket.
        """
        for bucket, future in zip(self.buckets, self._futures, strict=False):
            bucket.accept(value_of(future, bucket.flat.numel()), 1)
        self._futures = []

    def settle(self) -> None:
        """Wait until an average that is given up has ended, whatever the outcome."""
        for future in self._futures:
            with contextlib.suppress(Exception):
                future.wait()
        self._futures = []

    def step(self, outer: torch.optim.Optimizer) -> None:
        """Step the global parameters by the averages; ``outer`` finds no other gradient."""
        for bucket in self.buckets:
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                parameter.grad = view
        try:
            outer.step()
        finally:
            for parameter in self.global_parameters:
                parameter.grad = None

    def merge(self, alpha: float) -> None:
        """Replace this rank's parameters by the global ones, or by a mixture.

        Args:
            alpha: Weight of this rank's own.
        """
        if alpha:
            torch._foreach_lerp_(self.parameters, self.global_parameters, 1 - alpha)
        else:
            torch._foreach_copy_(self.parameters, self.global_parameters)

    def restart(self) -> None:
        """Take this rank's parameters as the global ones."""
        torch._foreach_copy_(self.global_parameters, self.parameters)

    def changed(self) -> str | None:
        """Return the name of a parameter whose dtype or device is no longer that of its copy."""
        for name, own, copy in zip(
            self.names, self.parameters, self.global_parameters, strict=True
        ):
            if (own.dtype, own.device, own.shape) != (copy.dtype, copy.device, copy.shape):
                return name
        return None

    def _own(self, bucket: Bucket) -> list[Tensor]:
        return [self.parameters[place] for place in bucket.indices]


def _real(flat: Tensor) -> Tensor:
    return torch.view_as_real(flat) if flat.is_complex() else flat
