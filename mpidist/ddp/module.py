"""``DistributedDataParallel``: a module whose gradients are averaged over all ranks of a group."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import TypeVar

import torch
from torch.distributed.algorithms.join import Joinable
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map

from mpidist.comm.consistency import Row, comparing
from mpidist.comm.group_types import AnyGroup
from mpidist.comm.mpi import determinism
from mpidist.comm.world_group import default_group, native_group
from mpidist.ddp import in_backward, torch_arguments
from mpidist.ddp.buckets import plan
from mpidist.ddp.buckets.layout import SavedPlan
from mpidist.ddp.buckets.settings import Settings
from mpidist.ddp.buffer_syncing import BufferSyncing
from mpidist.ddp.hooks.exact import ExactAverage, exact_average_hook
from mpidist.ddp.hooks.stages import Hook
from mpidist.ddp.join import JoinedOptimizer, TorchJoinHook, UnevenInputs
from mpidist.ddp.reducer import Reducer
from mpidist.ddp.torch_arguments import Device
from mpidist.ddp.torch_private import TorchNames
from mpidist.ddp.verification import broadcast_module, named_state, rows_of
from mpidist.errors import MpidistError
from mpidist.kernels.launch import has_kernels

T = TypeVar("T")

_NAME = "DistributedDataParallel"
_NOT_SAVED = ("process_group", "_group", "reducer", "device_mesh", "_uneven_inputs")


class DistributedDataParallel(TorchNames, Joinable, torch.nn.Module):
    """Average the gradients of ``module`` over all ranks of a group in each backward pass.

    Sparse gradients, of ``nn.Embedding`` and ``nn.EmbeddingBag`` with ``sparse=True``, stay sparse:
    each is averaged separately, is no view of a bucket, and is not passed to a communication hook.

    Collective: constructed by all ranks of the group, which then run forward and backward the same
    number of times, or within ``join()``.

    Args:
        module: The module; its parameters on this rank's device.
        device_ids: None, or this rank's one GPU, to which inputs are moved.
        output_device: None, or the same GPU.
        dim: Without effect: a rank has one device, and inputs are not scattered.
        broadcast_buffers: False: buffers stay each rank's own, from the start.
            ``forward_sync_buffers`` overrides it.
        init_sync: Verify names, shapes and dtypes of parameters and buffers on all ranks, then
            broadcast rank 0's.
        process_group: A native group, or a torch group on the backend ``mpidist``. None: torch's
            default group if its backend is ``mpidist``, else all ranks of the job.
        bucket_cap_mb: MiB of gradients per bucket. None: 25, and less for the first bucket.
        find_unused_parameters: Parameters may lack a gradient, and not the same ones on all ranks.
        check_reduction: Deprecated, without effect.
        gradient_as_bucket_view: Gradients are views of the buckets. torch's default is False.
        static_graph: All passes use the same parameters equally often.
        delay_all_reduce_named_params: Refused; the error names a replacement.
        param_to_hook_all_reduce: Refused, too.
        mixed_precision: Refused, too.
        device_mesh: Instead of ``process_group``: a mesh of one dimension on the backend
            ``mpidist``, whole or sliced from another (``mesh["dp"]``); parameters that are DTensors
            on the other dimensions are then averaged shard by shard.
        skip_all_reduce_unused_params: With ``find_unused_parameters`` or ``static_graph``: buckets
            that no rank used in the first backward pass are not reduced in later passes, which must
            leave the same parameters unused.
        bucket_cap_mb_list: MiB of the first, the second, … bucket; the last value is used for all
            following buckets.
        batched_grad_copy: Without effect: gradients that need a copy are always copied together.
        forward_sync_buffers: Broadcast rank 0's buffers before each forward pass; True if neither
            this nor ``broadcast_buffers`` is given.
        lazy_bucket_allocation: Without effect, and True gets a warning: buckets are memory that the
            ranks of a node share, made once; ``gradient_as_bucket_view`` saves the second copy.
        most_buckets: Largest number of buckets; more are merged (not in torch).
        exact_average: Gradients become the mean over all backward passes of all ranks since the
            last average, those under ``no_sync`` included, with bits that depend neither on their
            order nor on their division among ranks (not in torch). None: True if
            ``MPIDIST_DETERMINISTIC=exact``.

    Raises:
        ValueError: An argument cannot be supported.
        TypeError: ``process_group`` is of another backend, or an argument of another type.
        RuntimeError: No parameter requires a gradient.
        DisagreementError: Parameters, buffers or settings differ between ranks (on all ranks, with
            ``init_sync``).

    Source:
        ``torch.nn.parallel.DistributedDataParallel`` of torch 2.15, whose names and meanings these
        are.
    """

    require_backward_grad_sync = True

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Sequence[Device] | None = None,
        output_device: Device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: AnyGroup = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        delay_all_reduce_named_params: object = None,
        param_to_hook_all_reduce: object = None,
        mixed_precision: object = None,
        device_mesh: DeviceMesh | None = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        lazy_bucket_allocation: bool = False,
        *,
        most_buckets: int | None = None,
        exact_average: bool | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self.process_group = torch_arguments.resolve_group(device_mesh, process_group)
        self._group = native_group(self.process_group)
        if device_mesh is not None:
            self.device_mesh = device_mesh
            torch_arguments.use_local_shards(module, device_mesh)
        at_start, before_forward = torch_arguments.buffer_syncing(
            broadcast_buffers, forward_sync_buffers
        )
        self._buffer_syncing = BufferSyncing(module, self.parameters_to_ignore, before_forward)
        self._uneven_inputs = UnevenInputs(module, self.parameters_to_ignore, self._buffer_syncing)
        comparison: contextlib.AbstractContextManager[list[Row]] = (
            comparing(self._group, _NAME) if init_sync else contextlib.nullcontext([])
        )
        with comparison as rows:
            torch_arguments.require_default(
                mixed_precision, delay_all_reduce_named_params, param_to_hook_all_reduce
            )
            torch_arguments.require_supported(module, self.parameters_to_ignore)
            torch_arguments.warn_of_lazy_buckets(lazy_bucket_allocation)
            self._input_device = torch_arguments.input_device(
                module, device_ids, output_device, check_reduction
            )
            self.settings = Settings(
                limits=plan.limits_of(bucket_cap_mb, bucket_cap_mb_list),
                most_buckets=most_buckets,
                gradient_as_bucket_view=gradient_as_bucket_view,
                find_unused_parameters=find_unused_parameters,
                static_graph=static_graph,
                communicates_in_backward=torch_arguments.communicates_in_backward(module),
                skip_unused=skip_all_reduce_unused_params,
            )
            self._is_exact = determinism.is_exact() if exact_average is None else exact_average
            state = named_state(module, self.parameters_to_ignore, at_start)
            rows += [("the settings", self._compared()), *rows_of(state)] if init_sync else ()
        self.device_ids = list(device_ids) if device_ids else None
        self.output_device = output_device
        self.dim = dim
        if init_sync:
            broadcast_module(self._group, state)
        self._make_reducer()

    def register_comm_hook(self, state: object, hook: Hook | None) -> None:
        """Reduce buckets of dense gradients by ``hook(state, bucket)``; callable between any steps.

        Collective: over the group, if this hook or the last one reduces to owners (``to_owners``);
        the buckets are then laid out again. Clear the gradients before: existing ones count as each
        rank's own afterwards.

        Args:
            state: Passed to each call.
            hook: Takes a ``GradBucket`` and returns a future of the reduced buffer, ours or
                torch's. Collectives that it starts from a future's callback are executed in the
                order of the buckets on all ranks. None for the average.

        Raises:
            TypeError: ``hook`` is not callable.
            ValueError: Its owners are of another module, do not cover a parameter, or include ranks
                outside of the group; or ``state`` keeps PowerSGD's errors of another module, whose
                parameters have names of this one's.
            DisagreementError: Another rank raised one of these, or has other owners.
        """
        if hook is not None and not callable(hook):
            raise TypeError(f"register_comm_hook needs a callable; got {type(hook).__name__}")
        if self._is_exact:
            raise ValueError(
                "register_comm_hook: this module averages exactly (exact_average, or "
                "MPIDIST_DETERMINISTIC=exact), and a hook would round on the way"
            )
        self.reducer.register_hook(hook, state)

    def bucket_plan(self) -> SavedPlan:
        """Return the buckets as plain values, with which a later run gets the same bits."""
        return self.reducer.layout.saved_plan()

    def use_bucket_plan(self, plan: SavedPlan) -> None:
        """Lay the buckets out by the ``bucket_plan()`` of a module with the same parameters.

        Collective: called by all ranks with the same plan, between steps.

        Raises:
            ValueError: The plan does not hold exactly this module's parameters, or a bucket has
                several dtypes or devices.
        """
        self.reducer.layout.load_plan(plan)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on each rank: forward passes within are not averaged."""
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def forward(self, *args: object, **kwargs: object) -> object:
        """Call the module.

        Under no_grad or no_sync nothing is averaged. As in torch, buffers are broadcast before the
        first pass and before each pass that follows an averaged one. This includes an evaluation,
        which all ranks must therefore begin. Outside ``join`` a forward pass communicates nothing
        else: without buffers, or with ``forward_sync_buffers=False``, one rank alone may evaluate;
        otherwise a single rank calls ``ddp.module``.
        """
        buffers, uneven = self._buffer_syncing, self._uneven_inputs
        averages = torch.is_grad_enabled() and self.require_backward_grad_sync
        syncs_buffers = buffers.is_enabled and buffers.is_due
        iteration = uneven.announce(self, averages, syncs_buffers)
        if syncs_buffers:
            buffers.sync(self._group, iteration.root if iteration else 0)
        if torch.is_grad_enabled():
            in_backward.detach_hooks(self.reducer.parameters)
        if self._input_device is not None:
            args, kwargs = to_device((args, kwargs), self._input_device)
        output = self.module(*args, **kwargs)
        # Read again, because a framework whose backward passes run within the forward pass arms the
        # reducer directly (``prepare_for_backward``) and clears the attribute.
        averages = averages and self.require_backward_grad_sync
        buffers.is_due = averages
        if torch.is_grad_enabled():
            outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
            if averages:
                self.reducer.scale = uneven.scale(iteration)
                self.reducer.arm(outputs)
            else:
                self.reducer.disarm(outputs)
        return output

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
        *,
        optimizers: Sequence[JoinedOptimizer] = (),
    ) -> contextlib.AbstractContextManager[None]:
        """Train on uneven inputs: a rank whose loop has ended shadows the others' collectives.

        At the end all ranks have the weights of a rank that had inputs to the end.

        Collective: entered and left by all ranks of the group. Collectives of the user, and of
        modules such as SyncBatchNorm, are not shadowed.

        Args:
            divide_by_initial_world_size: Divide gradients by W, so that each input has the same
                weight; else by the number of ranks with inputs. A communication hook applies its
                own divisor.
            enable: False does nothing, for inputs that are known to be even.
            throw_on_early_termination: Raise on all ranks when the first has no inputs left.
            optimizers: Sharded optimizers on the same group, in one order on all ranks, with
                ``before_step`` (called before each step), ``step_joined()`` and ``end_joined()``; a
                rank whose loop has ended executes their steps, too.

        Raises:
            RuntimeError: A rank has no inputs left, with ``throw_on_early_termination``.
            DisagreementError: The ranks are in different passes (one under no_sync or no_grad).
        """
        return self._uneven_inputs.join(
            divide_by_initial_world_size, enable, throw_on_early_termination, optimizers
        )

    # --- torch's Join ---

    def join_hook(self, **kwargs: object) -> TorchJoinHook:
        """Return the hook that torch's ``Join`` runs on a rank without inputs; see ``join``."""
        self._uneven_inputs.divides_by_initial = bool(
            kwargs.get("divide_by_initial_world_size", True)
        )
        return TorchJoinHook(self._uneven_inputs, self._group, self.reducer)

    @property
    def join_device(self) -> torch.device:
        """Return the device of torch's ``Join`` for its own collectives."""
        return self.device

    @property
    def join_process_group(self) -> AnyGroup:
        """Return the group of torch's ``Join`` for its own collectives."""
        return self.process_group

    # --- the reducer ---

    def _compared(self) -> str:
        """Return the settings that must be equal on all ranks."""
        named = torch_arguments.require_supported(self.module, self.parameters_to_ignore)
        # Hooks need the same arithmetic on all ranks.
        arithmetic = "kernels" if has_kernels(named[0][1]) else "torch"
        sparse = torch_arguments.sparse_parameters(self.module)
        return str(
            (
                self.settings,
                self._buffer_syncing.is_enabled,
                self._is_exact,
                arithmetic,
                [name for name, parameter in named if id(parameter) in sparse],
                in_backward.names_of(named),
            )
        )

    def _make_reducer(self, local: bool = False) -> None:
        named = torch_arguments.require_supported(self.module, self.parameters_to_ignore)
        names, parameters = [name for name, _ in named], [parameter for _, parameter in named]
        self.device = parameters[0].device
        sparse = torch_arguments.sparse_parameters(self.module)
        are_sparse = [id(parameter) in sparse for parameter in parameters]
        self.reducer = Reducer(parameters, names, are_sparse, self._group, self.settings, local)
        if self._is_exact:
            if any(are_sparse):
                raise ValueError("exact_average cannot serve parameters with sparse gradients")
            if found := in_backward.names_of(named):
                raise ValueError(
                    "exact_average cannot serve optimizers that step in the backward pass, which "
                    f"{', '.join(found[:10])} have: step after it"
                )
            is_averaging = weakref.WeakMethod(self.reducer.is_averaging)
            state = ExactAverage(named, lambda: (method := is_averaging()) is None or method())
            self.reducer.register_hook(exact_average_hook, state)
            self.reducer.accumulation = state
        self._uneven_inputs.use(self._group, self.reducer)

    def __getstate__(self) -> dict[str, object]:
        """Return the attributes without the group, the reducer and its hook.

        As in torch, only a module on the default group can be pickled or copied.

        Raises:
            MpidistError: The module is on another group.
        """
        if native_group(self.process_group) is not native_group(default_group()):
            raise MpidistError(
                "DistributedDataParallel can be pickled or copied on the default group only, "
                "because a copy has no reference to another; save its state_dict() instead"
            )
        return {name: value for name, value in self.__dict__.items() if name not in _NOT_SAVED}

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)
        self.process_group = default_group()
        self._group = native_group(self.process_group)
        self._uneven_inputs = UnevenInputs(
            self.module, self.parameters_to_ignore, self._buffer_syncing
        )
        self._make_reducer(local=True)  # one rank alone may make a copy


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in ``value``."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors_in(part)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for part in value:
            yield from tensors_in(part)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))


def to_device(value: T, device: torch.device) -> T:
    """Return ``value`` with its tensors copied to ``device``."""
    return tree_map(
        lambda part: part.to(device, non_blocking=True) if isinstance(part, torch.Tensor) else part,
        value,
    )
