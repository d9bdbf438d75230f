"""Reducer of one module's gradients: begins and ends backward passes, keeps what outlives a pass.

A backward pass has three moments: ``_begin`` (the gradient of an output exists), ``mark_ready``
(autograd has added to one parameter's gradient) and ``_finish`` (autograd's last callback, which
launches the remaining buckets and waits for the results).

Source: the names that frameworks call are those of ``torch._C._distributed_c10d.Reducer``, as
``torch/nn/parallel/distributed.py`` and Lightning's strategies use them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Protocol

import torch

from mpidist.comm.consistency import comparing
from mpidist.comm.group_types import Group
from mpidist.ddp import in_backward
from mpidist.ddp.backward_pass import BackwardPass, PassSettings, adds_to_gradients
from mpidist.ddp.buckets.accumulated_averages import AccumulatedAverages
from mpidist.ddp.buckets.layout import Layout
from mpidist.ddp.buckets.owned_bucket import Owners
from mpidist.ddp.buckets.ownership import Bounds, Ownership, bounds_by_place, ownership_of
from mpidist.ddp.buckets.settings import Settings
from mpidist.ddp.buckets.weak_hook import weak_hook
from mpidist.ddp.hooks.powersgd_state import serve
from mpidist.ddp.hooks.stages import Hook
from mpidist.ddp.readiness import ParameterUsage
from mpidist.ddp.shadowing import OwnGradients
from mpidist.ddp.verification import require_all_gradients, used_somewhere
from mpidist.dynamo import untraced

Tensor = torch.Tensor

_on_armed: Callable[[Reducer], None] | None = None


def when_armed(function: Callable[[Reducer], None] | None) -> None:
    """Call ``function(reducer)`` whenever a reducer has been armed; None to stop.

    The interface to distributed autograd (``autograd_context``).
    """
    global _on_armed
    _on_armed = function


class Accumulation(Protocol):
    """What a hook keeps of the gradients of passes that are not averaged, in their place."""

    def begin_pass(self) -> None:
        """Begin a backward pass, averaged or not; called within it, and not only once."""

    def accumulated(self) -> Collection[str]:
        """Return the names of the parameters of which it keeps, or has just averaged, gradients."""


@untraced
class Reducer:
    """Averages of one module's gradients over one group.

    Collective: constructed by all ranks of the group with parameters of equal shapes and dtypes,
    unless ``local``. All ranks then run the same number of armed backward passes; a rank without
    inputs shadows those of the others.

    Args:
        expects_sparse: For each parameter whether its gradients are sparse.
        local: Construct without communication, on any number of ranks.

    Attributes:
        scale: Factor of the average, if no hook reduces: W over the number of ranks with inputs.
        captures: A pass of distributed autograd runs, which ends it by ``finish_captured``
            (``autograd_context``).
        hook: The communication hook and its state, or None.
        accumulation: What the hook keeps of passes that are not averaged, or None.
        parameters: The parameters.
        places: Their places.
        layout: The buckets.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        names: Sequence[str],
        expects_sparse: Sequence[bool],
        group: Group,
        settings: Settings,
        local: bool = False,
    ) -> None:
        self.scale = 1.0
        self.captures = False
        self.hook: tuple[Hook, object] | None = None
        self.accumulation: Accumulation | None = None
        self.parameters = list(parameters)
        self.places = {parameter: place for place, parameter in enumerate(parameters)}
        self._names = list(names)
        self._group = group
        self._settings = settings
        self._usage = ParameterUsage(self._names, settings)
        # The armed or running pass. None: gradients stay this rank's own.
        self._pass: BackwardPass | None = None
        # The callback of the running pass, which autograd drops when an exception ends the pass;
        # None of a captured one.
        self._ending: Callable[[], object] | None = None
        # The autograd engine has a thread for each device.
        self._lock = threading.RLock()
        # The last armed forward pass had outputs with a graph, whose hooks begin its backward pass.
        self._tracks_outputs = False
        self._own_gradients: OwnGradients | None = None  # while shadowing
        self._averages: AccumulatedAverages | None = None
        self.layout = Layout(
            self.parameters, self._names, list(expects_sparse), group, settings, local
        )
        mark_ready = weak_hook(self, Reducer.mark_ready)
        for place, parameter in enumerate(self.parameters):
            parameter.register_post_accumulate_grad_hook(partial(mark_ready, place))

    def register_hook(self, hook: Hook | None, state: object = None) -> None:
        """Reduce buckets by ``hook(state, bucket)`` from the next pass on; None for the average.

        Collective: over the group, if this hook or the last one reduces to owners; the buckets are
        then laid out again.

        Raises:
            TypeError, ValueError: The owners do not fit this module's parameters.
            ValueError: The state keeps the errors of another module.
            DisagreementError: Another rank raised one of these, or has other owners.
        """
        self._current()
        if hook is not None:
            serve(state, zip(self._names, self.parameters, strict=True))
        ownership = ownership_of(hook)
        if ownership is not None or self.layout.owners is not None:
            bounds = _agreed_bounds(self._group, ownership, self.parameters, self._names)
            before, self._averages, owners = self._averages, None, None
            if ownership is not None and bounds is not None:
                # A weak reference, because autograd's nodes keep the averages.
                is_averaging = partial(_call_weak, weakref.WeakMethod(self.is_averaging))
                self._averages = AccumulatedAverages(
                    self.parameters, bounds, self._group.size, is_averaging, before
                )
                kept: dict[int, Tensor] | None = (
                    {} if self._settings.gradient_as_bucket_view else None
                )
                owners = Owners(bounds, ownership.buffers, self._group.rank, self._averages, kept)
            self.layout.use_owners(owners)
        self.hook = None if hook is None else (hook, state)

    # --- before a backward pass ---

    def arm(self, outputs: Sequence[Tensor]) -> None:
        """Average the gradients of the next backward pass; called after the forward pass.

        Args:
            outputs: The module's output tensors.
        """
        self._replace()
        # Parameters frozen since the construction get no gradients.
        if not any(parameter.requires_grad for parameter in self.parameters):
            return
        self._pass = self._new_pass()
        tracked = [output for output in outputs if output.grad_fn is not None]
        self._tracks_outputs = bool(tracked)
        for output in tracked:
            output.register_hook(self._on_output_gradient)
        if _on_armed is not None:
            _on_armed(self)

    def disarm(self, outputs: Sequence[Tensor]) -> None:
        """Do not average the next backward pass; called after a forward pass under ``no_sync``.

        An earlier armed forward pass is averaged when its own backward pass begins.

        Args:
            outputs: The module's output tensors.
        """
        held = self._current()
        if self._tracks_outputs and held is not None and not held.is_begun:
            self._pass = None
        if self.accumulation is not None:
            for output in outputs:
                if output.grad_fn is not None:
                    output.register_hook(self._on_accumulated_output_gradient)

    def shadow(self) -> None:
        """Contribute zeros to one backward pass of the other ranks, on a rank without inputs.

        Until ``end_shadowing`` this rank's gradients are the averages, from which a sharded
        optimizer takes its step.

        Collective: over the group.
        """
        self._replace()
        if self._own_gradients is None:
            self._own_gradients = self.set_aside()
        backward = self._pass = self._new_pass()
        backward.is_begun = True
        self._ending = _ended  # until it is complete
        backward.shadow()
        backward.wait()
        self._complete(backward, [False] * len(self.parameters), missing=[])

    def end_shadowing(self) -> None:
        """Restore this rank's gradients of the time before the first ``shadow``."""
        self._current()
        if self._own_gradients is not None:
            self._own_gradients.restore()
            self._own_gradients = None

    def set_aside(self) -> OwnGradients:
        """Take the gradients away from the parameters, for passes that must not add to them."""
        self._current()
        return OwnGradients(self.parameters, self.layout, self._averages)

    # --- a pass that an exception has ended ---

    def _current(self) -> BackwardPass | None:
        """Return the armed or running pass, after abandoning one that an exception has ended.

        Else the next pass would be taken for its rest, and fill buckets that are still averaged.

        Blocks: until the other ranks have launched what the abandoned pass has.
        """
        held, ending = self._pass, self._ending
        # Autograd drops the callback of a pass that has ended.
        if held is not None and held.is_begun and ending is not None and ending() is None:
            self._abandon()
        return self._pass

    def _abandon(self) -> None:
        with self._lock:
            # It stays the reducer's until then, because an exception may leave this wait, too.
            if self._pass is not None:
                self._pass.abandon()
            self._pass = self._ending = None

    def _replace(self) -> None:
        """Forget the armed pass, or one that a forward pass within it replaces."""
        held = self._current()
        if held is not None:
            held.settle()
        self._pass = self._ending = None

    # --- the backward pass ---

    def _new_pass(self) -> BackwardPass:
        self.layout.follow_storage()
        as_views = self._settings.gradient_as_bucket_view
        settings = PassSettings(self._group, self.hook, self.scale, as_views)
        return BackwardPass(self.layout, settings, self._usage)

    def is_averaging(self) -> bool:
        """Return whether autograd's additions now are averaged.

        They are not under ``no_sync``, nor for a module called without DDP.
        """
        return self._current() is not None or self.captures

    def _on_output_gradient(self, gradient: Tensor) -> None:
        # The outermost pass computes the outputs' gradients, so if the outputs are known, the pass
        # begins here. The end of a nested pass (a re-entrant checkpoint) would be too early.
        with self._lock:
            held = self._current()
            is_begun = held is not None and held.is_begun
            if not is_begun and not self.captures and adds_to_gradients(self.parameters):
                self._begin()

    def _on_accumulated_output_gradient(self, gradient: Tensor) -> None:
        if self.accumulation is not None and not self.is_averaging():
            self.accumulation.begin_pass()

    def _begin(self) -> BackwardPass:
        # Not armed: the second backward pass of one forward pass, or that of an earlier one.
        if self._pass is None:
            self._pass = self._new_pass()
        self._pass.is_begun = True
        self._ending = None
        if not self.captures:
            ending = partial(Reducer._finish, self)
            self._ending = weakref.ref(ending)
            torch.autograd.Variable._execution_engine.queue_callback(ending)
            del ending  # which a traceback of this frame would keep
            if self.accumulation is not None:
                self.accumulation.begin_pass()
        return self._pass

    def mark_ready(self, place: int, parameter: Tensor) -> None:
        """Count an addition to a parameter's gradient, by autograd or by a captured pass."""
        with self._lock:
            backward = self._current()
            if backward is None and not self.captures:
                if self._averages is not None and parameter.grad is not None:
                    self._averages.record_addition(place, parameter.grad)
                return
            if backward is None or not backward.is_begun:
                backward = self._begin()
            backward.mark_ready(place, parameter)

    def _finish(self) -> None:
        backward = self._pass
        # A forward pass within the backward pass (a checkpoint that recomputes the module) arms a
        # second pass, on all ranks alike; the first end has completed both.
        if backward is None:
            return
        counts = backward.readiness.counts
        self._usage.record_additions(counts)
        has_gradient = backward.has_gradients(self.parameters)
        backward.launch_rest()
        backward.wait()
        missing = [name for name, count in zip(self._names, counts, strict=True) if not count]
        self._complete(backward, has_gradient, missing)

    def finish_captured(self) -> bool:
        """Finish a captured pass; return False if the pass brought no gradient."""
        if self._pass is None or not self._pass.is_begun:
            return False
        self._finish()
        return True

    def end_captured(self) -> None:
        """Average later passes as before; abandon a captured pass that has not been finished."""
        try:
            if self._pass is not None and self._pass.is_begun:
                self._abandon()
        finally:
            self.captures = False

    def _complete(
        self, backward: BackwardPass, has_gradient: list[bool], missing: list[str]
    ) -> None:
        """Hand the averages back that any rank has; rebuild the buckets after the first pass.

        The pass is then over.
        """
        if self.accumulation is not None:
            # What was accumulated may be all that there is of a gradient.
            held = self.accumulation.accumulated()
            has_gradient = [
                has or name in held for has, name in zip(has_gradient, self._names, strict=True)
            ]
        if self._settings.find_unused_parameters or self._settings.static_graph:
            used = used_somewhere(
                self._group,
                has_gradient,
                backward.complaints,
                self._settings.find_unused_parameters,
                backward.hook_error,
            )
            self._usage.record_used(used)
        else:
            require_all_gradients(self._group, missing, backward.complaints, backward.hook_error)
            used = [True] * len(self.parameters)
        backward.hand_back(used)
        self._pass = self._ending = None
        if self._own_gradients is None and not self.captures:
            in_backward.step(self.parameters, used)
        # Rebuilt here, because all ranks execute this line. A single rank may run the next forward
        # pass alone.
        if not self.layout.is_rebuilt:
            self.layout.rebuild(backward.readiness.ready_order)

    # --- torch's names ---

    def prepare_for_backward(self, outputs: Sequence[Tensor]) -> None:
        """Average the next backward pass, for a caller that has not run ``forward`` of DDP."""
        self.arm(list(outputs))

    def _rebuild_buckets(self) -> bool:
        """Return False: the end of the first backward pass rebuilds the buckets."""
        return False

    def _delay_all_reduce(self) -> None:
        """Do nothing: a static graph's first backward pass ends by itself."""


def _ended() -> None:
    """Stand for the reference to a callback that autograd has dropped."""


def _call_weak(method: weakref.WeakMethod[Callable[[], bool]]) -> bool:
    is_averaging = method()
    return is_averaging is not None and is_averaging()


def _agreed_bounds(
    group: Group, ownership: Ownership | None, parameters: Sequence[Tensor], names: Sequence[str]
) -> dict[int, Bounds] | None:
    """Return the owners by place after a comparison between all ranks."""
    with comparing(group, "the communication hook") as rows:
        rows.append(("reduces to owners:", ownership is not None))
        if ownership is None:
            return None
        bounds = bounds_by_place(ownership, parameters, names, group.size)
        in_backward.require_none(zip(names, parameters, strict=True))
        rows.append(("number of buffers", ownership.buffers))
        rows += [(f"owners of {name!r}", bounds.get(place)) for place, name in enumerate(names)]
    return bounds
