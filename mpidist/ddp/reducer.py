"""Gradients to their average: marks what is ready, launches buckets in the order of the plan, waits, hands back.

The order of launch is the plan's, whatever the order of arrival, so that all ranks issue the same collectives. A backward pass
has three moments: ``arm`` (after a forward pass whose gradients are to be averaged), ``_arrived`` (autograd has added to one
parameter's gradient) and ``_finish`` (autograd's last act, in which what is missing is completed and the results are waited for).

Letters: W ranks of the group; N elements of a bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from mpidist.comm.arithmetic import AVG, SUM
from mpidist.ddp import plan
from mpidist.ddp.bucket import Bucket, GradBucket

Tensor = torch.Tensor
Hook = Callable[[Any, GradBucket], Any]

_ADVICE = (
    "Parameters that take no part in the loss need find_unused_parameters=True (or static_graph=True if they never do); "
    "torch.autograd.grad() is not supported, because it adds to no gradient: call backward()"
)


@dataclass(frozen=True)
class Settings:
    """What a reducer may do."""

    limits: tuple[int, ...]  # bytes at which the first, the second, … bucket closes
    most_buckets: int | None = None  # merge neighbours until there are no more than these
    gradient_as_bucket_view: bool = True  # gradients are views of the buckets; else they are copied back
    find_unused_parameters: bool = False  # parameters may lack a gradient, and not the same ones on all ranks
    static_graph: bool = False  # which parameters are used, and how often, is as in the first backward pass
    in_line: bool = True  # without a hook: reduce in the backward pass itself; else on the group's thread beside it


class Reducer:
    """The gradients of one module on one group.

    Collective: constructed by all ranks of the group with parameters of equal shapes and dtypes; then armed and run through
    backward the same number of times by all.
    """

    def __init__(self, parameters: Sequence[Tensor], names: Sequence[str], group: Any, settings: Settings) -> None:
        self._parameters = list(parameters)
        self._names = list(names)
        self._group = group
        self._settings = settings
        self._hook: tuple[Hook, Any] | None = None
        self._order: list[int] | None = None  # of arrival in the first backward pass, until the buckets follow it
        self._is_rebuilt = settings.find_unused_parameters and not settings.static_graph
        self._is_armed = self._is_begun = False
        self._times: list[int] | None = None  # static graph: how often each gradient arrives
        # Gradients come in the reverse order of use, which is about that of registration.
        self._lay_out(list(reversed(range(len(self._parameters)))))
        self._handles = [
            parameter.register_post_accumulate_grad_hook(partial(self._arrived, place))
            for place, parameter in enumerate(self._parameters)
        ]

    def register_hook(self, hook: Hook | None, state: Any = None) -> None:
        """Have ``hook(state, bucket)`` reduce the buckets from the next backward pass on; None for the average."""
        self._hook = None if hook is None else (hook, state)

    def close(self) -> None:
        """Leave the parameters alone from now on."""
        for handle in self._handles:
            handle.remove()

    def buckets(self) -> list[tuple[int, ...]]:
        """Return the places of the parameters in each bucket, in the order of launch."""
        return [bucket.indices for bucket in self._buckets]

    def rebuild(self) -> bool:
        """Lay the buckets out once in the order in which gradients arrived first; say whether that was done.

        Collective: over the group, before a forward pass. Rank 0's order holds for all.
        """
        if self._is_rebuilt or self._order is None:
            return False
        self._is_rebuilt = True
        order = torch.tensor(self._order)
        self._group.broadcast(order, 0)
        layout = order.tolist()
        self._order = None
        if self._planned(layout) == self.buckets():
            return False
        self._lay_out(layout)
        return True

    def arm(self, outputs: Sequence[Tensor]) -> None:
        """Average the gradients of the next backward pass; called after the forward pass.

        Args:
            outputs: The module's output tensors.
        """
        self._is_armed, self._is_begun = True, False
        self._left = list(self._times) if self._times is not None else [1] * len(self._parameters)
        self._pending = [sum(self._left[place] > 0 for place in bucket.indices) for bucket in self._buckets]
        self._next = 0
        self._futures: list[Any] = []
        self._arrivals: list[int] = []
        self._counts = [0] * len(self._parameters)
        for output in outputs:
            if output.grad_fn is not None:
                output.register_hook(self._begin)

    # --- the backward pass ---

    def _begin(self, gradient: Tensor | None = None) -> None:
        # Called by the outermost pass, if the outputs are known: the end of a nested one (a re-entrant checkpoint) is too early.
        if self._is_armed and not self._is_begun:
            self._is_begun = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _arrived(self, place: int, parameter: Tensor) -> None:
        if not self._is_armed:
            return
        if not self._is_begun:
            self._begin()
        self._counts[place] += 1
        if self._settings.static_graph and self._times is None:
            return  # how often each will come is known after this pass
        left = self._left[place] = self._left[place] - 1
        if left > 0:
            return
        if left < 0:
            raise RuntimeError(
                f"the gradient of parameter {self._names[place]!r} arrived twice in one backward pass; a parameter that several "
                "checkpointed segments share needs static_graph=True, or checkpoint(..., use_reentrant=False)"
            )
        self._arrivals.append(place)
        index = self._bucket_of[place]
        self._pending[index] -= 1
        if index == self._next and not self._pending[index]:
            self._launch_ready()

    def _launch_ready(self) -> None:
        while self._next < len(self._buckets) and not self._pending[self._next]:
            self._next += 1
            self._launch(self._next - 1)

    def _launch(self, index: int) -> None:
        bucket = self._buckets[index]
        self._collect(bucket)
        if self._hook is None:
            work = self._group.all_reduce(bucket.flat, AVG, async_op=not self._settings.in_line)
            self._futures.append(work)
            return
        hook, state = self._hook
        seen = GradBucket(bucket, index, index == len(self._buckets) - 1)
        self._futures.append(hook(state, seen))

    def _collect(self, bucket: Bucket) -> None:
        """Bring the gradients into the bucket: those that are not there already."""
        views, gradients = [], []
        for view, parameter in zip(bucket.views, bucket.parameters, strict=True):
            gradient = parameter.grad
            if gradient is view:
                continue
            if gradient is None:
                view.zero_()
                continue
            if gradient.layout is not torch.strided:
                raise RuntimeError(f"mpidist's DDP takes dense gradients; got layout {gradient.layout} (use sparse=False)")
            views.append(view)
            gradients.append(gradient.detach())
            if self._settings.gradient_as_bucket_view:
                parameter.grad = view
        if views:
            torch._foreach_copy_(views, gradients)

    def _finish(self) -> None:
        self._is_armed = self._is_begun = False
        settings = self._settings
        if settings.static_graph and self._times is None:
            self._times = list(self._counts)
        if self._order is None and not self._is_rebuilt:
            absent = [place for place in range(len(self._parameters)) if place not in set(self._arrivals)]
            self._order = self._arrivals + absent
        has_gradient = [parameter.grad is not None for parameter in self._parameters]
        self._pending = [0] * len(self._buckets)
        self._launch_ready()
        used = self._used_somewhere(has_gradient)
        self._hand_back(used)

    def _used_somewhere(self, has_gradient: list[bool]) -> list[bool]:
        """Return which parameters have a gradient on any rank.

        Raises:
            RuntimeError: On all ranks, if one lacks a gradient somewhere and none may.
        """
        if self._settings.find_unused_parameters or self._settings.static_graph:
            used = torch.tensor(has_gradient, dtype=torch.int32)
            self._group.all_reduce(used, SUM)
            if not int(used.sum()):
                raise RuntimeError(f"no parameter received a gradient on any rank. {_ADVICE}")
            return [bool(count) for count in used.tolist()]
        missing = [name for name, count in zip(self._names, self._counts, strict=True) if not count]
        absent = torch.tensor([len(missing)])
        self._group.all_reduce(absent, SUM)
        if not int(absent):
            return [True] * len(self._parameters)
        self._wait()
        told = self._group.all_gather_object(missing)
        lines = [f"rank {rank}: {_listed(names)}" for rank, names in enumerate(told) if names]
        raise RuntimeError(f"parameters received no gradient in this backward pass. {'; '.join(lines)}. {_ADVICE}")

    def _wait(self) -> list[Tensor | None]:
        return [_result_of(future) for future in self._futures]

    def _hand_back(self, used: list[bool]) -> None:
        for bucket, result in zip(self._buckets, self._wait(), strict=True):
            if result is not None and result.data_ptr() != bucket.flat.data_ptr():
                bucket.flat.copy_(result.view(-1))
            targets, sources = [], []
            for place, view, parameter in zip(bucket.indices, bucket.views, bucket.parameters, strict=True):
                gradient = parameter.grad
                if gradient is view or not used[place]:
                    continue
                if self._settings.gradient_as_bucket_view:
                    parameter.grad = view
                elif gradient is None:
                    parameter.grad = view.clone()
                else:
                    targets.append(gradient.detach())
                    sources.append(view)
            if targets:
                torch._foreach_copy_(targets, sources)
        self._futures = []

    # --- the buckets ---

    def _planned(self, order: Sequence[int]) -> list[tuple[int, ...]]:
        assigned = plan.assign(self._parameters, self._settings.limits, order)
        if self._settings.most_buckets is not None:
            assigned = plan.merge(self._parameters, assigned, self._settings.most_buckets)
        return [bucket.indices for bucket in assigned]

    def _lay_out(self, order: Sequence[int]) -> None:
        held = [parameter.grad for parameter in self._parameters]
        self._buckets = [Bucket(indices, self._parameters, self._names) for indices in self._planned(order)]
        self._bucket_of = [0] * len(self._parameters)
        for index, bucket in enumerate(self._buckets):
            for place, view in zip(bucket.indices, bucket.views, strict=True):
                self._bucket_of[place] = index
                gradient = held[place]
                if gradient is not None and self._settings.gradient_as_bucket_view:
                    view.copy_(gradient.detach())
                    self._parameters[place].grad = view


def _result_of(future: Any) -> Tensor | None:
    """Wait for what a hook returned: a future of ours or of torch, of a tensor or of a list of one."""
    if future is None:
        return None
    if not hasattr(future, "wait"):
        raise TypeError(f"a communication hook must return a future of the reduced bucket; got {type(future).__name__}")
    value = future.wait()
    if isinstance(value, (list, tuple)):
        (value,) = value
    return value if isinstance(value, torch.Tensor) else None


def _listed(names: Sequence[str], most: int = 10) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
