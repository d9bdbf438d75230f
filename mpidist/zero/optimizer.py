"""OSS, the sharded optimizer: each rank steps its shard, then all ranks gather all parameters.

Source: FairScale's ``OSS`` and torch's ``ZeroRedundancyOptimizer``, with the same names and
meanings.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

import torch
from torch.distributed.algorithms.join import Joinable
from torch.profiler import record_function

from mpidist.comm.consistency import comparing, maximum, raising_on_all, require_same
from mpidist.comm.group_types import AnyGroup, Group
from mpidist.comm.mpi import autograd_mode
from mpidist.comm.recorder import recorder
from mpidist.comm.world_group import default_group, native_group
from mpidist.dynamo import untraced
from mpidist.zero import clipping
from mpidist.zero.shards import groups
from mpidist.zero.shards import partition as partitions
from mpidist.zero.shards.groups import ParamGroup
from mpidist.zero.shards.half_wire import wire_of
from mpidist.zero.shards.partition import GREEDY, Cost
from mpidist.zero.shards.pieces import Gradients
from mpidist.zero.shards.shards import Shards
from mpidist.zero.state import rank_local
from mpidist.zero.state import state_dict as state_dicts
from mpidist.zero.state.consolidation import CHUNK_BYTES, Consolidation, require_recipient
from mpidist.zero.state.flat_state import ParamState
from mpidist.zero.state.local_optimizer import LocalOptimizer, StateOfTensors
from mpidist.zero.state.rank_local import RankLocalState
from mpidist.zero.state.result_memory import KeptMemory
from mpidist.zero.step.backward_steps import Hook, SteppingHook
from mpidist.zero.step.join import StepHook
from mpidist.zero.step.parameter_changes import ParameterChanges
from mpidist.zero.step.policy import StepPolicy

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT, StateDict

Tensor = torch.Tensor
T = TypeVar("T")


@untraced
class OSS(torch.optim.Optimizer, Joinable):
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
        wire: ``"bf16"`` or ``"fp16"``: the format of shards on the network. The owner keeps and
            steps its shard in the parameters' dtype; all ranks, the owner too, see the rounded
            values. In-place writes to a parameter are kept. Writes through ``parameter.data`` or
            numpy are not detected, and the next step overwrites them.
        **defaults: Further arguments of ``optim``.

    Attributes:
        optim: The base optimizer of this rank.
        group: Native group.
        rank: This process's rank in the group.
        world_size: W, the number of ranks in the group.
        one_copy: As given.
        before_step: Called before each step on a rank with inputs; set by
            ``DistributedDataParallel.join``.

    Raises:
        ValueError: An unknown or impossible choice.
        TypeError: ``optim`` is no optimizer, or the group is another library's; ``overlap`` or
            ``bucket_cap_mb`` of earlier versions is given.
        DisagreementError: Ranks have different parameters or arguments, or one of them refused (all
            ranks).

    Source: arXiv:1910.02054 §5.1; FairScale 0.4.13, ``fairscale.optim.OSS``.
    """

    before_step: Callable[[], object] | None = None

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
        # On the instance: a class attribute would hide it in wrappers that derive from the class
        # and delegate to the object, as Fabric's does.
        self._is_constructed = False
        Joinable.__init__(self)
        self._process_group = group
        self.group: Group = native_group(group)
        self.rank = self.group.rank
        self.world_size = self.group.size
        self.one_copy = one_copy
        with comparing(self.group, "OSS") as rows:
            _require_current(defaults)
            partitions.require(partition, optim)
            # The base optimizer adds the defaults, in the order of its class.
            super().__init__(params, {})
            chosen_cost = partitions.cost_of(cost, optim)
            chosen = wire_of("fp16" if broadcast_fp16 and wire is None else wire)
            groups.require_carried(self.param_groups, chosen)
            used = chosen if self.world_size > 1 else None  # one rank sends nothing
            if one_copy and used is not None:
                raise ValueError(
                    "one_copy=True and wire= exclude each other: with a wire each rank keeps its "
                    "own copy of the rounded parameters"
                )
            groups.require_host_memory(self.param_groups if one_copy else [])
            groups.require_whole(self.param_groups)
            groups.require_distinct(self.param_groups)
            shares_copy = one_copy and self.world_size > 1
            shards = self._shards = Shards(self.group, partition, chosen_cost, shares_copy, used)
            for each in self.param_groups:
                shards.add(each["params"])
            named_cost = cost if isinstance(cost, str) else None
            rows += [
                ("arguments", (optim.__name__, partition, named_cost, one_copy, str(wire))),
                ("defaults", groups.text(defaults)),
                *groups.rows(self.param_groups),
                ("owners", tuple(shards.owners)),
            ]
        with autograd_mode.allocating(), torch.no_grad():
            shards.make()
            self._local = LocalOptimizer(optim, defaults, self.param_groups, shards)
            shards.place_parameters()
            self.optim = self._local.optim
            groups.sync(self.optim.param_groups, self.param_groups)
            self._local.flatten()
            self._recorder = recorder.of_process()
            self._signature = self._recorder.signature("step", f"OSS({optim.__name__})")
            self._code = torch.zeros(1, dtype=torch.int32, device="cpu")
        self.defaults = dict(self.optim.defaults)  # schedulers read momentum or betas there
        self._changes = ParameterChanges(
            self.param_groups, shards, self._local, one_copy, self._code
        )
        self._policy = StepPolicy(self.param_groups, shards, self.optim)
        self._consolidation = Consolidation(self.group)
        self._copies = KeptMemory()
        self._is_constructed = True

    @property
    def state(self) -> StateOfTensors:
        """State of this rank's shard: the base optimizer's.

        What is assigned takes its place, as ``defaultdict(dict)`` does where the state is to begin
        anew. Called by all ranks.
        """
        return self.optim.state

    @state.setter
    def state(self, state: Mapping[Tensor, ParamState]) -> None:
        # torch's constructor assigns an empty one first.
        if self._is_constructed:
            self._local.replace_state(state)

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
            if not self._policy.enters(self, self.before_step):
                return None
            end, number = self._recorder.end, self._recorder.begin(self._signature)
            try:
                return self._step(closure, kwargs)
            except BaseException:
                end = self._recorder.fail
                raise
            finally:
                end(number)

    def _step(self, closure: Callable[[], T] | None, kwargs: dict[str, Any]) -> T | None:
        shards, local, policy = self._shards, self._local, self._policy
        self._changes.follow(None if closure is None else policy.refusal())
        result, error = None, None
        with record_function("mpidist::oss::optim_step"):
            try:
                if closure is None and shards.steps_parameters and not shards.outside:
                    result = policy.step(**kwargs)
                else:
                    result = self._step_attached(closure, kwargs)
            except Exception as raised:
                error = raised
        # Also a barrier: all ranks have stepped, so their shards are complete.
        failed = maximum(self.group, int(error is not None), self._code)
        if len(self.optim.state) != local.flat.entries:
            local.flatten()
        with record_function("mpidist::oss::gather"):
            shards.gather()
        groups.sync(self.optim.param_groups, self.param_groups)
        if failed:
            require_same(self.group, "OSS.step", (), error)
        return result

    def _step_attached(self, closure: Callable[[], T] | None, kwargs: dict[str, Any]) -> T | None:
        """Step pieces that are not parameters, or beside frozen parameters with gradients."""
        shards = self._shards
        gradients = Gradients([] if shards.steps_parameters else shards.pieces, shards.outside)
        if closure is not None:
            kwargs["closure"] = self._attaching(closure, gradients)
        try:
            gradients.attach()
            return self._policy.step(**kwargs)
        finally:
            gradients.detach()

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

    # --- steps within the backward pass ---

    def stepping_hook(self, hook: Hook) -> SteppingHook:
        """Return a communication hook that runs ``hook``, then steps its bucket on this rank.

        Register it with ``register_comm_hook(state, optimizer.stepping_hook(hook))``, which passes
        ``state`` to ``hook``. Each bucket is one call of the base optimizer's ``step`` with the
        settings of that moment. ``step()`` then steps what was in no bucket (sparse gradients,
        parameters that only other ranks used) and gathers the shards; it must follow each backward
        pass that averages. Passes under ``no_sync`` only accumulate. Parameters must not be written
        between the backward pass and ``step()``. Called by all ranks.

        Args:
            hook: mpidist's or torch's; torch's DistributedDataParallel is on the backend
                ``mpidist``.

        Raises:
            ValueError: ``one_copy``: other ranks may still read what this rank would write.
            TypeError: ``hook`` cannot be called.
        """
        if not callable(hook):
            raise TypeError(f"stepping_hook needs a communication hook; got {type(hook).__name__}")
        if self.one_copy:
            raise ValueError(
                "one_copy=True and steps within the backward pass exclude each other: other ranks "
                "still read the copy"
            )
        return self._policy.stepping_hook(hook)

    def complete_after(self, module: torch.nn.Module) -> None:
        """Take the rest of the step at the end of each averaged backward pass of ``module``.

        ``step()`` then does nothing. The shards have arrived when the backward pass returns.

        Args:
            module: DistributedDataParallel, torch's or mpidist's, with a stepping hook. Its outputs
                are tensors, or lists, tuples and dicts of tensors.
        """
        self._policy.complete_after(module, self._complete)

    def _complete(self) -> None:
        self._opt_called = True  # for the check in torch's schedulers
        self.step()

    # --- uneven inputs ---

    def join_hook(self, **kwargs: object) -> StepHook:
        """Return the hook of torch's ``Join([ddp, optimizer])`` for a rank without inputs."""
        return StepHook(self.step_joined, self.end_joined)

    @property
    def join_device(self) -> torch.device:
        """Return the device for the collectives of torch's ``Join``."""
        return self.param_groups[0]["params"][0].device

    @property
    def join_process_group(self) -> AnyGroup:
        """Return the group for the collectives of torch's ``Join``."""
        return default_group() if self._process_group is None else self._process_group

    def step_joined(self) -> None:
        """Take the step of the other ranks on a rank without inputs.

        Collective: over the group, whose other ranks call ``step``.
        """
        self._policy.step_joined(self.step)

    def end_joined(self) -> None:
        """Restore this rank's own gradients."""
        self._policy.end_joined()

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
        self._policy.require_unstepped("clip_grad_norm", "it would come after the step")
        with record_function("mpidist::oss::clip_grad_norm"), torch.no_grad():
            with raising_on_all(self.group, "OSS.clip_grad_norm"):
                max_norm, norm_type = clipping.limits(max_norm, norm_type)
                own = clipping.own_gradients(self._shards.stepped(), filter_params_fn)
            parameters = self._shards.parameters
            norm = clipping.clip(self.group, own, max_norm, norm_type, parameters[0].device)
            is_wide = any(p.dtype in (torch.float64, torch.complex128) for p in parameters)
            return norm if is_wide else norm.float()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # GradScaler.step() reads this attribute on all ranks.
        self._policy.require_unstepped("GradScaler", "they have used scaled gradients")
        return False

    # --- parameters ---

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Add a group of parameters; its parameters are divided among the ranks separately.

        Collective: over the group.
        """
        if not self._is_constructed:
            super().add_param_group(param_group)
            return
        with autograd_mode.allocating(), torch.no_grad():
            self._changes.add(partial(super().add_param_group, param_group))

    def refresh_trainable(self) -> None:
        """Follow changes of ``requires_grad``: parameters that were frozen, or train again.

        Collective: over the group.
        """
        with autograd_mode.allocating(), torch.no_grad():
            self._changes.follow()
            self._changes.refresh("OSS.refresh_trainable")

    def partition_parameters(self) -> list[list[ParamGroup]]:
        """Return each rank's groups: settings, and in ``params`` the parameters that the rank owns.

        A cut parameter is in ``params`` as vectors of its elements.
        """
        by_owner = iter(self._shards.by_owner())
        found: list[list[ParamGroup]] = [[] for _ in range(self.world_size)]
        for group in self.param_groups:
            held = list(itertools.islice(by_owner, len(group["params"])))
            for rank, own in enumerate(found):
                params = [tensor for tensors in held for tensor in tensors[rank]]
                own.append({**groups.settings(group), "params": params})
        return found

    def bounds(self) -> dict[Tensor, tuple[tuple[int, int, int], ...]]:
        """Return the owners of each trainable parameter's elements: (rank, start, stop).

        Elements are counted in the order of their memory.
        """
        return self._shards.bounds()

    # --- state of all ranks ---

    def consolidate_state_dict(
        self, recipient_rank: int = 0, *, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        """Send all ranks' state to one rank, for its ``state_dict``.

        Other ranks allocate at most one chunk.

        Collective: over the group.

        Blocks: until this rank has sent its state; on the recipient until all state has arrived.

        Args:
            recipient_rank: Rank in the group; -1 for all.
            chunk_bytes: Longest message.

        Raises:
            ValueError: ``recipient_rank`` is out of range, or ``chunk_bytes`` not positive.
            DisagreementError: Another rank refused, or ranks name different recipients.
        """
        require_recipient(self.group, "OSS.consolidate_state_dict", recipient_rank, chunk_bytes)
        with record_function("mpidist::oss::consolidate"):
            with raising_on_all(self.group, "OSS.consolidate_state_dict"):
                state = self._local.state().with_masters()
            self._consolidation.run(state, recipient_rank, chunk_bytes)

    def state_dict(self, all_ranks: bool = False) -> StateDict:
        """Return the state as ``optim`` over all parameters on one rank would.

        With a wire there is also ``"masters"``, by parameter number, which torch's optimizers do
        not read: ``"value"``, the master copy, in the parameter's shape and dtype.

        Args:
            all_ranks: First consolidate on all ranks; collective over the group. Otherwise it is
                the state of the last ``consolidate_state_dict``, on its recipient.

        Raises:
            RuntimeError: The state was not consolidated on this rank.
        """
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        if all_ranks:
            self.consolidate_state_dict(-1)
        state = self._consolidation.result(self.rank)
        result = state_dicts.assembled(state, groups.packed(self.param_groups))
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            changed = post_hook(self, result)
            if changed is not None:
                result = changed
        return result

    # --- the state of one rank ---

    def rank_local_state_dict(self, *, copies: bool = True) -> RankLocalState:
        """Return this rank's state as flat tensors, for the same world size and layout.

        ``load_state_dict`` restores the same bits, those of a wire's master copies too.
        Communicates nothing.

        Args:
            copies: Return copies in host memory, unchanged by later steps; else the optimizer's own
                tensors.
        """
        state = self._local.state()
        return rank_local.packed(state.copied(self._copies) if copies else state, self.world_size)

    # --- torch.distributed.checkpoint ---

    def sharded_state_dict(self, *, copies: bool = True, masters: bool = True) -> StateDict:
        """Return this rank's state for ``torch.distributed.checkpoint``, to save or to load.

        The dict may be part of a larger one, with a model's state. Keys are those of torch's
        ``get_optimizer_state_dict``: ``state.<name>.<kind>``, ``param_groups.<place>.<setting>``;
        names are those of named parameters, else numbers. A checkpoint may be loaded at another
        world size, partition or memory format. Communicates nothing.

        A load fills the keys of this dict. A trainable parameter without state has the keys that
        its first step would make; for a checkpoint without them pass
        ``DefaultLoadPlanner(allow_partial_load=True)``, and the next step makes that state.

        Args:
            copies: Return copies in host memory, unchanged by later steps, as ``async_save`` needs;
                a load is then complete before ``load_sharded_state_dict`` changes anything. Else
                return the optimizer's own tensors.
            masters: With a wire, include its master copies, ``masters.<name>.value``. Else a load
                needs a checkpoint without them, and masters start from the parameters.
        """
        from mpidist.zero.state import checkpoint  # late: imports torch.distributed.checkpoint

        state = self._local.state()
        state = state.with_masters() if masters else replace(state, masters=())
        state = state.copied(self._copies) if copies else state
        return checkpoint.sharded(state, self.optim, self._shards.pieces)

    # --- loading ---

    def load_state_dict(self, state_dict: StateDict | RankLocalState) -> None:
        """Load a state dict of any world size, in the format of torch, FairScale or this class.

        All ranks pass the same state, or each its own ``rank_local_state_dict``. The argument is
        not changed.

        The parameters may be loaded before or after. With a wire, the next step compares them with
        the state's master copies, and renews those of other parameters; so does a state without
        masters for parameters that were written.

        Collective: over the group.

        Raises:
            ValueError: The state is of another model, class of optimizers or layout; nothing has
                been loaded (all ranks).
            DisagreementError: Another rank refused, or ranks give different settings; nothing has
                been loaded.
        """
        where, shards, given = "OSS.load_state_dict", self._shards, cast("Any", state_dict)
        with autograd_mode.allocating(), torch.no_grad():
            is_local = rank_local.is_rank_local(given)
            with comparing(self.group, where) as rows:
                given = dict(given) if isinstance(given, Mapping) else given
                for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
                    changed = pre_hook(self, given)
                    given = given if changed is None else changed
                rows.append(("rank-local", is_local))
                if is_local:
                    rank_local.require_fits(given, shards)
                else:
                    state_dicts.require_fits(given, self.param_groups, self.optim)
                    rows.append(("state of", state_dicts.summary(given)))
                rows += [("group", groups.text(group)) for group in given["param_groups"]]
            if is_local:
                self._local.load(where, lambda: rank_local.state_of(given))
            else:
                self._local.load(where, lambda: state_dicts.shard_of(given, shards))
            for post_hook in self._optimizer_load_state_dict_post_hooks.values():
                post_hook(self)

    def load_sharded_state_dict(self, state_dict: StateDict) -> None:
        """Load a ``sharded_state_dict`` after ``torch.distributed.checkpoint.load`` has filled it.

        Collective: over the group.

        Raises:
            ValueError: The state is of another model or class of optimizers; nothing has been
                loaded (all ranks).
            DisagreementError: Another rank refused, or ranks have different settings.
        """
        from mpidist.zero.state import checkpoint  # late: imports torch.distributed.checkpoint

        where = "OSS.load_sharded_state_dict"
        with comparing(self.group, where) as rows:
            plain = checkpoint.as_torch(state_dict, self.param_groups)
            state_dicts.require_fits(plain, self.param_groups, self.optim)
            rows += [("group", groups.text(group)) for group in plain["param_groups"]]
        with autograd_mode.allocating(), torch.no_grad():
            self._local.load(
                where,
                lambda: checkpoint.shard_of(
                    state_dict, self.param_groups, self._shards, self._local.state()
                ),
            )

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise TypeError(
            "OSS holds memory and a group that all ranks share, and cannot be copied: build "
            "another one on all ranks"
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "OSS cannot be pickled: save consolidate_state_dict() and state_dict(), load with "
            "load_state_dict()"
        )


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
