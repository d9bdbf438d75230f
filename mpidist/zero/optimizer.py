"""OSS, the optimizer whose state is sharded: each rank steps its shard, then all ranks get all parameters.

Source: FairScale's ``OSS`` and torch's ``ZeroRedundancyOptimizer``, whose names and meanings these are.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.profiler import record_function

from mpidist.comm.native_group import native_group
from mpidist.zero import clipping, groups
from mpidist.zero import partition as partitions
from mpidist.zero.consolidation import Consolidation
from mpidist.zero.flat_state import FlatState
from mpidist.zero.modes import Modes
from mpidist.zero.partition import GREEDY, Cost
from mpidist.zero.pieces import Piece, attach_gradients, detach_gradients
from mpidist.zero.shards import Bounds, Shards
from mpidist.zero.verdict import highest, raise_together, require_alike
from mpidist.zero.wire import wire_of

Tensor = torch.Tensor
_MOVED, _REFUSED = 1, 2


class OSS(Modes):
    """Optimizer whose state is divided among the ranks of a group.

    Parameters that require gradients become views of flat buffers. Each rank builds ``optim`` over its shard of them; ``step``
    has every rank step its shard and then brings all shards to all ranks: the same bits as ``optim`` over all parameters. Ranks
    must hold equal parameters, and equal gradients of what they own: DistributedDataParallel sees to both.

    Collective: over the group, like ``step``, ``clip_grad_norm``, ``consolidate_state_dict``, ``load_state_dict``,
    ``add_param_group`` and ``refresh_trainable``.

    Args:
        params: Parameters, named parameters or groups, as for any optimizer; the same on all ranks.
        optim: Class of the base optimizer.
        group: Group of mpidist or torch group on its backend; torch's default group if that is ours, else all ranks, if None.
        broadcast_buffer_size: Has no effect: shards are brought as they lie.
        broadcast_fp16: The wire is fp16, as with ``wire="fp16"``.
        force_broadcast_object: Has no effect.
        partition: ``"greedy"``: whole parameters, in their order, to the rank with the fewest elements (FairScale's rule);
            ``"balanced"``: whole parameters by ``cost``, the dearest first; ``"flat"``: equal shards cut through parameters, for
            element-wise optimizers alone.
        cost: For ``"balanced"``: ``"bytes"``, ``"matrix"`` or a function of a parameter; by the class of ``optim`` if None.
        one_copy: The ranks of a node hold ONE copy of the parameters, in shared memory: nothing is copied after a step. What
            one rank writes all of the node read, so only the optimizer may write them (else each rank's update is applied).
            Host memory only.
        wire: ``"bf16"``, ``"fp16"`` or ``"int8"``: what crosses the network. The owner keeps and steps its shard in the
            parameters' dtype; what all ranks see, the owner too, are the rounded values.
        overlap: Shards are on their way when ``step`` returns, in buckets; what reads a parameter in the thread of ``step``,
            through torch, waits for its bucket. Before other readers (code on addresses, other threads without module calls):
            ``wait()``. It gains between nodes and on devices; within a node's host memory bringing is processor time. Any
            synchronous collective of the group waits for all of it first: a broadcast of buffers before the forward pass, too.
        bucket_cap_mb: MiB in one such bucket, which holds a slice of each rank's shard.
        **defaults: Further arguments of ``optim``.

    Attributes:
        optim: The base optimizer of this rank.
        rank: Of this process in the group.
        world_size: W, ranks of the group.

    Raises:
        ValueError: An unknown or impossible choice.
        TypeError: ``optim`` is no optimizer, or the group is another library's.
        DisagreementError: Ranks have different parameters or arguments, or one of them refused (all ranks).

    Source: arXiv:1910.02054 §5.1; FairScale 0.4.13, ``fairscale.optim.OSS``.
    """

    def __init__(
        self,
        params: Any,
        optim: type[torch.optim.Optimizer] = torch.optim.SGD,
        group: Any = None,
        broadcast_buffer_size: int = -1,
        broadcast_fp16: bool = False,
        force_broadcast_object: bool = False,
        *,
        partition: str = GREEDY,
        cost: str | Cost | None = None,
        one_copy: bool = False,
        wire: str | torch.dtype | None = None,
        overlap: bool = False,
        bucket_cap_mb: float = 16.0,
        **defaults: Any,
    ) -> None:
        if broadcast_buffer_size != -1 or force_broadcast_object:
            warnings.warn(
                "broadcast_buffer_size and force_broadcast_object have no effect in mpidist: shards are brought as they lie",
                stacklevel=2,
            )
        self._is_constructed = False
        self._init_modes(group, overlap, bucket_cap_mb)
        self.group = native_group(group)
        self.rank: int = self.group.rank
        self.world_size: int = self.group.size
        error: Exception | None = None
        rows: list[tuple[str, Any]] = []
        try:
            partitions.require(partition, optim)
            super().__init__(params, dict(defaults))
            self._wire = wire_of("fp16" if broadcast_fp16 and wire is None else wire) if self.world_size > 1 else None
            self._shards = Shards(
                self.group, partition, partitions.cost_of(cost, optim), one_copy and self.world_size > 1, self._wire is not None
            )
            if one_copy and self._wire is not None:
                raise ValueError("one_copy=True moves nothing, so there is no wire to choose")
            groups.require_host_memory(self.param_groups if one_copy else [])
            if not bucket_cap_mb > 0:
                raise ValueError(f"bucket_cap_mb must be positive; got {bucket_cap_mb}")
            rows = [
                ("arguments", (optim.__name__, partition, str(cost) if isinstance(cost, str) else None, one_copy, str(wire))),
                ("overlap", (bool(overlap), bucket_cap_mb)),
            ]
            rows += groups.rows(self.param_groups)
        except Exception as raised:
            error = raised
        require_alike(self.group, "OSS", rows, error)
        self._state = FlatState()
        self._consolidation = Consolidation(self.group)
        self._one_copy = one_copy
        self.optim: torch.optim.Optimizer
        self._build(optim, defaults)
        self._is_constructed = True

    def _build(self, optim: type[torch.optim.Optimizer], defaults: dict[str, Any]) -> None:
        shards = self._shards
        for group in self.param_groups:
            shards.add(group["params"])
        shards.make()
        error: Exception | None = None
        try:
            own = groups.by_group(self.param_groups, shards.pieces)
            made = [{**groups.settings(group), "params": own[place]} for place, group in enumerate(self.param_groups)]
            self.optim = optim(made, **defaults)
        except Exception as raised:
            error = raised
        raise_together(self.group, f"OSS({optim.__name__})", error)
        shards.adopt()
        groups.sync(self.optim.param_groups, self.param_groups)
        self.state = self.optim.state
        self._settle()

    # --- the step ---

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Step this rank's shard, then bring all shards to all ranks.

        Collective: over the group.

        Blocks: until this rank's parameters are complete.

        Args:
            closure: Evaluates the model and returns the loss; called by the base optimizer, with gradients enabled there.
            **kwargs: For the base optimizer.

        Returns:
            What the base optimizer returns.

        Raises:
            DisagreementError: The base optimizer of another rank raised (this rank's raises what it raised). The step has then
                been taken in part, and is alike on all ranks.
        """
        if not self._enters_step():
            return None
        self._prepare(self._refusal(closure))
        own = self._attached()
        result, error = None, None
        with record_function("mpidist::oss::optim_step"):
            try:
                attach_gradients(own)
                if closure is not None:
                    kwargs["closure"] = self._attaching(closure, own)
                result = self._step_base(**kwargs)
            except Exception as raised:
                error = raised
            finally:
                detach_gradients(own)
        failed = highest(self.group, int(error is not None))  # all have stepped; one copy is complete
        if not self._state.is_settled(self.optim.state):
            self._settle()
        with record_function("mpidist::oss::gather"):
            self._share()
        groups.sync(self.optim.param_groups, self.param_groups)
        if failed:
            require_alike(self.group, "OSS.step", (), error)
        return result

    def _prepare(self, refusal: Exception | None = None) -> None:
        """Bring in what has changed since the last step: where parameters lie, and the groups' settings."""
        shards = self._shards
        # On all ranks before any of them writes; so it also says that nobody reads the one copy any more.
        code = highest(self.group, _REFUSED if refusal is not None else _MOVED if shards.has_moved() else 0)
        if code == _REFUSED:
            require_alike(self.group, "OSS.step", (), refusal)
        if code:
            with record_function("mpidist::oss::follow"):
                self._follow()
        shards.renew_masters()
        groups.sync(self.param_groups, self.optim.param_groups)

    def _attached(self) -> list[Piece]:
        """Return the pieces that borrow their gradients from parameters."""
        return [] if self._shards.steps_parameters else self._shards.pieces

    def _attaching(self, closure: Callable[[], Any], own: list[Piece]) -> Callable[[], Any]:
        def evaluate() -> Any:
            with torch.enable_grad():
                result = closure()
            attach_gradients(own)
            return result

        return evaluate

    def _share(self) -> None:
        shards = self._shards
        if self.world_size == 1:
            return
        if self._brings_later:
            self._begin_gathers()
        elif self._wire is not None:
            for plan, flat, master in zip(shards.plans, shards.flats, shards.masters, strict=True):
                self._wire.share(self.group, master, flat, plan.bounds)
            shards.note_masters()
        elif shards.is_one_copy and self.group.is_single_node:
            return  # the step's last agreement came behind every rank's writes
        else:
            shards.gather()

    def _follow(self) -> None:
        """Have the buffers and the state follow the parameters to another device or dtype."""
        error: Exception | None = None
        try:
            groups.require_host_memory(self.param_groups if self._one_copy else [])
        except ValueError as raised:
            error = raised
        require_alike(self.group, "OSS.step", groups.rows(self.param_groups), error)
        self._shards.follow()
        self._state = FlatState()
        self.optim.load_state_dict(self.optim.state_dict())  # torch's rules for what takes the parameter's dtype and device
        self.state = self.optim.state
        self._settle()

    # --- parameters ---

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, which is divided among the ranks by itself. Collective: over the group."""
        if not self._is_constructed:
            super().add_param_group(param_group)
            return
        error: Exception | None = None
        try:
            super().add_param_group(param_group)
            groups.require_host_memory(self.param_groups[-1:] if self._one_copy else [])
        except Exception as raised:
            error = raised
        new = [] if error is not None else self.param_groups[-1:]
        require_alike(self.group, "OSS.add_param_group", groups.rows(new), error)
        own = self._shards.add(new[0]["params"])
        self._shards.make()
        if not self._shards.steps_parameters:
            own = [piece for piece in self._shards.pieces if piece.number >= len(self._shards.parameters) - len(new[0]["params"])]
        self.optim.add_param_group({**groups.settings(new[0]), "params": [piece.tensor for piece in own]})
        self._shards.adopt()
        groups.sync(self.optim.param_groups, self.param_groups)
        self._settle()

    def refresh_trainable(self) -> None:
        """Take note of parameters that were frozen or that train again (``requires_grad``). Collective: over the group."""
        self._prepare()
        require_alike(self.group, "OSS.refresh_trainable", groups.rows(self.param_groups))
        shards = self._shards
        shards.refresh()
        made = shards.make()
        for place, tensors in enumerate(groups.by_group(self.param_groups, made)):
            self.optim.param_groups[place]["params"] += tensors
        shards.adopt()
        self._settle()

    def partition_parameters(self) -> list[list[dict[str, Any]]]:
        """Return for each rank its groups: settings, and in ``params`` the parameters that it owns.

        Of a parameter that is cut, ``params`` holds vectors of the elements.
        """
        spans = self.bounds() if self._shards.steps_parameters is False else {}
        number = 0
        found: list[list[dict[str, Any]]] = [[] for _ in range(self.world_size)]
        for group in self.param_groups:
            held: list[list[Tensor]] = [[] for _ in range(self.world_size)]
            for parameter in group["params"]:
                if parameter in spans and len(spans[parameter]) > 1:
                    flat = parameter.detach().as_strided((parameter.numel(),), (1,), parameter.storage_offset())
                    for rank, start, stop in spans[parameter]:
                        held[rank].append(flat[start:stop])
                else:
                    owner = spans[parameter][0][0] if parameter in spans else self._shards.owners[number]
                    held[owner].append(parameter)
                number += 1
            for rank, params in enumerate(held):
                found[rank].append({**groups.settings(group), "params": params})
        return found

    def bounds(self) -> Bounds:
        """Return for each trainable parameter its owners: (rank, start, stop) in elements, in the order in which they lie."""
        return self._shards.bounds()

    # --- gradients ---

    def clip_grad_norm(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        filter_params_fn: Callable[[list[Tensor]], Iterable[Tensor]] | None = None,
    ) -> Tensor:
        """Scale gradients in place such that their norm over all parameters is at most ``max_norm``.

        Each rank adds up and scales the gradients of what it owns; those of other ranks' shards stay as they are.

        Collective: over the group.

        Args:
            norm_type: p > 0 of the p-norm; infinity too.
            filter_params_fn: Gets the parameters of which this rank owns anything and that have a gradient, returns those that
                count.

        Returns:
            The norm before, a 0-dim tensor.

        Raises:
            ValueError: ``norm_type`` is not positive.
        """
        self._require_unstepped("clip_grad_norm")
        if not float(norm_type) > 0 or math.isnan(max_norm):
            raise ValueError(f"clip_grad_norm needs norm_type > 0 and a number for max_norm; got {norm_type} and {max_norm}")
        with record_function("mpidist::oss::clip_grad_norm"), torch.no_grad():
            own = [piece for piece in self._shards.pieces if piece.parameter.grad is not None]
            if filter_params_fn is not None:
                kept = {id(parameter) for parameter in filter_params_fn([piece.parameter for piece in own])}
                own = [piece for piece in own if id(piece.parameter) in kept]
            gradients = [gradient for piece in own if (gradient := piece.gradient()) is not None]
            device = self.param_groups[0]["params"][0].device
            return clipping.clip(self.group, gradients, float(max_norm), float(norm_type), device)

    # --- state ---

    def local_state_bytes(self) -> int:
        """Return the bytes of the state that this rank holds."""
        return sum(
            value.nbytes for held in self.optim.state.values() for value in held.values() if isinstance(value, torch.Tensor)
        )

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("OSS holds memory and a group that all ranks share, and cannot be copied: build another one on all ranks")

    def __reduce__(self) -> Any:
        raise TypeError("OSS cannot be pickled: save consolidate_state_dict() and state_dict(), load with load_state_dict()")
