"""OSS, the sharded optimizer: each rank steps its shard, then all ranks gather all parameters.

Source: FairScale's ``OSS`` and torch's ``ZeroRedundancyOptimizer``, with the same names and
meanings.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.profiler import record_function

from mpidist.comm.consistency import comparing, maximum, raising_on_all, require_same
from mpidist.comm.group_types import AnyGroup
from mpidist.comm.mpi import autograd_mode
from mpidist.dynamo import untraced
from mpidist.zero import clipping, groups
from mpidist.zero import partition as partitions
from mpidist.zero.modes import Modes
from mpidist.zero.parameter_gather import gather_parameters
from mpidist.zero.partition import GREEDY, Cost
from mpidist.zero.pieces import Gradients
from mpidist.zero.shards import Shards
from mpidist.zero.wire import Wire, wire_of

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT

Tensor = torch.Tensor
T = TypeVar("T")


@untraced
class OSS(Modes):
    """Optimizer whose state is divided among the ranks of a group.

    Parameters that require gradients become views of flat buffers. Each rank builds ``optim`` over
    its shard of them. In ``step`` every rank steps its shard, and all ranks gather all shards: the
    result has the same bits as ``optim`` over all parameters. Ranks must hold equal parameters, and
    equal gradients of what they own; DistributedDataParallel guarantees both.

    Within a node the buffers are in memory that its ranks share. A process forked from a rank (a
    worker of torch's DataLoader) shares that memory too, so it must not write parameters.
    ``torch.save`` of one parameter writes the whole buffer, as for any view; save
    ``parameter.detach().clone()``.

    Collective: over the group, like ``step``, ``clip_grad_norm``, ``consolidate_state_dict``,
    ``load_state_dict``, ``add_param_group`` and ``refresh_trainable``.

    Args:
        params: Parameters, named parameters or groups, as for any optimizer; the same on all ranks.
        optim: Class of the base optimizer.
        group: Group of mpidist, or torch group on its backend. If None: torch's default group if
            its backend is mpidist, else all ranks.
        broadcast_buffer_size: Has no effect.
        broadcast_fp16: Shards are sent as fp16, as with ``wire="fp16"``.
        force_broadcast_object: Has no effect.
        partition: ``"greedy"``: whole parameters, in their order, to the rank with the fewest
            elements (FairScale's rule); ``"balanced"``: whole parameters by ``cost``, the most
            expensive first; ``"flat"``: equal shards cut through parameters, for element-wise
            optimizers alone.
        cost: For ``"balanced"``: ``"bytes"``, ``"matrix"`` or a function of a parameter; chosen by
            the class of ``optim`` if None.
        one_copy: The ranks of a node hold ONE copy of the parameters, in shared memory; nothing is
            copied after a step. All ranks of the node read what any of them writes, so only the
            optimizer may write parameters (else each rank's update is applied). Host memory only.
        wire: ``"bf16"``, ``"fp16"`` or ``"int8"``: the format of shards on the network. The owner
            keeps and steps its shard in the parameters' dtype; all ranks, the owner too, see the
            rounded values. In-place writes to a parameter are kept. Writes through
            ``parameter.data`` or numpy are not detected, and the next step overwrites them.
        **defaults: Further arguments of ``optim``.

    Attributes:
        optim: The base optimizer of this rank.
        rank: This process's rank in the group.
        world_size: W, the number of ranks in the group.

    Raises:
        ValueError: An unknown or impossible choice.
        TypeError: ``optim`` is no optimizer, or the group is another library's; ``overlap`` or
            ``bucket_cap_mb`` of earlier versions is given.
        DisagreementError: Ranks have different parameters or arguments, or one of them refused (all
            ranks).

    Source: arXiv:1910.02054 §5.1; FairScale 0.4.13, ``fairscale.optim.OSS``.
    """

    def __init__(
        self,
        params: ParamsT,
        optim: type[torch.optim.Optimizer] = torch.optim.SGD,
        group: AnyGroup = None,
        broadcast_buffer_size: int = -1,
        broadcast_fp16: bool = False,
        force_broadcast_object: bool = False,
        *,
        partition: str = GREEDY,
        cost: str | Cost | None = None,
        one_copy: bool = False,
        wire: str | torch.dtype | None = None,
        **defaults: Any,
    ) -> None:
        if broadcast_buffer_size != -1 or force_broadcast_object:
            warnings.warn(
                "broadcast_buffer_size and force_broadcast_object have no effect in mpidist",
                stacklevel=2,
            )
        self._init_state(group)
        self._init_modes(group)
        self._one_copy = one_copy
        with comparing(self.group, "OSS") as rows:
            _require_current(defaults)
            partitions.require(partition, optim)
            # The base optimizer adds the defaults, in the order of its class.
            super().__init__(params, {})
            self._shards = self._numbered_shards(
                partition,
                partitions.cost_of(cost, optim),
                wire_of("fp16" if broadcast_fp16 and wire is None else wire),
            )
            named_cost = cost if isinstance(cost, str) else None
            rows += [
                ("arguments", (optim.__name__, partition, named_cost, one_copy, str(wire))),
                ("defaults", groups.text(defaults)),
                *groups.rows(self.param_groups),
                ("owners", tuple(self._shards.owners)),
            ]
        with autograd_mode.allocating(), torch.no_grad():
            self._build(optim, defaults)
        self._is_constructed = True

    def _numbered_shards(self, partition: str, cost: Cost, wire: Wire | None) -> Shards:
        """Return the layout of the groups' parameters: numbered, with owners, without buffers."""
        groups.require_carried(self.param_groups, wire)
        self._wire = wire if self.world_size > 1 else None  # one rank sends nothing
        if self._one_copy and self._wire is not None:
            raise ValueError(
                "one_copy=True and wire= exclude each other: with a wire each rank keeps its own "
                "copy of the rounded parameters"
            )
        groups.require_host_memory(self.param_groups if self._one_copy else [])
        groups.require_distinct(self.param_groups)
        one_copy = self._one_copy and self.world_size > 1
        shards = Shards(
            self.group,
            partition,
            cost,
            one_copy,
            has_masters=self._wire is not None,
            saves_seen=self._wire is not None and not self._wire.is_rounding,
        )
        for group in self.param_groups:
            shards.add(group["params"])
        return shards

    def _build(self, optim: type[torch.optim.Optimizer], defaults: dict[str, Any]) -> None:
        """Allocate the buffers and construct the base optimizer. Collective: over the group."""
        shards = self._shards
        shards.make()
        with raising_on_all(self.group, f"OSS({optim.__name__})"):
            own = groups.by_group(self.param_groups, shards.pieces)
            base_groups = [
                {**groups.settings(group), "params": own[place]}
                for place, group in enumerate(self.param_groups)
            ]
            self.optim = optim(base_groups, **defaults)
        shards.place_parameters()
        groups.sync(self.optim.param_groups, self.param_groups)
        self.defaults = dict(self.optim.defaults)  # schedulers read momentum or betas there
        self.state = self.optim.state
        self._flatten_state()

    # --- the step ---

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Step this rank's shard, then gather all shards on all ranks.

        Collective: over the group.

        Blocks: until this rank's parameters are complete.

        Args:
            closure: Evaluates the model and returns the loss. The base optimizer calls it with
                gradients enabled, equally often on all ranks.
            **kwargs: For the base optimizer.

        Returns:
            The result of the base optimizer.

        Raises:
            DisagreementError: The base optimizer of another rank raised (this rank's own error is
                raised as it is). The step has then been taken in part, equally on all ranks.
        """
        # In inference mode the base optimizer would make state that cannot be changed outside it.
        with autograd_mode.allocating(), torch.no_grad():
            return self._step(closure, kwargs) if self._enters_step() else None

    def _step(self, closure: Callable[[], T] | None, kwargs: dict[str, Any]) -> T | None:
        self._prepare(self._closure_error(closure))
        gradients = Gradients(
            [] if self._shards.steps_parameters else self._shards.pieces, self._shards.outside()
        )
        result, error = None, None
        with record_function("mpidist::oss::optim_step"):
            try:
                gradients.attach()
                if closure is not None:
                    kwargs["closure"] = self._attaching(closure, gradients)
                result = self._step_base(**kwargs)
            except Exception as raised:
                error = raised
            finally:
                gradients.detach()
        # Also a barrier: all ranks have stepped, so one copy of the parameters is complete.
        failed = maximum(self.group, int(error is not None))
        if not self._state.is_flat(self.optim.state):
            self._flatten_state()
        with record_function("mpidist::oss::gather"):
            gather_parameters(self.group, self._shards, self._wire)
        groups.sync(self.optim.param_groups, self.param_groups)
        if failed:
            require_same(self.group, "OSS.step", (), error)
        return result

    def _attaching(self, closure: Callable[[], T], gradients: Gradients) -> Callable[[], T]:
        def evaluate() -> T:
            gradients.detach()
            # After this block no rank reads parameters, so other ranks may write the one copy.
            with raising_on_all(self.group, "OSS.step's closure"):
                with torch.enable_grad():
                    result = closure()
                gradients.attach()
            return result

        return evaluate

    # --- gradients ---

    def clip_grad_norm(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        filter_params_fn: clipping.Filter | None = None,
    ) -> Tensor:
        """Scale gradients in place such that their norm over all ranks is at most ``max_norm``.

        Each rank sums and scales the gradients of its own shards; those of other ranks' shards do
        not change.

        Collective: over the group.

        Args:
            norm_type: p > 0 of the p-norm; infinity too.
            filter_params_fn: Return the parameters that count, from a list of those with a gradient
                that this rank owns in part or whole.

        Returns:
            The norm before scaling, a 0-dim tensor: fp64 if any parameter is, else fp32.

        Raises:
            ValueError: ``norm_type`` is not positive, or ``max_norm`` is NaN.
            DisagreementError: Another rank refused.
        """
        self._require_unstepped("clip_grad_norm", "it would come after the step")
        with record_function("mpidist::oss::clip_grad_norm"), torch.no_grad():
            with raising_on_all(self.group, "OSS.clip_grad_norm"):
                max_norm, norm_type = clipping.limits(max_norm, norm_type)
                own = clipping.own_gradients(self._shards.stepped(), filter_params_fn)
            parameters = self._shards.parameters
            norm = clipping.clip(self.group, own, max_norm, norm_type, parameters[0].device)
            is_wide = any(p.dtype in (torch.float64, torch.complex128) for p in parameters)
            return norm if is_wide else norm.float()


def _require_current(defaults: dict[str, Any]) -> None:
    """Refuse arguments of ``OSS`` that no longer exist, which would reach the base optimizer.

    Raises:
        TypeError: One of them is given.
    """
    for name in ("overlap", "bucket_cap_mb"):
        if name in defaults:
            raise TypeError(
                f"OSS has no argument {name} any more: step() returns with all parameters. "
                "stepping_hook(hook) steps within the backward pass, beside the transfer of "
                "gradients; wire= sends fewer bytes"
            )
