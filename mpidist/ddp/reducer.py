"""Gradients to their average: notes what is ready, launches buckets in the order of the plan, waits, hands back.

A backward pass has three moments: ``_begin`` (the gradient of an output is there), ``arrived`` (autograd has added to one
parameter's gradient) and ``_finish`` (autograd's last act, in which what is missing is completed and the results are waited for).

Letters: W ranks of the group; N elements of a bucket.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from mpidist.comm.arithmetic import AVG
from mpidist.ddp import in_backward, in_context, mirroring
from mpidist.ddp.agreement import require_all_gradients, used_somewhere
from mpidist.ddp.arrivals import Arrivals
from mpidist.ddp.bucket import Bucket, GradBucket, take
from mpidist.ddp.hooks import order
from mpidist.ddp.layout import Layout, Settings
from mpidist.ddp.sparse_bucket import SparseBucket

Tensor = torch.Tensor
Hook = Callable[[Any, GradBucket], Any]


class Reducer:
    """The gradients of one module on one group.

    Collective: constructed by all ranks of the group with parameters of equal shapes and dtypes, unless it is ``local``; then
    armed and run through backward the same number of times by all, or mirrored by those that have no inputs left.

    Args:
        expects_sparse: For each parameter whether its gradients are sparse.
        local: Construct it without communication, on one rank or on several.

    Attributes:
        scale: What the average is multiplied by, if no hook reduces: W over the ranks that still have inputs.
        captures: A pass of distributed autograd is under way, which says itself when it ends (``in_context``).
        parameters: The parameters.
        places: Their places.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        names: Sequence[str],
        expects_sparse: Sequence[bool],
        group: Any,
        settings: Settings,
        local: bool = False,
    ) -> None:
        self.scale = 1.0
        self.captures = False
        self.parameters = list(parameters)
        self.places = {parameter: place for place, parameter in enumerate(parameters)}
        self._names = list(names)
        self._expects_sparse = list(expects_sparse)
        self._group = group
        self._settings = settings
        self._as_views = settings.gradient_as_bucket_view
        self._hook: tuple[Hook, Any] | None = None
        self._is_armed = self._is_begun = False
        self._knows_outputs = False  # of the last forward pass that was armed: its own backward pass is noticed
        # How often each gradient arrives; in a static graph that is not known before the first backward pass.
        self._times: list[int] | None = None if settings.static_graph else [1] * len(self.parameters)
        self._unused: frozenset[int] | None = None  # places that no rank used, if they are to be skipped
        self._put_aside: mirroring.Gradients | None = None  # this rank's own, while it mirrors
        self._layout = Layout(self.parameters, self._names, self._expects_sparse, group, settings, local)
        arrived = _without_owner(self)
        self._handles = [
            parameter.register_post_accumulate_grad_hook(partial(arrived, place))
            for place, parameter in enumerate(self.parameters)
        ]

    def register_hook(self, hook: Hook | None, state: Any = None) -> None:
        """Have ``hook(state, bucket)`` reduce the buckets from the next backward pass on; None for the average."""
        self._hook = None if hook is None else (hook, state)

    def __del__(self) -> None:
        for handle in getattr(self, "_handles", ()):
            handle.remove()

    def buckets(self) -> list[tuple[int, ...]]:
        """Return the places of the parameters in each bucket, in the order of launch."""
        return list(self._layout.plan)

    def plan(self) -> dict[str, Any]:
        """Return the buckets by names; see ``Layout.saved``."""
        return self._layout.saved()

    def use_plan(self, saved: dict[str, Any]) -> None:
        """Lay the buckets out as ``plan()`` said; see ``Layout.use``. Collective: over the group."""
        self._layout.use(saved)

    @property
    def views(self) -> Mapping[int, Tensor]:
        """Return each parameter's part of a bucket, by place."""
        return self._layout.views

    def detach_optimizers(self) -> None:
        """Have optimizers that step in the backward pass wait for the average; called before each forward pass with gradients.

        Under ``no_sync`` gradients add up, and they do not step.
        """
        in_backward.detach_hooks(self.parameters)

    def arm(self, outputs: Sequence[Tensor]) -> None:
        """Average the gradients of the next backward pass; called after the forward pass.

        Args:
            outputs: The module's output tensors.
        """
        if not any(parameter.requires_grad for parameter in self.parameters):
            self._is_armed = False  # frozen since: gradients flow through it, and none arrive
            return
        self._arm()
        tracked = [output for output in outputs if output.grad_fn is not None]
        self._knows_outputs = bool(tracked)
        for output in tracked:
            output.register_hook(self._began)
        in_context.join(self)

    def stand_by(self) -> None:
        """Leave the gradients of the next backward pass as they are; called after a forward pass under ``no_sync``.

        An earlier forward pass whose backward pass has not come yet is averaged when that one begins.
        """
        if self._knows_outputs and not self._is_begun:
            self._is_armed = False

    def mirror(self) -> None:
        """Take part in one backward pass of the others, with zeros: for a rank that has no inputs left.

        Until ``end_mirroring`` this rank's gradients are the average, from which an optimizer of shards takes its step.

        Collective: over the group.
        """
        if self._put_aside is None:
            self._put_aside = mirroring.put_aside(self.parameters, self._layout.views)
        self._arm()
        self._is_armed = False
        for index in self._arrivals.take_rest():
            self._layout.buckets[index].clear()
            self._reduce(index)
        self._settle([False] * len(self.parameters), missing=[])

    def end_mirroring(self) -> None:
        """Give this rank its gradients back as they were before the first ``mirror``."""
        if self._put_aside is not None:
            mirroring.restore(self._put_aside, self.parameters, self._layout.views)
            self._put_aside = None

    # --- the backward pass ---

    def _arm(self) -> None:
        self._is_armed, self._is_begun = True, False
        self._arrivals = Arrivals(self._layout.plan, self._times, self._skipped())
        self._futures: list[tuple[Bucket | SparseBucket, Any]] = []
        self._complaints: list[str] = []  # raised on all ranks, at the end
        self._producers: dict[tuple[int, int], Any] = {}  # streams on which gradients arrived, by device and handle

    def _began(self, gradient: Tensor) -> None:
        # Called by the outermost pass, if the outputs are known: the end of a nested one (a re-entrant checkpoint) is too early.
        if not self._is_begun and not self.captures and self._adds_to_gradients():
            self._begin()

    def _adds_to_gradients(self) -> bool:
        """Say whether the pass under way adds to any parameter's gradient; one that is for the inputs alone does not.

        Raises:
            RuntimeError: It is ``torch.autograd.grad`` of parameters.
        """
        for parameter in self.parameters:
            if not parameter.requires_grad:
                continue
            node = torch.autograd.graph.get_gradient_edge(parameter).node
            try:
                if torch._C._will_engine_execute_node(node):
                    return True
            except RuntimeError:  # torch cannot say it of a leaf whose gradient autograd.grad() returns
                raise RuntimeError(
                    "torch.autograd.grad() of parameters is not supported by DistributedDataParallel, because it adds to no "
                    "gradient, and nothing would be averaged: call backward(), or run the forward pass under no_sync()"
                ) from None
        return False

    def _begin(self) -> None:
        if not self._is_armed:  # a second backward pass of one forward pass, or of the one before
            self._arm()
        self._is_begun = True
        if not self.captures:
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def arrived(self, place: int, parameter: Tensor) -> None:
        """Take a parameter's gradient: autograd has added to it, or a captured one has been put there."""
        if not self._is_armed and not self.captures:
            return  # under no_sync, or the module was called beside DDP
        if not self._is_begun:
            self._begin()
        left = self._arrivals.note(place)
        if left > 0:
            return
        if left < 0:
            self._complaints.append(self._told_of_surplus(place))
            return
        if parameter.is_cuda:  # the whole bucket will be one launch
            here = _stream_here(parameter.get_device())
            if here not in self._producers:
                self._producers[here] = torch.cuda.current_stream(parameter.device)
        elif not self._expects_sparse[place]:
            # At once: it is still in the cache, and its memory serves the next one.
            take(parameter, self._layout.views[place], self._as_views)
        if self._arrivals.may_leave:
            for index in self._arrivals.take_ready():
                self._launch(index)

    def _told_of_surplus(self, place: int) -> str:
        name = self._names[place]
        if self._unused is not None and place in self._unused:
            return (
                f"parameter {name!r} received a gradient, but no rank used it in the first backward pass; "
                "skip_all_reduce_unused_params needs the same unused parameters in all of them"
            )
        if self._settings.static_graph:
            first = self._times[place] if self._times is not None else 0
            return (
                f"the gradient of parameter {name!r} arrived {self._arrivals.counts[place]} times in one backward pass, and "
                f"{first} times in the first: the graph is not static. Leave static_graph=True out; parameters that only some "
                "passes use need find_unused_parameters=True"
            )
        return (
            f"the gradient of parameter {name!r} arrived twice in one backward pass; a parameter that several checkpointed "
            "segments share needs static_graph=True, or checkpoint(..., use_reentrant=False)"
        )

    def _launch(self, index: int) -> None:
        for key, stream in self._producers.items():  # a model may compute on several
            if key != _stream_here(key[0]):
                torch.cuda.current_stream(stream.device).wait_stream(stream)
        for name, layout in self._layout.buckets[index].collect(self._as_views):
            self._complaints.append(_told_of_layout(name, layout))
        self._reduce(index)

    def _reduce(self, index: int) -> None:
        bucket = self._layout.buckets[index]
        if self._hook is not None and isinstance(bucket, Bucket):
            hook, state = self._hook
            is_last = self._arrivals.is_last(index, self._layout.sparse)
            future = order.call(hook, state, GradBucket(bucket, index, is_last), self._group)
        elif bucket.node_tensor is not None:
            bucket.node_tensor.average()
            future = None
        else:
            work = self._group.all_reduce(bucket.flat, AVG, async_op=order.runs_beside(self._group, bucket.flat))
            future = None if work is None else work.get_future()
        self._futures.append((bucket, future))

    def _finish(self) -> None:
        self._is_armed = self._is_begun = False
        counts = self._arrivals.counts
        if self._times is None:
            self._times = list(counts)
        # A gradient that this pass did not add to may still be one: of passes under no_sync.
        has_gradient = [parameter.grad is not None for parameter in self.parameters]
        for index in self._arrivals.take_rest():
            self._launch(index)
        self._settle(has_gradient, [name for name, count in zip(self._names, counts, strict=True) if not count])

    def finish_captured(self) -> bool:
        """Finish a captured pass; False if it brought no gradient."""
        if not self._is_begun:
            return False
        self._finish()
        return True

    def _settle(self, has_gradient: list[bool], missing: list[str]) -> None:
        """Wait for all buckets, and hand back what some rank has; after the first pass, lay the buckets out as gradients came."""
        futures, self._futures = self._futures, []
        results = [(bucket, bucket.flat if future is None else order.value_of(future)) for bucket, future in futures]
        if self._settings.find_unused_parameters or self._settings.static_graph:
            used = used_somewhere(self._group, has_gradient, self._complaints)
            if self._settings.skip_unused and self._unused is None:
                self._skip(frozenset(place for place, is_used in enumerate(used) if not is_used))
        else:
            require_all_gradients(self._group, missing, self._complaints)
            used = [True] * len(self.parameters)
        for bucket, result in results:
            is_hooked = self._hook is not None and isinstance(bucket, Bucket)
            bucket.accept(result, 1.0 if is_hooked else self.scale)
            bucket.hand_back(used, self._as_views)
        if self._put_aside is None and not self.captures:
            in_backward.step(self.parameters, used)
        # Here, where every rank passes, and not before the next forward pass, which one rank may run alone.
        if not self._layout.is_settled:
            self._layout.settle(self._arrivals.order)

    # --- parameters that no rank uses ---

    def _skip(self, unused: frozenset[int]) -> None:
        self._unused = unused
        if self._times is not None:  # a rank that only mirrors a static graph does not know them
            self._times = [0 if place in unused else times for place, times in enumerate(self._times)]

    def _skipped(self) -> frozenset[int]:
        unused = self._unused or frozenset()
        return frozenset(index for index, indices in enumerate(self._layout.plan) if unused.issuperset(indices))


def _stream_here(device: int) -> tuple[int, int]:
    # ``torch.cuda.current_stream`` takes ten times as long, and every gradient asks.
    return device, torch._C._cuda_getCurrentRawStream(device)


def _told_of_layout(name: str, layout: torch.layout) -> str:
    if layout is torch.strided:
        return (
            f"the gradient of parameter {name!r} is dense, but its module announces sparse ones; a weight that other modules "
            "share needs sparse=False"
        )
    return (
        f"the gradient of parameter {name!r} has layout {layout}, but its module does not announce it; sparse gradients are "
        "averaged for nn.Embedding and nn.EmbeddingBag that have sparse=True when they are wrapped"
    )


def _without_owner(reducer: Reducer) -> Callable[[int, Tensor], None]:
    # Parameters outlive a reducer, and the collector does not see what autograd's hooks refer to.
    reference = weakref.ref(reducer)

    def arrived(place: int, parameter: Tensor) -> None:
        owner = reference()
        if owner is not None:
            owner.arrived(place, parameter)

    return arrived
