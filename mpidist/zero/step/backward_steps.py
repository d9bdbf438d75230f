"""Steps within the backward pass: a communication hook steps this rank's part of a bucket.

For each bucket the groups of the base optimizer hold only that bucket's parameters. So each
parameter is stepped once, with its own step count, and a count of the group rises once a step
(``SettingChanges``). The order differs from ``step()``; the bits do not, because no parameter's
step depends on another's.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.distributed import GradBucket
from torch.profiler import record_function

from mpidist.comm.memory.stream import used_here
from mpidist.dynamo import untraced
from mpidist.kernels.view import laid_out
from mpidist.zero.shards import groups
from mpidist.zero.shards.groups import Groups
from mpidist.zero.shards.pieces import Piece
from mpidist.zero.shards.shards import Shards
from mpidist.zero.step.join import is_shadowing
from mpidist.zero.step.setting_changes import SettingChanges

Tensor = torch.Tensor
Hook: TypeAlias = Callable[[Any, Any], Any]  # (state, bucket) -> future, torch's or ours


class BackwardSteps:
    """Record of the pieces of one sharded optimizer that were stepped since its last ``step()``.

    Args:
        parameter_groups: Of all parameters.
        shards: The sharded optimizer's.
        optim: The base optimizer.
    """

    def __init__(
        self, parameter_groups: Groups, shards: Shards, optim: torch.optim.Optimizer
    ) -> None:
        self._groups = parameter_groups
        self._shards = shards
        self._optim = optim
        self._reduced: set[int] = set()  # ids of parameters in reduced buckets
        self._stepped: set[Piece] = set()
        self._changes = SettingChanges()
        self._error: Exception | None = None
        self._by_parameter: dict[int, Piece] = {}
        # Buckets between nodes complete on the group's thread, others on autograd's.
        self._lock = threading.Lock()

    @property
    def has_begun(self) -> bool:
        """Return whether a bucket was reduced since the last ``step()``."""
        return bool(self._reduced)

    def record_bucket(self, parameters: Sequence[Tensor]) -> None:
        """Record the parameters of a bucket that is being reduced.

        Raises:
            RuntimeError: One was reduced since the last ``step()`` (on all ranks: they have the
                same buckets).
        """
        new = {id(parameter) for parameter in parameters}
        if not self._reduced.isdisjoint(new):
            raise RuntimeError(
                "gradients were averaged again before the optimizer's step(): the first averages "
                "are in the parameters already. Call step() after each backward pass that "
                "averages, and run those that only accumulate under no_sync()"
            )
        self._reduced |= new

    def step(
        self, parameters: Sequence[Tensor], has_gradient: Sequence[bool], flat: Tensor
    ) -> None:
        """Step this rank's pieces of a bucket.

        The optimizer's ``step()`` raises errors later, on all ranks.

        Args:
            parameters: In the order of their gradients in ``flat``.
            has_gradient: For each parameter, whether it has a gradient on this rank. ``step()``
                steps the others: only the end of the pass shows whether all ranks leave one unused.
            flat: N averaged elements.
        """
        with self._lock, torch.no_grad(), record_function("mpidist::oss::step_in_backward"):
            try:
                self._step(parameters, has_gradient, flat)
            except Exception as error:
                self._error = self._error or error

    def step_rest(self, **kwargs: Any) -> Any:
        """Step the pieces that the backward pass has not stepped, and clear the record.

        Raises:
            Exception: The first error of a step in the backward pass.
        """
        optim = self._optim
        stepped, self._stepped = self._stepped, set()
        changes, self._changes = self._changes, SettingChanges()
        error, self._error = self._error, None
        self._reduced.clear()
        if error is not None:
            raise error
        rest = [piece for piece in self._shards.pieces if piece not in stepped]
        if not stepped:
            return optim.step(**kwargs)
        result = None
        # A group of which no parameter was stepped may count its steps all the same.
        own = {id(piece.tensor) for piece in stepped}
        is_missed = any(
            group["params"] and own.isdisjoint(map(id, group["params"]))
            for group in optim.param_groups
        )
        if is_missed or any(piece.tensor.grad is not None for piece in rest):
            result = step_only(optim, [piece.tensor for piece in rest], changes, **kwargs)
        changes.set(optim)
        return result

    def _step(
        self, parameters: Sequence[Tensor], has_gradient: Sequence[bool], flat: Tensor
    ) -> None:
        shards = self._shards
        if shards.has_moved():  # step() then moves the buffers first
            return
        if len(self._by_parameter) != len(shards.pieces):
            self._by_parameter = {id(piece.parameter): piece for piece in shards.pieces}
        parts = flat.view(-1).split([parameter.numel() for parameter in parameters])
        found: list[tuple[Piece, Tensor]] = []
        for parameter, part, has in zip(parameters, parts, has_gradient, strict=True):
            piece = self._by_parameter.get(id(parameter))
            if piece is not None and has:
                found.append((piece, piece.part_of(laid_out(part, parameter))))
        if not found:
            return
        shards.masters.renew(shards.pieces)
        groups.sync(self._groups, self._optim.param_groups)
        before = [piece.tensor.grad for piece, _ in found]
        try:
            for piece, gradient in found:
                piece.tensor.grad = gradient
            step_only(self._optim, [piece.tensor for piece, _ in found], self._changes)
        finally:
            for (piece, _), gradient_before in zip(found, before, strict=True):
                piece.tensor.grad = gradient_before
        self._stepped.update(piece for piece, _ in found)
        if not shards.masters.flats:
            # A cut piece has its own version counter; autograd checks the parameter's when a graph
            # needs the old values.
            torch.autograd.graph.increment_version(
                [piece.parameter for piece, _ in found if not piece.is_parameter]
            )


class SteppingHook:
    """Communication hook that runs another hook and then steps this rank's part of the bucket.

    Attributes:
        hook: The other hook.
        is_in_order: As of ``hook``: steps issue no collectives.
        ownership: As of ``hook`` (``to_owners``), for the reducer; else None.
    """

    def __init__(self, hook: Hook, steps: BackwardSteps) -> None:
        self.hook = hook
        self.is_in_order: bool = getattr(hook, "is_in_order", False)
        self.ownership: object = getattr(hook, "ownership", None)
        self._steps = steps
        # torch's module checks the signature; annotations, if any, must name its GradBucket.
        self.__name__ = self.__qualname__ = (
            f"stepping({getattr(hook, '__qualname__', type(hook).__name__)})"
        )
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        self.__signature__ = inspect.Signature(
            [inspect.Parameter(name, kind) for name in ("state", "bucket")]
        )

    def __call__(self, state: object, bucket: Any) -> Any:
        """Reduce the bucket; return a future that completes after the step of this rank's part.

        What is no future of the bucket's elements is handed on unstepped: the module refuses it.

        Raises:
            RuntimeError: The bucket was reduced since the last ``step()``.
        """
        parameters = bucket.parameters()
        self._steps.record_bucket(parameters)
        # A rank without inputs steps in ``step()``, after it has received the others' settings.
        steps = not (
            is_shadowing(parameters)
            or (isinstance(bucket, GradBucket) and torch._C._current_graph_task_id() == -1)
        )
        has_gradient = [steps and parameter.grad is not None for parameter in parameters]
        dtype, numel = bucket.buffer().dtype, bucket.buffer().numel()
        future = self.hook(state, bucket)
        if not hasattr(future, "then"):
            return future

        def averaged(ended: Any) -> Any:
            value = ended.value()
            if isinstance(value, (list, tuple)) and len(value) == 1:
                (value,) = value
            if isinstance(value, Tensor) and value.numel() == numel:
                self._steps.step(parameters, has_gradient, used_here(value).to(dtype))
            return value

        return future.then(averaged)


@untraced
class BackwardEndHook:
    """Forward hook of a module: a function runs at the end of each averaged backward pass.

    Args:
        function: Called by autograd, after the module's own callbacks.
    """

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function

    def __call__(self, module: torch.nn.Module, arguments: object, output: object) -> None:
        """Register the function on the outputs: tensors in lists, tuples and dicts."""
        if not (torch.is_grad_enabled() and getattr(module, "require_backward_grad_sync", True)):
            return
        is_queued = False

        def on_first_gradient(gradient: Tensor) -> None:
            nonlocal is_queued
            if not is_queued:
                is_queued = True
                # Queued twice, so that the function runs after the module's own callbacks.
                _queue_callback(partial(_queue_callback, self._function))

        for tensor in torch.utils._pytree.tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(on_first_gradient)


def _queue_callback(function: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(function)


def step_only(
    optim: torch.optim.Optimizer,
    tensors: Iterable[Tensor],
    changes: SettingChanges,
    **kwargs: Any,
) -> Any:
    """Step some of an optimizer's parameters; its groups hold only these during the step.

    Args:
        changes: Receives what the step changes in the settings, which stay as they are.
    """
    chosen = {id(tensor) for tensor in tensors}
    held = [group["params"] for group in optim.param_groups]
    try:
        for group, params in zip(optim.param_groups, held, strict=True):
            group["params"] = [tensor for tensor in params if id(tensor) in chosen]
        with changes.kept_back(optim):
            return optim.step(**kwargs)
    finally:
        for group, params in zip(optim.param_groups, held, strict=True):
            group["params"] = params
