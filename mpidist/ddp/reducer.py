"""Gradients to their average: joins autograd's passes, begins and ends them, and holds what outlives a pass.

A backward pass has three moments: ``_begin`` (the gradient of an output is there), ``mark_ready``
(autograd has added to one parameter's gradient) and ``_finish`` (autograd's last act, in which what
is missing is completed and the results are waited for).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from mpidist.ddp import autograd_context, gradient_errors, in_backward, shadowing
from mpidist.ddp.accumulated_averages import AccumulatedAverages, Marks
from mpidist.ddp.backward_pass import BackwardPass, Hook, Reduction, adds_to_gradients
from mpidist.ddp.layout import Layout, Settings
from mpidist.ddp.owned_bucket import Owners
from mpidist.ddp.ownership import Ownership, bounds_by_place, ownership_of
from mpidist.ddp.torch_reducer import ReducerNames
from mpidist.ddp.verification import require_all_gradients, require_equal_owners, used_somewhere
from mpidist.dynamo import untraced

Tensor = torch.Tensor
Aside = tuple[shadowing.Gradients, Marks | None]


@untraced
class Reducer(ReducerNames):
    """The gradients of one module on one group.

    Collective: constructed by all ranks of the group with parameters of equal shapes and dtypes,
    unless it is ``local``; then armed and run through backward the same number of times by all, or
    mirrored by those that have no inputs left.

    Args:
        expects_sparse: For each parameter whether its gradients are sparse.
        local: Construct it without communication, on one rank or on several.

    Attributes:
        scale: What the average is multiplied by, if no hook reduces: W over the ranks that still
            have inputs.
        captures: A pass of distributed autograd is under way, which says itself when it ends
            (``in_context``).
        hook: The communication hook and its state, or None.
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
        self.hook: tuple[Hook, Any] | None = None
        self._is_armed = self._is_begun = False
        # of the last forward pass that was armed: its own backward pass is noticed
        self._knows_outputs = False
        # How often each gradient arrives; in a static graph that is not known before the first
        # backward pass.
        self._times: list[int] | None = (
            None if settings.static_graph else [1] * len(self.parameters)
        )
        # places that no rank used, if they are to be skipped
        self._unused: frozenset[int] | None = None
        self._own_gradients: Aside | None = None  # this rank's own gradients, while it mirrors
        self._averages: AccumulatedAverages | None = None
        # of buffers that a hook synchronises beside the backward pass
        self._futures: list[Any] = []
        self._layout = Layout(
            self.parameters, self._names, self._expects_sparse, group, settings, local
        )
        arrived = _weak_hook(self)
        self._handles = [
            parameter.register_post_accumulate_grad_hook(partial(arrived, place))
            for place, parameter in enumerate(self.parameters)
        ]

    def register_hook(self, hook: Hook | None, state: Any = None) -> None:
        """Have ``hook(state, bucket)`` reduce the buckets from the next backward pass on; None for the average.

        Collective: over the group, if the hook reduces to owners, or the one before it did; the
        buckets are then laid out again.

        Raises:
            TypeError, ValueError: The owners are none of this module's parameters.
            DisagreementError: Another rank raised that, or has other owners.
        """
        ownership = ownership_of(hook)
        if ownership is not None or self._layout.owners is not None:
            self._own(ownership)
        self.hook = None if hook is None else (hook, state)

    def _own(self, ownership: Ownership | None) -> None:
        bounds, problem = None, None
        try:
            if ownership is not None:
                bounds = bounds_by_place(ownership, self.parameters, self._names, self._group.size)
                in_backward.require_none(zip(self._names, self.parameters, strict=True))
        except (TypeError, ValueError) as error:
            problem = error
        require_equal_owners(
            self._group,
            self._names,
            bounds,
            None if ownership is None else ownership.buffers,
            problem,
        )
        before, self._averages, owners = self._averages, None, None
        if ownership is not None and bounds is not None:
            # what stands shall not keep the reducer
            is_averaging = partial(_asked, weakref.WeakMethod(self.is_averaging))
            self._averages = AccumulatedAverages(
                self.parameters, bounds, self._group.size, is_averaging, before
            )
            kept: dict[int, Tensor] | None = {} if self._as_views else None
            owners = Owners(bounds, ownership.buffers, self._group.rank, self._averages, kept)
        self._layout.use_owners(owners)

    def buckets(self) -> list[tuple[int, ...]]:
        """Return the places of the parameters in each bucket, in the order of launch."""
        return list(self._layout.plan)

    def plan(self) -> dict[str, Any]:
        """Return the buckets by names; see ``Layout.saved_plan``."""
        return self._layout.saved_plan()

    def use_plan(self, saved: dict[str, Any]) -> None:
        """Lay the buckets out as ``plan()`` said; see ``Layout.load_plan``.

        Collective: over the group.
        """
        self._layout.load_plan(saved)

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
        autograd_context.join(self)

    def disarm(self) -> None:
        """Leave the gradients of the next backward pass as they are; called after a forward pass under ``no_sync``.

        An earlier forward pass whose backward pass has not come yet is averaged when that one
        begins.
        """
        if self._knows_outputs and not self._is_begun:
            self._is_armed = False

    def shadow(self) -> None:
        """Take part in one backward pass of the others, with zeros: for a rank that has no inputs left.

        Until ``end_shadowing`` this rank's gradients are the average, from which an optimizer of
        shards takes its step.

        Collective: over the group.
        """
        if self._own_gradients is None:
            self._own_gradients = self.set_aside()
        self._arm()
        self._is_armed = False
        self._pass.shadow()
        self._pass.wait()
        self._settle([False] * len(self.parameters), missing=[])

    def end_shadowing(self) -> None:
        """Give this rank its gradients back as they were before the first ``shadow``."""
        if self._own_gradients is not None:
            self.restore(self._own_gradients)
            self._own_gradients = None

    def set_aside(self) -> Aside:
        """Take the gradients away from the parameters, for passes that shall not add to them."""
        marks = None if self._averages is None else self._averages.set_aside()
        return shadowing.set_aside(self.parameters, self._layout.views), marks

    def restore(self, aside: Aside) -> None:
        """Give the parameters back what was ``set_aside``."""
        gradients, marks = aside
        shadowing.restore(gradients, self.parameters, self._layout.views)
        if self._averages is not None and marks is not None:
            self._averages.restore(marks)

    # --- the backward pass ---

    def _arm(self) -> None:
        self._layout.follow_storage()
        self._is_armed, self._is_begun = True, False
        reduction = Reduction(self._group, self.hook, self.scale, self._as_views)
        # Where ranks use different parameters, a bucket would leave ahead of a module's collective
        # on one rank and behind it on another.
        expected = None if self._settings.behind_all else self._times
        self._pass = BackwardPass(self._layout, reduction, expected, self._skipped())

    def is_averaging(self) -> bool:
        """Say whether gradients that arrive now are averaged: not those under ``no_sync``, nor of a module called beside DDP."""
        return self._is_armed or self.captures

    def _began(self, gradient: Tensor) -> None:
        # Called by the outermost pass, if the outputs are known: the end of a nested one (a
        # re-entrant checkpoint) is too early.
        if not self._is_begun and not self.captures and adds_to_gradients(self.parameters):
            self._begin()

    def _begin(self) -> None:
        if not self._is_armed:  # a second backward pass of one forward pass, or of the one before
            self._arm()
        self._is_begun = True
        if not self.captures:
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def mark_ready(self, place: int, parameter: Tensor) -> None:
        """Take a parameter's gradient: autograd has added to it, or a captured one has been put there."""
        if not self.is_averaging():
            if self._averages is not None and parameter.grad is not None:
                self._averages.record_addition(place, parameter.grad)
            return
        if not self._is_begun:
            self._begin()
        if not self._pass.mark_ready(place, parameter):
            self._pass.complaints.append(self._surplus(place))

    def _surplus(self, place: int) -> str:
        name = self._names[place]
        if self._unused is not None and place in self._unused:
            return gradient_errors.unused_before(name)
        if self._settings.static_graph:
            first = self._times[place] if self._times is not None else 0
            return gradient_errors.graph_changed(name, self._pass.readiness.counts[place], first)
        return gradient_errors.added_twice(name)

    def _finish(self) -> None:
        self._is_armed = self._is_begun = False
        counts = self._pass.readiness.counts
        if self._times is None:
            self._times = list(counts)
        has_gradient = self._pass.has_gradients(self.parameters)
        self._pass.launch_rest()
        self._pass.wait()
        self._settle(
            has_gradient,
            [name for name, count in zip(self._names, counts, strict=True) if not count],
        )

    def finish_captured(self) -> bool:
        """Finish a captured pass; False if it brought no gradient."""
        if not self._is_begun:
            return False
        self._finish()
        return True

    def _settle(self, has_gradient: list[bool], missing: list[str]) -> None:
        """Hand back what some rank has; after the first pass, lay the buckets out as gradients came."""
        wrong = self._pass.complaints
        if self._settings.find_unused_parameters or self._settings.static_graph:
            used = used_somewhere(
                self._group, has_gradient, wrong, self._settings.find_unused_parameters
            )
            if self._settings.skip_unused and self._unused is None:
                self._skip(frozenset(place for place, is_used in enumerate(used) if not is_used))
        else:
            require_all_gradients(self._group, missing, wrong)
            used = [True] * len(self.parameters)
        self._pass.hand_back(used)
        self.wait_for_futures()
        if self._own_gradients is None and not self.captures:
            in_backward.step(self.parameters, used)
        # Here, where every rank passes, and not before the next forward pass, which one rank may
        # run alone.
        if not self._layout.is_rebuilt:
            self._layout.rebuild(self._pass.readiness.ready_order)

    # --- parameters that no rank uses ---

    def _skip(self, unused: frozenset[int]) -> None:
        self._unused = unused
        if self._times is not None:  # a rank that only mirrors a static graph does not know them
            self._times = [
                0 if place in unused else times for place, times in enumerate(self._times)
            ]

    def _skipped(self) -> frozenset[int]:
        unused = self._unused or frozenset()
        return frozenset(
            index for index, indices in enumerate(self._layout.plan) if unused.issuperset(indices)
        )


def _weak_hook(reducer: Reducer) -> Callable[[int, Tensor], None]:
    # Parameters outlive a reducer, and the collector does not see what autograd's hooks refer to.
    reference = weakref.ref(reducer)

    def arrived(place: int, parameter: Tensor) -> None:
        owner = reference()
        if owner is not None:
            owner.mark_ready(place, parameter)

    return arrived


def _asked(method: weakref.WeakMethod[Callable[[], bool]]) -> bool:
    averages = method()
    return averages is not None and averages()
