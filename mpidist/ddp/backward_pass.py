"""One backward pass: takes gradients as they arrive, launches buckets in the order of the plan, waits, hands back.

Letters: W ranks of the group; N elements of a bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mpidist.comm.algorithms.reduce_op import AVG
from mpidist.ddp import gradient_errors
from mpidist.ddp.bucket import Bucket, GradBucket, take
from mpidist.ddp.buffer_rotation import BufferRotation
from mpidist.ddp.hooks import stages
from mpidist.ddp.layout import Layout
from mpidist.ddp.owned_bucket import OwnedBucket
from mpidist.ddp.readiness import Readiness

Tensor = torch.Tensor
Hook = Callable[[Any, GradBucket], Any]


@dataclass(frozen=True)
class Reduction:
    """The way in which buckets are reduced.

    Attributes:
        group: The native group.
        hook: The communication hook and its state; None for the average.
        scale: What the average is multiplied by, if no hook reduces.
        as_views: Gradients are views of the buckets.
    """

    group: Any
    hook: tuple[Hook, Any] | None
    scale: float
    as_views: bool


def adds_to_gradients(parameters: Sequence[Tensor]) -> bool:
    """Say whether the pass under way adds to any parameter's gradient; one that is for the inputs alone does not.

    Raises:
        RuntimeError: It is ``torch.autograd.grad`` of parameters.
    """
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        node = torch.autograd.graph.get_gradient_edge(parameter).node
        try:
            if torch._C._will_engine_execute_node(node):
                return True
        except RuntimeError:  # torch cannot say it of a leaf whose gradient autograd.grad() returns
            raise RuntimeError(
                "torch.autograd.grad() of parameters is not supported by DistributedDataParallel, "
                "because it adds to no "
                "gradient, and nothing would be averaged: call backward(), or run the forward pass "
                "under no_sync()"
            ) from None
    return False


class BackwardPass:
    """One pass of one module's gradients.

    Args:
        expected: How often each gradient arrives; None if that is not known yet.
        skipped: Buckets that do not leave.

    Attributes:
        arrivals: What is complete.
        complaints: What is wrong with this rank's gradients; raised on all ranks, at the end.
    """

    def __init__(
        self,
        layout: Layout,
        reduction: Reduction,
        expected: Sequence[int] | None,
        skipped: Collection[int] = frozenset(),
    ) -> None:
        self.readiness = Readiness(layout.plan, expected, skipped)
        self.complaints: list[str] = []
        self._layout = layout
        self._reduction = reduction
        self._rotation = BufferRotation(
            [bucket.buffer for bucket in layout.buckets], self.readiness.launch_order
        )
        self._futures: dict[int, Any] = {}  # of the buckets under way, in the order of launch
        # what waits to be handed back, with results not accepted yet
        self._reduced: list[tuple[int, Tensor | None]] = []
        self._problem: ValueError | None = None  # a hook's result that did not fit
        # streams on which gradients arrived, by device and handle
        self._producers: dict[tuple[int, int], Any] = {}
        for bucket in layout.buckets:
            if isinstance(bucket, OwnedBucket):
                bucket.begin()

    def mark_ready(self, place: int, parameter: Tensor) -> bool:
        """Take a gradient that was added to, and launch what is complete; return False if it came once too often."""
        left = self.readiness.mark_ready(place)
        if left:
            return left > 0
        if parameter.is_cuda:  # the whole bucket will be one launch
            here = _stream_here(parameter.get_device())
            if here not in self._producers:
                self._producers[here] = torch.cuda.current_stream(parameter.device)
        else:
            self._take(place, parameter)
        if self.readiness.may_launch:
            for index in self.readiness.pop_ready():
                self._launch(index)
        return True

    def launch_rest(self) -> None:
        """Launch what has not left yet, with zeros for gradients that are missing."""
        for index in self.readiness.pop_rest():
            self._launch(index)

    def shadow(self) -> None:
        """Launch all buckets with zeros."""
        for index in self.readiness.pop_rest():
            self._wait_for_buffer(index)
            self._layout.buckets[index].clear()
            self._reduce(index)

    def has_gradients(self, parameters: Sequence[Tensor]) -> list[bool]:
        """Say for each parameter whether it has a gradient on this rank, of this pass or of one before."""
        # One that this pass did not add to may still be one: of passes under no_sync.
        found = [parameter.grad is not None for parameter in parameters]
        for bucket in self._layout.buckets:
            if isinstance(bucket, OwnedBucket):
                for place in bucket.present:
                    found[place] = True
        return found

    def wait(self) -> None:
        """Wait until all buckets are reduced."""
        for index in list(self._futures):
            self._retire(index)

    def hand_back(self, used: Sequence[bool]) -> None:
        """Bring what is reduced into the gradients.

        Args:
            used: For each place whether any rank has a gradient.
        """
        if self._problem is not None:
            raise self._problem
        # the pass lives on until the next one; a hook's result need not
        reduced, self._reduced = self._reduced, []
        for index, result in reduced:
            bucket = self._layout.buckets[index]
            if result is not None:
                bucket.accept(result, self._scale(bucket))
            bucket.hand_back(used, self._reduction.as_views)

    def _take(self, place: int, parameter: Tensor) -> None:
        # At once: it is still in the cache, and its memory serves the next one.
        index = self.readiness.bucket_of[place]
        bucket = self._layout.buckets[index]
        if isinstance(bucket, OwnedBucket):
            if self._rotation.is_current(index):
                bucket.take(place, parameter)
        elif isinstance(bucket, Bucket):
            take(parameter, self._layout.views[place], self._reduction.as_views)

    def _launch(self, index: int) -> None:
        self._wait_for_buffer(index)
        for key, stream in self._producers.items():  # a model may compute on several
            if key != _stream_here(key[0]):
                torch.cuda.current_stream(stream.device).wait_stream(stream)
        for name, layout in self._layout.buckets[index].collect(self._reduction.as_views):
            self.complaints.append(gradient_errors.wrong_layout(name, layout))
        self._reduce(index)

    def _wait_for_buffer(self, index: int) -> None:
        while (holder := self._rotation.holder(index)) is not None:
            self._retire(holder)

    def _reduce(self, index: int) -> None:
        bucket, group = self._layout.buckets[index], self._reduction.group
        if self._reduction.hook is not None and isinstance(bucket, Bucket):
            hook, state = self._reduction.hook
            is_last = self.readiness.is_last(index, self._layout.sparse)
            future = stages.call_hook(hook, state, GradBucket(bucket, index, is_last, group), group)
        elif bucket.node_tensor is not None:
            bucket.node_tensor.average()
            future = None
        else:
            work = group.all_reduce(
                bucket.flat, AVG, async_op=stages.overlaps_backward(group, bucket.flat)
            )
            future = None if work is None else work.get_future()
        self._futures[index] = future
        # On a device the next bucket may be another stream's: it waits for this one where it
        # begins.
        if bucket.buffer is not None and not bucket.flat.is_cuda and stages.is_done(future):
            self._retire(index)

    def _retire(self, index: int) -> None:
        """Wait for one bucket; where buckets take turns, copy what this rank owns out of its buffer."""
        bucket, future = self._layout.buckets[index], self._futures.pop(index)
        result = bucket.flat if future is None else stages.value_of(future)
        if not isinstance(bucket, OwnedBucket):
            # Accepted later: a result that is wrong on this rank alone must not keep it from what
            # all ranks do meanwhile.
            self._reduced.append((index, result))
            return
        try:
            bucket.accept(result, self._scale(bucket))
            bucket.keep()
        except ValueError as error:
            self._problem = self._problem or error
        self._rotation.release(index)
        self._reduced.append((index, None))

    def _scale(self, bucket: Any) -> float:
        is_hooked = self._reduction.hook is not None and isinstance(bucket, Bucket)
        return 1.0 if is_hooked else self._reduction.scale


def _stream_here(device: int) -> tuple[int, int]:
    # ``torch.cuda.current_stream`` takes ten times as long, and every gradient asks.
    return device, torch._C._cuda_getCurrentRawStream(device)
