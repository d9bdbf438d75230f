"""``DistributedDataParallel``: a module whose gradients are averaged over all ranks of a group."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed.algorithms.join import Joinable

from mpidist.comm.resolve_group import default_group, native_group
from mpidist.ddp import in_backward, plan, torch_arguments
from mpidist.ddp.backward_pass import Hook
from mpidist.ddp.join import UnevenInputs
from mpidist.ddp.layout import Settings
from mpidist.ddp.reducer import Reducer
from mpidist.ddp.tensor_tree import tensors_in, to_device
from mpidist.ddp.torch_private import TorchNames
from mpidist.ddp.verification import announcing_refusal, broadcast_state, require_equal
from mpidist.errors import MpidistError
from mpidist.kernels.launch import has_kernels

_NOT_SAVED = ("process_group", "_group", "reducer", "device_mesh")


class DistributedDataParallel(TorchNames, UnevenInputs, torch.nn.Module):
    """Average the gradients of ``module`` over all ranks of a group in each backward pass.

    Sparse gradients, of ``nn.Embedding`` and ``nn.EmbeddingBag`` with ``sparse=True``, stay sparse:
    each is averaged by itself, is no view of a bucket, and is not given to a communication hook.

    Collective: constructed by all ranks of the group, which then run forward and backward the same
    number of times, or within ``join()``.

    Args:
        module: The module; its parameters on this rank's device.
        device_ids: None, or this rank's one GPU: inputs are moved there.
        output_device: None, or that same GPU.
        dim: Accepted for torch's sake; a rank has one device, so inputs are not scattered.
        broadcast_buffers: False: buffers stay each rank's own, from the start.
            ``forward_sync_buffers`` goes before it.
        init_sync: Verify names, shapes and dtypes of parameters and buffers on all ranks, then
            broadcast rank 0's.
        process_group: A native group, or a torch group on the backend ``mpidist``; if None torch's
            default group if it is ours, else all ranks of the job.
        bucket_cap_mb: MiB of gradients that travel together; 25, and less for the first bucket, if
            None.
        find_unused_parameters: Parameters may lack a gradient, and not the same ones on all ranks.
        check_reduction: Deprecated, without effect.
        gradient_as_bucket_view: Gradients are views of the buckets. torch's default is False.
        static_graph: Which parameters are used, and how often, never changes.
        delay_all_reduce_named_params: Refused, with what to use instead.
        param_to_hook_all_reduce: Refused likewise.
        mixed_precision: Refused likewise.
        device_mesh: Instead of ``process_group``: a mesh of one dimension on the backend
            ``mpidist``, by itself or cut out of another (``mesh["dp"]``); parameters that are
            DTensors on the other dimensions are then averaged shard by shard.
        skip_all_reduce_unused_params: With ``find_unused_parameters`` or ``static_graph``: buckets
            that no rank used in the first backward pass do not travel in the later ones, which must
            leave the same parameters unused.
        bucket_cap_mb_list: MiB of the first, the second, … bucket; the last holds for all that
            follow.
        batched_grad_copy: Accepted; gradients that need a copy are always copied together.
        forward_sync_buffers: Broadcast rank 0's buffers before each forward pass; True if neither
            it nor ``broadcast_buffers`` is given.
        most_buckets: Merge buckets until there are no more than these (ours alone).

    Raises:
        ValueError: An argument that cannot be honoured.
        TypeError: ``process_group`` is of another backend, or an argument of another type.
        RuntimeError: No parameter requires a gradient.
        DisagreementError: Parameters, buffers or settings differ between ranks (on all ranks, with
            ``init_sync``).

    Source:
        ``torch.nn.parallel.DistributedDataParallel`` of torch 2.13, whose names and meanings these
        are.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Sequence[Any] | None = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: Any = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        *,
        most_buckets: int | None = None,
    ) -> None:
        super().__init__()
        Joinable.__init__(self)
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self.process_group = torch_arguments.resolve_group(device_mesh, process_group)
        self._group = native_group(self.process_group)
        if device_mesh is not None:
            self.device_mesh = device_mesh
            torch_arguments.use_local_shards(module, device_mesh)
        init_buffers, self.forward_sync_buffers = torch_arguments.buffer_syncing(
            broadcast_buffers, forward_sync_buffers
        )
        self.module = module
        with announcing_refusal(self._group) if init_sync else contextlib.nullcontext():
            torch_arguments.require_default(
                mixed_precision, delay_all_reduce_named_params, param_to_hook_all_reduce
            )
            named = torch_arguments.require_supported(module, self.parameters_to_ignore)
            self._input_device = torch_arguments.input_device(
                module, device_ids, output_device, check_reduction
            )
            self.settings = Settings(
                limits=plan.limits_of(bucket_cap_mb, bucket_cap_mb_list),
                most_buckets=plan.require_count(most_buckets),
                gradient_as_bucket_view=gradient_as_bucket_view,
                find_unused_parameters=find_unused_parameters,
                static_graph=static_graph,
                behind_all=(find_unused_parameters or static_graph)
                and torch_arguments.communicates_in_backward(module),
                skip_unused=skip_all_reduce_unused_params,
            )
        self.device_ids = list(device_ids) if device_ids else None
        self.output_device = output_device
        self.dim = dim
        self.bucket_bytes_cap_list = (
            [] if bucket_cap_mb_list is None else list(self.settings.limits)
        )
        self.device = named[0][1].device
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        if init_sync:
            self._sync_state(named, init_buffers)
        self._make_reducer()

    def register_comm_hook(self, state: Any, hook: Hook | None) -> None:
        """Have ``hook(state, bucket)`` reduce the buckets of dense gradients; again at any time between steps.

        Collective: over the group, if gradients leave to their owners (``to_owners``) or have done
        so until now; the buckets are then laid out again. Clear the gradients before: what stands
        counts as each rank's own afterwards.

        Args:
            state: Passed to each call.
            hook: Gets a ``GradBucket`` and returns a future of the reduced buffer, ours or torch's.
                Collectives that it starts from a future's callback are executed in the order of the
                buckets on all ranks. None for the average.

        Raises:
            TypeError: ``hook`` cannot be called.
            ValueError: Its owners are of another module, do not cover a parameter, or are ranks
                that the group lacks.
            DisagreementError: Another rank raised that, or has other owners.
        """
        if hook is not None and not callable(hook):
            raise TypeError(f"register_comm_hook needs a callable; got {type(hook).__name__}")
        self.reducer.register_hook(hook, state)

    def bucket_plan(self) -> dict[str, Any]:
        """Return which gradients travel together, as plain values; saved, it lets a run go on with the same bits."""
        return self.reducer.layout.saved_plan()

    def use_bucket_plan(self, plan: dict[str, Any]) -> None:
        """Lay the buckets out as ``bucket_plan()`` said of a module with the same parameters.

        Collective: called by all ranks with the same plan, between steps.

        Raises:
            ValueError: Not exactly this module's parameters, or a bucket of several dtypes or
                devices.
        """
        self.reducer.layout.load_plan(plan)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients add up on each rank: forward passes in here are not averaged."""
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module.

        Under no_grad or no_sync nothing is averaged. Buffers are broadcast before the first pass
        and each that follows an averaged one, as in torch: before an evaluation, too, which
        therefore all ranks must begin. Outside ``join`` a forward pass communicates nothing else:
        without buffers, or with ``forward_sync_buffers=False``, one rank alone may evaluate; with
        them it calls ``ddp.module``.
        """
        averages = torch.is_grad_enabled() and self.require_backward_grad_sync
        syncs_buffers = self.forward_sync_buffers and self.require_forward_param_sync
        iteration = self._exchange(averages, syncs_buffers)
        root = iteration.root if iteration else 0
        if syncs_buffers and not self._syncs_behind():
            self._sync_buffers(root, waits=not averages)
        if torch.is_grad_enabled():
            in_backward.detach_hooks(self.reducer.parameters)
        if self._input_device is not None:
            args, kwargs = to_device((args, kwargs), self._input_device)
        output = self.module(*args, **kwargs)
        if syncs_buffers and self._syncs_behind():
            self._sync_buffers(root, waits=not averages)
        # Again: a framework whose module trains within its forward pass averages by itself
        # (``prepare_for_backward``).
        averages = averages and self.require_backward_grad_sync
        self.require_forward_param_sync = averages
        if averages:
            self.reducer.scale = self._scale(iteration)
            self.reducer.arm([tensor for tensor in tensors_in(output) if tensor.requires_grad])
        elif torch.is_grad_enabled():
            self.reducer.disarm()
        return output

    # --- state ---

    def _state(self, with_buffers: bool) -> list[tuple[str, torch.Tensor]]:
        named: list[tuple[str, torch.Tensor]] = list(self.module.named_parameters())
        if with_buffers:
            named += self.module.named_buffers()
        return [(name, tensor) for name, tensor in named if name not in self.parameters_to_ignore]

    def _sync_state(self, named: list[tuple[str, torch.nn.Parameter]], with_buffers: bool) -> None:
        """Compare settings and state on all ranks, then broadcast rank 0's state."""
        state = self._state(with_buffers)
        # Hooks need the same arithmetic on all ranks.
        arithmetic = "kernels" if has_kernels(named[0][1]) else "torch"
        sparse = torch_arguments.sparse_parameters(self.module)
        settings = (
            self.settings,
            self.forward_sync_buffers,
            arithmetic,
            [name for name, parameter in named if id(parameter) in sparse],
            in_backward.names_of(named),
        )
        require_equal(self._group, state, settings)
        broadcast_state(self._group, [tensor for _, tensor in state])

    def _make_reducer(self, local: bool = False) -> None:
        named = torch_arguments.require_supported(self.module, self.parameters_to_ignore)
        names, parameters = [name for name, _ in named], [parameter for _, parameter in named]
        sparse = torch_arguments.sparse_parameters(self.module)
        self.reducer = Reducer(
            parameters,
            names,
            [id(p) in sparse for p in parameters],
            self._group,
            self.settings,
            local,
        )

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the group, the reducer and its hook; as in torch, only a module on the default group can be copied.

        Raises:
            MpidistError: Another group.
        """
        if native_group(self.process_group) is not native_group(default_group()):
            raise MpidistError(
                "DistributedDataParallel can be pickled or copied on the default group only, "
                "because a copy knows no other; "
                "save its state_dict() instead"
            )
        return {name: value for name, value in self.__dict__.items() if name not in _NOT_SAVED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.process_group = default_group()
        self._group = native_group(self.process_group)
        self._make_reducer(local=True)  # one rank may make a copy for itself
