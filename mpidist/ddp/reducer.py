"""Gradients to their average: notes what is ready, launches buckets in the order of the plan, waits, hands back.

A backward pass has three moments: ``_begin`` (the gradient of an output is there), ``_arrived`` (autograd has added to one
parameter's gradient) and ``_finish`` (autograd's last act, in which what is missing is completed and the results are waited for).

Letters: W ranks of the group; N elements of a bucket.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from mpidist.comm.arithmetic import AVG
from mpidist.comm.node_memory import share
from mpidist.comm.stream import used_here
from mpidist.ddp import plan
from mpidist.ddp.agreement import require_all_gradients, used_somewhere
from mpidist.ddp.arrivals import Arrivals
from mpidist.ddp.bucket import Bucket, GradBucket, lay_out, memory_bytes, take
from mpidist.ddp.hooks import order

Tensor = torch.Tensor
Hook = Callable[[Any, GradBucket], Any]


@dataclass(frozen=True)
class Settings:
    """What a reducer may do."""

    limits: tuple[int, ...]  # bytes at which the first, the second, … bucket closes
    most_buckets: int | None = None  # merge neighbours until there are no more than these
    gradient_as_bucket_view: bool = True  # gradients are views of the buckets; else they are copied back
    find_unused_parameters: bool = False  # parameters may lack a gradient, and not the same ones on all ranks
    static_graph: bool = False  # which parameters are used, and how often, is as in the first backward pass
    skip_unused: bool = False  # parameters that no rank used in the first backward pass are not reduced in the later ones


class Reducer:
    """The gradients of one module on one group.

    Collective: constructed by all ranks of the group with parameters of equal shapes and dtypes; then armed and run through
    backward the same number of times by all, or mirrored by those that have no inputs left.

    Attributes:
        scale: What the average is multiplied by, if no hook reduces: W over the ranks that still have inputs.
    """

    def __init__(self, parameters: Sequence[Tensor], names: Sequence[str], group: Any, settings: Settings) -> None:
        self.scale = 1.0
        self._parameters = list(parameters)
        self._names = list(names)
        self._group = group
        self._settings = settings
        self._as_views = settings.gradient_as_bucket_view
        self._hook: tuple[Hook, Any] | None = None
        self._order: list[int] | None = None  # of arrival in the first backward pass, until the buckets follow it
        self._is_rebuilt = settings.find_unused_parameters and not settings.static_graph
        self._is_armed = self._is_begun = False
        # How often each gradient arrives; in a static graph that is not known before the first backward pass.
        self._times: list[int] | None = None if settings.static_graph else [1] * len(self._parameters)
        self._unused: frozenset[int] | None = None  # places that no rank used, if they are to be skipped
        # Gradients come in the reverse order of use, which is about that of registration.
        self._plan = self._planned(list(reversed(range(len(self._parameters)))))
        self._buckets: list[Bucket] = []  # made before the first pass: their memory is shared, and sharing is collective
        arrived = _without_owner(self)
        self._handles = [
            parameter.register_post_accumulate_grad_hook(partial(arrived, place))
            for place, parameter in enumerate(self._parameters)
        ]

    def register_hook(self, hook: Hook | None, state: Any = None) -> None:
        """Have ``hook(state, bucket)`` reduce the buckets from the next backward pass on; None for the average."""
        self._hook = None if hook is None else (hook, state)

    def __del__(self) -> None:
        for handle in getattr(self, "_handles", ()):
            handle.remove()

    def buckets(self) -> list[tuple[int, ...]]:
        """Return the places of the parameters in each bucket, in the order of launch."""
        return list(self._plan)

    def plan(self) -> dict[str, Any]:
        """Return the buckets by names, and the order of arrival if they are still to follow it."""
        return {
            "buckets": [[self._names[place] for place in indices] for indices in self._plan],
            "is_rebuilt": self._is_rebuilt,
            "arrivals": None if self._order is None else [self._names[place] for place in self._order],
        }

    def use_plan(self, saved: dict[str, Any]) -> None:
        """Lay the buckets out as ``plan()`` said, by names.

        Raises:
            ValueError: Not exactly this module's parameters, or a bucket of several dtypes or devices.
        """
        buckets = plan.by_place(saved["buckets"], self._names)
        for index, places in enumerate(buckets):
            if len({(self._parameters[place].dtype, self._parameters[place].device) for place in places}) != 1:
                raise ValueError(f"bucket {index} holds parameters of several dtypes or devices, or none")
        (order,) = [None] if saved["arrivals"] is None else plan.by_place([saved["arrivals"]], self._names)
        self._is_rebuilt, self._order = saved["is_rebuilt"], None if order is None else list(order)
        self._plan, self._buckets = buckets, []

    def prepare(self) -> None:
        """Make the buckets; and once more, in the order in which gradients arrived in the first backward pass.

        Collective: over the group, before a forward pass. Rank 0's order holds for all.
        """
        if not self._is_rebuilt and self._order is not None:
            arrived = torch.tensor(self._order, device="cpu")
            self._group.broadcast(arrived, 0)
            self._is_rebuilt, self._order = True, None
            planned = self._planned(arrived.tolist())
            if planned != self._plan:
                self._plan, self._buckets = planned, []
        if not self._buckets:
            self._make_buckets()

    def arm(self, outputs: Sequence[Tensor]) -> None:
        """Average the gradients of the next backward pass; called after the forward pass.

        Args:
            outputs: The module's output tensors.
        """
        if not any(parameter.requires_grad for parameter in self._parameters):
            self._is_armed = False  # frozen since: gradients flow through it, and none arrive
            return
        self._arm()
        for output in outputs:
            if output.grad_fn is not None:
                output.register_hook(self._began)

    def mirror(self) -> None:
        """Take part in one backward pass of the others, with zeros: for a rank that has no inputs left.

        Collective: over the group. This rank's gradients are overwritten.
        """
        self._arm()
        self._is_armed = False
        for index in self._arrivals.take_rest():
            self._buckets[index].flat.zero_()
            self._reduce(index)
        self._settle([False] * len(self._parameters), missing=[])

    # --- the backward pass ---

    def _arm(self) -> None:
        self._is_armed, self._is_begun = True, False
        self._arrivals = Arrivals(self._plan, self._times, self._skipped())
        self._futures: list[tuple[Bucket, Any]] = []
        self._surplus: list[str] = []
        self._producers: set[Any] = set()  # streams on which gradients arrived

    def _began(self, gradient: Tensor) -> None:
        # Called by the outermost pass, if the outputs are known: the end of a nested one (a re-entrant checkpoint) is too early.
        if not self._is_begun and self._adds_to_gradients():
            self._begin()

    def _adds_to_gradients(self) -> bool:
        """Say whether the pass under way adds to any parameter's gradient; one that is for the inputs alone does not.

        Raises:
            RuntimeError: It is ``torch.autograd.grad`` of parameters.
        """
        for parameter in self._parameters:
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
        torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _arrived(self, place: int, parameter: Tensor) -> None:
        if not self._is_armed:
            return  # under no_sync, or the module was called beside DDP
        if not self._is_begun:
            self._begin()
        left = self._arrivals.note(place)
        if left > 0:
            return
        if left < 0:
            self._surplus.append(self._told_of_surplus(place))  # raised on all ranks, at the end
            return
        if parameter.is_cuda:  # the whole bucket will be one launch
            self._producers.add(torch.cuda.current_stream(parameter.device))
        else:
            # At once: it is still in the cache, and its memory serves the next one.
            take(parameter, self._views[place], self._as_views)
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
        return (
            f"the gradient of parameter {name!r} arrived twice in one backward pass; a parameter that several checkpointed "
            "segments share needs static_graph=True, or checkpoint(..., use_reentrant=False)"
        )

    def _launch(self, index: int) -> None:
        for stream in self._producers:  # a model may compute on several
            torch.cuda.current_stream(stream.device).wait_stream(stream)
        self._buckets[index].collect(self._as_views)
        self._reduce(index)

    def _reduce(self, index: int) -> None:
        bucket = self._buckets[index]
        if self._hook is None and bucket.node_tensor is not None:
            bucket.node_tensor.average()
            future = None
        elif self._hook is None:
            work = self._group.all_reduce(bucket.flat, AVG, async_op=order.runs_beside(self._group, bucket.flat))
            future = None if work is None else work.get_future()
        else:
            hook, state = self._hook
            future = order.call(hook, state, GradBucket(bucket, index, self._arrivals.is_last(index)), self._group)
        self._futures.append((bucket, future))

    def _finish(self) -> None:
        self._is_armed = self._is_begun = False
        counts = self._arrivals.counts
        if self._times is None:
            self._times = list(counts)
        # A gradient that this pass did not add to may still be one: of passes under no_sync.
        has_gradient = [parameter.grad is not None for parameter in self._parameters]
        for index in self._arrivals.take_rest():
            self._launch(index)
        self._settle(has_gradient, [name for name, count in zip(self._names, counts, strict=True) if not count])

    def _settle(self, has_gradient: list[bool], missing: list[str]) -> None:
        """Wait for all buckets, and hand back what some rank has."""
        if self._order is None and not self._is_rebuilt:
            arrived = set(self._arrivals.order)
            rest = [place for indices in self._plan for place in indices if place not in arrived]
            self._order = self._arrivals.order + rest
        futures, self._futures = self._futures, []
        results = [(bucket, bucket.flat if future is None else order.value_of(future)) for bucket, future in futures]
        if self._settings.find_unused_parameters or self._settings.static_graph:
            used = used_somewhere(self._group, has_gradient, self._surplus)
            if self._settings.skip_unused and self._unused is None:
                self._skip(frozenset(place for place, is_used in enumerate(used) if not is_used))
        else:
            require_all_gradients(self._group, missing, self._surplus)
            used = [True] * len(self._parameters)
        for bucket, result in results:
            if result.numel() != bucket.flat.numel():
                raise ValueError(
                    f"a communication hook must return {bucket.flat.numel()} elements; got shape {tuple(result.shape)}"
                )
            if result.data_ptr() != bucket.flat.data_ptr():
                bucket.flat.copy_(used_here(result).view(-1))
            if self.scale != 1 and self._hook is None:
                bucket.flat.mul_(self.scale)
            bucket.hand_back(used, self._as_views)

    # --- the buckets ---

    def _skip(self, unused: frozenset[int]) -> None:
        self._unused = unused
        if self._times is not None:  # a rank that only mirrors a static graph does not know them
            self._times = [0 if place in unused else times for place, times in enumerate(self._times)]

    def _skipped(self) -> frozenset[int]:
        unused = self._unused or frozenset()
        return frozenset(index for index, indices in enumerate(self._plan) if unused.issuperset(indices))

    def _planned(self, places: Sequence[int]) -> list[tuple[int, ...]]:
        """Plan buckets that are filled in this order."""
        assigned = plan.assign(self._parameters, self._settings.limits, places)
        if self._settings.most_buckets is not None:
            assigned = plan.merge(self._parameters, assigned, self._settings.most_buckets)
        return [bucket.indices for bucket in assigned]

    def _make_buckets(self) -> None:
        is_on_host = all(parameter.device.type == "cpu" for parameter in self._parameters)
        memory = share(self._group, memory_bytes(self._plan, self._parameters)) if is_on_host else None
        self._buckets = lay_out(self._plan, self._parameters, self._names, memory)
        self._views: dict[int, Tensor] = {}
        for bucket in self._buckets:
            self._views.update(zip(bucket.indices, bucket.views, strict=True))
            if self._as_views:
                bucket.adopt()


def _without_owner(reducer: Reducer) -> Callable[[int, Tensor], None]:
    # Parameters outlive a reducer, and the collector does not see what autograd's hooks refer to.
    reference = weakref.ref(reducer)

    def arrived(place: int, parameter: Tensor) -> None:
        owner = reference()
        if owner is not None:
            owner._arrived(place, parameter)

    return arrived
