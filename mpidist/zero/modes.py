"""The sharded optimizer beside other things: steps within the backward pass, shards brought during the forward pass, joins."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch.distributed.algorithms.join import Join, Joinable

from mpidist.comm.resolve_group import default_group
from mpidist.dynamo import untraced
from mpidist.zero import groups
from mpidist.zero.in_backward import BackwardSteps, Hook, SteppingHook
from mpidist.zero.join import BorrowedGradients, StepHook, require_named
from mpidist.zero.overlap import Gather, PendingGathers
from mpidist.zero.parameter_changes import ParameterChanges

Tensor = torch.Tensor


@untraced
class Modes(ParameterChanges, Joinable):
    """The part of the sharded optimizer that says when a step is taken, and when its results must be there.

    Attributes:
        before_step: Called before each step on a rank that has inputs; set by
            ``DistributedDataParallel.join``.
    """

    before_step: Callable[[], Any] | None = None
    _wire: Any

    def _init_modes(self, process_group: Any, overlaps: bool, bucket_cap_mb: float) -> None:
        Joinable.__init__(self)
        self._process_group = process_group
        self._overlaps = overlaps
        self._cap_bytes = bucket_cap_mb * (1 << 20)
        self._pending = PendingGathers(self)
        self._backward_steps: BackwardSteps | None = None
        self._completes = False  # the end of a backward pass does what is left of the step
        self._is_completing = self._is_joined = False
        self._borrowed = BorrowedGradients()

    # --- overlap of the gather with the next forward pass ---

    def wait(self) -> None:
        """Wait for the parameters of the last step; only ``overlap=True`` leaves them on the way.

        Blocks: until this rank's parameters are complete.
        """
        self._pending.wait()

    def _reads(self, parameters: Iterable[Tensor]) -> None:
        self._pending.wait_for(parameters)

    @property
    def _brings_later(self) -> bool:
        """Say whether ``step`` returns before the shards are there.

        Not where autograd calls it: what a function of its end puts on the stack of modes is gone
        behind it.
        """
        return self._overlaps and not self._is_completing and not self._is_in_place

    @property
    def _is_in_place(self) -> bool:
        """Say whether all ranks read the very memory that each of them has stepped."""
        return self._shards.is_one_copy and self.group.is_single_node

    def _begin_gathers(self) -> None:
        """Start to bring the shards, by bucket.

        Collective: over the group, in the order of its operations.
        """
        shards = self._shards
        if self._wire is None:
            gathers = shards.gather_in_buckets(self._cap_bytes)
        else:
            gathers = []
            for plan, flat, master in zip(
                shards.plans, shards.flats, shards.masters.flats, strict=True
            ):
                share = partial(self._wire.share, self.group, master, flat, plan.bounds)
                work = self.group.in_order(share, device=flat.device, operation="gather_shards")
                gathers.append(
                    Gather([shards.parameters[slot.number] for slot in plan.slots], [work])
                )
            shards.masters.mark_current(shards.pieces)
        self._pending.begin(gathers)

    # --- steps within the backward pass ---

    def stepping_hook(self, hook: Hook) -> SteppingHook:
        """Return a communication hook of DistributedDataParallel that also steps: ``hook``, then this rank's part of the bucket.

        ``register_comm_hook(state, optimizer.stepping_hook(hook))`` passes ``state`` to ``hook``.
        Each bucket is one call of the base optimizer's ``step``, with the settings of that moment;
        ``step()`` then steps what came in no bucket (sparse gradients, parameters that only other
        ranks used) and brings the shards together. It must follow each backward pass that averages;
        passes under ``no_sync`` only accumulate. Parameters must not be written between the
        backward pass and ``step()``. Called by all ranks.

        Args:
            hook: Ours for ``mpidist``'s DistributedDataParallel, torch's for torch's on the backend
                ``mpidist``.

        Raises:
            ValueError: ``one_copy``: other ranks may still read what this one would write.
            TypeError: ``hook`` cannot be called.
        """
        if not callable(hook):
            raise TypeError(f"stepping_hook needs a communication hook; got {type(hook).__name__}")
        if self._one_copy:
            raise ValueError(
                "one_copy=True and steps within the backward pass exclude each other: other ranks "
                "still read the copy"
            )
        if self._backward_steps is None:
            self._backward_steps = BackwardSteps(self)
        return SteppingHook(hook, self._backward_steps)

    def complete_after(self, module: torch.nn.Module) -> None:
        """Have the end of each averaged backward pass of ``module`` do what is left of the step; ``step()`` then does nothing.

        The shards are there when the backward pass returns, with ``overlap=True``, too.

        Args:
            module: DistributedDataParallel, torch's or ours, with a stepping hook. Its outputs are
                tensors, or lists, tuples and dicts of such.
        """
        self._completes = True
        module.register_forward_hook(self._forwarded)

    def _forwarded(self, module: torch.nn.Module, arguments: Any, output: Any) -> None:
        if torch.is_grad_enabled() and getattr(module, "require_backward_grad_sync", True):
            queued: list[bool] = []

            def began(gradient: Tensor) -> None:
                if not queued:
                    queued.append(True)
                    # behind what is queued by then: the module's own end
                    _at_the_end(partial(_at_the_end, self._complete))

            for tensor in torch.utils._pytree.tree_leaves(output):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(began)

    def _complete(self) -> None:
        if self._backward_steps is not None and self._backward_steps.has_begun:
            self._opt_called = True  # as torch's schedulers ask
            self._is_completing = True
            try:
                self.step()
            finally:
                self._is_completing = False

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # GradScaler asks, in step(), on all ranks.
        if self._backward_steps is not None:
            raise RuntimeError(
                "GradScaler cannot be used with steps within the backward pass: they have used "
                "scaled gradients"
            )
        return False

    def _refusal(self, closure: Any) -> Exception | None:
        if closure is not None and self._backward_steps is not None:
            return RuntimeError(
                "a closure cannot be used with steps within the backward pass: it would run after "
                "the step"
            )
        return None

    def _require_unstepped(self, operation: str) -> None:
        if self._backward_steps is not None:
            raise RuntimeError(
                f"{operation} cannot be used with steps within the backward pass: it would come "
                "after the step"
            )

    def _step_base(self, **kwargs: Any) -> Any:
        return (
            self.optim.step(**kwargs)
            if self._backward_steps is None
            else self._backward_steps.step_rest(**kwargs)
        )

    # --- uneven inputs ---

    def join_hook(self, **kwargs: Any) -> StepHook:
        """Return what torch's ``Join`` runs on a rank without inputs: ``Join([ddp, optimizer])``."""
        return StepHook(self)

    @property
    def join_device(self) -> torch.device:
        """Return the device of torch's ``Join`` for its own collectives."""
        return self.param_groups[0]["params"][0].device

    @property
    def join_process_group(self) -> Any:
        """Return the group of torch's ``Join`` for its own collectives."""
        return default_group() if self._process_group is None else self._process_group

    def step_joined(self) -> None:
        """Take the others' step on a rank that has no inputs left.

        Collective: over the group, whose others call ``step``.
        """
        self._is_joined = True
        try:
            self.step()
        finally:
            self._is_joined = False

    def end_joined(self) -> None:
        """Give this rank its own gradients back."""
        self._borrowed.give_back()

    def _enters_step(self) -> bool:
        """Bring this rank to the beginning of a step; False if the backward pass has taken it."""
        steps = self._backward_steps
        if (
            self._completes
            and not (self._is_completing or self._is_joined)
            and steps is not None
            and not steps.has_begun
        ):
            warnings.warn(
                "step() does nothing: the backward pass takes the step (hook_with_zero_step)",
                stacklevel=4,
            )
            return False
        self.wait()
        is_native = self.before_step is not None
        if not self._is_joined:
            if self.before_step is not None:
                self.before_step()
            else:
                require_named(
                    [group["params"][0] for group in self.param_groups if group["params"]]
                )
                Join.notify_join_context(self)
        if self._is_joined or is_native or self._join_config.enable:
            settings = [groups.settings(group) for group in self.param_groups]
            lent = self._borrowed.exchange(
                self.group,
                self._shards.parameters,
                self._shards.owned(),
                settings,
                not self._is_joined,
            )
            groups.sync(lent, self.param_groups)
        return True


def _at_the_end(function: Callable[[], Any]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(function)
