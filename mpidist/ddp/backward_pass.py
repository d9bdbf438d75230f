"""One backward pass: copies gradients into buckets, launches ready buckets, waits, hands back.

Letters: W ranks of the group; N elements of a bucket.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mpidist.comm.algorithms.reduce_op import AVG
from mpidist.comm.group_types import Group
from mpidist.comm.recorder import recorder
from mpidist.ddp.buckets.bucket import Bucket
from mpidist.ddp.buckets.buffers import BufferRotation
from mpidist.ddp.buckets.layout import Layout
from mpidist.ddp.buckets.owned_bucket import OwnedBucket
from mpidist.ddp.buckets.sparse_bucket import SparseBucket
from mpidist.ddp.hooks import stages
from mpidist.ddp.hooks.grad_bucket import GradBucket
from mpidist.ddp.hooks.powersgd_state import drop_errors
from mpidist.ddp.hooks.stages import BucketFuture, Hook, InvalidResult
from mpidist.ddp.readiness import ParameterUsage, Readiness
from mpidist.future import Future, completed

Tensor = torch.Tensor


@dataclass(frozen=True)
class PassSettings:
    """Settings of one backward pass.

    Attributes:
        group: The native group.
        hook: The communication hook and its state; None for the average.
        scale: Factor of the average, if no hook reduces.
        as_views: Gradients are views of the buckets.
    """

    group: Group
    hook: tuple[Hook, object] | None
    scale: float
    as_views: bool


def adds_to_gradients(parameters: Sequence[Tensor]) -> bool:
    """Return whether the running pass adds to any parameter's gradient, not to inputs' alone.

    Raises:
        RuntimeError: The pass is ``torch.autograd.grad`` of parameters.
    """
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        node = torch.autograd.graph.get_gradient_edge(parameter).node
        try:
            if torch._C._will_engine_execute_node(node):
                return True
        # torch raises for a leaf whose gradient autograd.grad() returns.
        except RuntimeError:
            raise RuntimeError(
                "torch.autograd.grad() of parameters is not supported by DistributedDataParallel, "
                "because it adds to no gradient, and nothing would be averaged: call backward(), "
                "or run the forward pass under no_sync()"
            ) from None
    return False


class BackwardPass:
    """One pass over one module's gradients, from arming to the averages.

    Attributes:
        readiness: Ready gradients and buckets.
        complaints: Texts on this rank's invalid gradients; raised on all ranks at the end.
        hook_error: The first error of what the hook has returned on this rank; likewise.
        is_begun: Autograd has begun the pass.
    """

    def __init__(self, layout: Layout, settings: PassSettings, usage: ParameterUsage) -> None:
        self.readiness = Readiness(layout.plan, usage.expected, usage.skipped(layout.plan))
        self.complaints: list[str] = []
        self.hook_error: InvalidResult | None = None
        self.is_begun = False
        self._layout = layout
        self._settings = settings
        self._usage = usage
        self._rotation = BufferRotation(
            [bucket.buffer for bucket in layout.buckets], self.readiness.launch_order
        )
        # By bucket, in launch order.
        self._futures: dict[int, BucketFuture] = {}
        # Reduced buckets; with the result, if it has not been accepted yet.
        self._reduced: list[tuple[int, Tensor | None]] = []
        # Streams on which gradients were computed, by device and handle.
        self._producers: dict[tuple[int, int], torch.cuda.Stream] = {}
        for bucket in layout.buckets:
            bucket.begin_pass()

    def mark_ready(self, place: int, parameter: Tensor) -> None:
        """Count an addition to a gradient; copy it if it is ready, and launch ready buckets."""
        left = self.readiness.mark_ready(place)
        if left > 0:
            return
        if left < 0:
            count = self.readiness.counts[place]
            self.complaints.append(self._usage.surplus_error(place, count))
            return
        if parameter.is_cuda:
            # Copied at the launch, because one kernel then copies the whole bucket.
            here = _stream_here(parameter.get_device())
            if here not in self._producers:
                self._producers[here] = torch.cuda.current_stream(parameter.device)
        else:
            # Copied at once, because the gradient is still in the cache.
            index = self.readiness.bucket_of[place]
            bucket = self._layout.buckets[index]
            if bucket.buffer is None or self._rotation.is_current(index):
                bucket.copy_in(place, parameter, self._settings.as_views)
        if self.readiness.may_launch:
            for index in self.readiness.pop_ready():
                self._launch(index)

    def launch_rest(self) -> None:
        """Launch the remaining buckets, with zeros for missing gradients."""
        for index in self.readiness.pop_rest():
            self._launch(index)

    def shadow(self) -> None:
        """Launch all buckets with zeros."""
        for index in self.readiness.pop_rest():
            self._wait_for_buffer(index)
            self._layout.buckets[index].clear()
            self._reduce(index)

    def has_gradients(self, parameters: Sequence[Tensor]) -> list[bool]:
        """Return for each parameter whether this rank has a gradient, of this pass or before."""
        # Passes under no_sync may have left a gradient to which this pass adds nothing.
        found = [parameter.grad is not None for parameter in parameters]
        for bucket in self._layout.buckets:
            for place in bucket.copied:
                found[place] = True
        return found

    def wait(self) -> None:
        """Wait until all buckets are reduced."""
        if not self._futures:
            return
        with recorder.recorded("wait", "wait for gradients"):
            for index in list(self._futures):
                self._retire(index)

    def settle(self) -> None:
        """Wait until what it has launched has ended, whatever the outcome."""
        for future in self._futures.values():
            with contextlib.suppress(Exception):
                future.wait()

    def abandon(self) -> None:
        """Keep nothing of a pass that an exception has ended, once what it has launched has ended.

        A second call does nothing.
        """
        self.settle()
        if self._settings.hook is not None:
            _, state = self._settings.hook
            launched = [*self._futures, *(index for index, _ in self._reduced)]
            for index in launched:
                drop_errors(state, self._layout.buckets[index].names)
        self._futures.clear()
        self._reduced.clear()

    def hand_back(self, used: Sequence[bool]) -> None:
        """Hand the reduced buckets back to the gradients.

        Args:
            used: For each place whether any rank has a gradient.
        """
        for index, result in self._reduced:
            bucket = self._layout.buckets[index]
            if result is not None:
                bucket.accept(result, self._scale(bucket))
            bucket.hand_back(used, self._settings.as_views)

    def _launch(self, index: int) -> None:
        self._wait_for_buffer(index)
        for key, stream in self._producers.items():  # a model may compute on several
            if key != _stream_here(key[0]):
                torch.cuda.current_stream(stream.device).wait_stream(stream)
        for name, layout in self._layout.buckets[index].collect(self._settings.as_views):
            self.complaints.append(_wrong_layout(name, layout))
        self._reduce(index)

    def _wait_for_buffer(self, index: int) -> None:
        while (holder := self._rotation.holder(index)) is not None:
            self._retire(holder)

    def _reduce(self, index: int) -> None:
        bucket, group = self._layout.buckets[index], self._settings.group
        future: BucketFuture
        if self._settings.hook is not None and isinstance(bucket, Bucket):
            hook, state = self._settings.hook
            is_last = self.readiness.is_last(index, self._layout.sparse)
            # Skipped buckets are not counted: a hook may begin its step at the first one.
            number = self.readiness.launch_order.index(index)
            grad_bucket = GradBucket(bucket, number, is_last, group)
            try:
                future = stages.call_hook(hook, state, grad_bucket, group)
            except InvalidResult as error:
                future = self._refused(bucket, error)
        elif bucket.node_tensor is not None:
            bucket.node_tensor.average()
            future = completed(bucket.flat)
        else:
            is_async = stages.overlaps_backward(group, bucket.flat)
            work = group.all_reduce(bucket.flat, AVG, async_op=is_async)
            future = completed(bucket.flat) if work is None else work.get_future()
        self._futures[index] = future
        # Releases a reduced host buffer to the next bucket at once. A device's buffer stays
        # occupied until the next bucket needs it, because that bucket may be filled on another
        # stream.
        if bucket.buffer is not None and not bucket.flat.is_cuda and stages.is_done(future):
            self._retire(index)

    def _retire(self, index: int) -> None:
        """Wait for one bucket; copy this rank's elements out of a rotating buffer."""
        bucket, future = self._layout.buckets[index], self._futures[index]
        try:
            if isinstance(bucket, SparseBucket):
                future.wait()
                result = bucket.flat
            else:
                result = stages.value_of(future, bucket.flat.numel())
        except InvalidResult as error:
            result = self._refused(bucket, error).value()
        # Not before: a wait that an exception has left is not the end.
        del self._futures[index]
        if not isinstance(bucket, OwnedBucket):
            self._reduced.append((index, result))  # accepted in ``hand_back``
            return
        bucket.accept(result, self._scale(bucket))
        bucket.copy_owned()
        self._rotation.release(index)
        self._reduced.append((index, None))

    def _refused(self, bucket: Bucket | SparseBucket, error: InvalidResult) -> Future[Tensor]:
        """Keep an error for the end of the pass; return the bucket as it is in the result's place.

        Perhaps the result is invalid on this rank alone, which must not leave out the collectives
        before that.
        """
        self.hook_error = self.hook_error or error
        return completed(bucket.flat)

    def _scale(self, bucket: Bucket | SparseBucket) -> float:
        is_hooked = self._settings.hook is not None and isinstance(bucket, Bucket)
        return 1.0 if is_hooked else self._settings.scale


def _wrong_layout(name: str, layout: torch.layout) -> str:
    """Return the text for a gradient of an unexpected layout."""
    if layout is torch.strided:
        return (
            f"the gradient of parameter {name!r} is dense, but its module announces sparse ones; a "
            "weight that other modules share needs sparse=False"
        )
    return (
        f"the gradient of parameter {name!r} has layout {layout}, but its module does not announce "
        "it; sparse gradients are averaged for nn.Embedding and nn.EmbeddingBag that have "
        "sparse=True when they are wrapped"
    )


def _stream_here(device: int) -> tuple[int, int]:
    # ``torch.cuda.current_stream`` takes ten times as long, and runs for every gradient.
    return device, torch._C._cuda_getCurrentRawStream(device)
