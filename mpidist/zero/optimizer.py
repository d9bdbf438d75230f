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
from mpidist.zero import clipping, state_dict
from mpidist.zero import partition as partitions
from mpidist.zero.consolidation import CHUNK_BYTES, Consolidation
from mpidist.zero.flat_state import FlatState
from mpidist.zero.partition import GREEDY, Cost
from mpidist.zero.pieces import Piece, attach_gradients, detach_gradients
from mpidist.zero.shards import Bounds, Shards
from mpidist.zero.verdict import highest, raise_together, require_alike
from mpidist.zero.wire import wire_of

Tensor = torch.Tensor
_OF_RANKS = ("params", "param_names")  # what the groups of this optimizer and of the base optimizer do not share
_MOVED = 1


class OSS(torch.optim.Optimizer):
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
        **defaults: Any,
    ) -> None:
        if broadcast_buffer_size != -1 or force_broadcast_object:
            warnings.warn(
                "broadcast_buffer_size and force_broadcast_object have no effect in mpidist: shards are brought as they lie",
                stacklevel=2,
            )
        self._is_constructed = False
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
            self._require_host_memory(one_copy, self.param_groups)
            rows = [("arguments", (optim.__name__, partition, str(cost) if isinstance(cost, str) else None, one_copy, str(wire)))]
            rows += self._rows(self.param_groups)
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
            by_group = self._by_group(shards.pieces)
            groups = [{**_shared(group), "params": by_group[place]} for place, group in enumerate(self.param_groups)]
            self.optim = optim(groups, **defaults)
        except Exception as raised:
            error = raised
        raise_together(self.group, f"OSS({optim.__name__})", error)
        shards.adopt()
        self._sync(self.optim.param_groups, self.param_groups)
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
        self._prepare()
        own = self._attached()
        result, error = None, None
        with record_function("mpidist::oss::optim_step"):
            try:
                attach_gradients(own)
                if closure is not None:
                    kwargs["closure"] = self._attaching(closure, own)
                result = self.optim.step(**kwargs)
            except Exception as raised:
                error = raised
            finally:
                detach_gradients(own)
        failed = highest(self.group, int(error is not None))  # all have stepped; one copy is complete
        if not self._state.is_settled(self.optim.state):
            self._settle()
        with record_function("mpidist::oss::gather"):
            self._share()
        self._sync(self.optim.param_groups, self.param_groups)
        if failed:
            require_alike(self.group, "OSS.step", (), error)
        return result

    def _prepare(self) -> None:
        """Bring in what has changed since the last step: where parameters lie, and the groups' settings."""
        shards = self._shards
        # On all ranks before any of them writes; so it also says that nobody reads the one copy any more.
        if highest(self.group, _MOVED if shards.has_moved() else 0):
            with record_function("mpidist::oss::follow"):
                self._follow()
        shards.renew_masters()
        self._sync(self.param_groups, self.optim.param_groups)

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
        if self._wire is not None:
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
            self._require_host_memory(self._one_copy, self.param_groups)
        except ValueError as raised:
            error = raised
        require_alike(self.group, "OSS.step", self._rows(self.param_groups), error)
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
            self._require_host_memory(self._one_copy, self.param_groups[-1:])
        except Exception as raised:
            error = raised
        new = [] if error is not None else self.param_groups[-1:]
        require_alike(self.group, "OSS.add_param_group", self._rows(new), error)
        own = self._shards.add(new[0]["params"])
        self._shards.make()
        if not self._shards.steps_parameters:
            own = [piece for piece in self._shards.pieces if piece.number >= len(self._shards.parameters) - len(new[0]["params"])]
        self.optim.add_param_group({**_shared(new[0]), "params": [piece.tensor for piece in own]})
        self._shards.adopt()
        self._sync(self.optim.param_groups, self.param_groups)
        self._settle()

    def refresh_trainable(self) -> None:
        """Take note of parameters that were frozen or that train again (``requires_grad``). Collective: over the group."""
        self._prepare()
        require_alike(self.group, "OSS.refresh_trainable", self._rows(self.param_groups))
        shards = self._shards
        shards.refresh()
        made = shards.make()
        for place, tensors in self._by_group(made).items():
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
                found[rank].append({**_shared(group), "params": params})
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

    def consolidate_state_dict(self, recipient_rank: int = 0, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        """Bring all ranks' state to one, for its ``state_dict``. Other ranks allocate at most one chunk.

        Collective: over the group.

        Blocks: until the state has left this rank, and on the recipient until it is there.

        Args:
            recipient_rank: Rank in the group; -1 for all.
            chunk_bytes: Longest message.

        Raises:
            ValueError: ``recipient_rank`` is out of range, or ``chunk_bytes`` not positive.
        """
        if isinstance(recipient_rank, bool) or not isinstance(recipient_rank, int) or not -1 <= recipient_rank < self.world_size:
            raise ValueError(f"recipient_rank is a rank from 0 to {self.world_size - 1}, or -1 for all; got {recipient_rank!r}")
        if chunk_bytes < 1:
            raise ValueError(f"chunk_bytes must be positive; got {chunk_bytes}")
        self._sync(self.param_groups, self.optim.param_groups)
        self._settle()
        with record_function("mpidist::oss::consolidate"):
            self._consolidation.run(self._shards, self._state, self.optim.state, recipient_rank, chunk_bytes)

    def state_dict(self, all_ranks: bool = False) -> dict[str, Any]:
        """Return the state as ``optim`` over all parameters on one rank would.

        Args:
            all_ranks: First consolidate on all ranks; collective over the group. Otherwise it is the state of the last
                ``consolidate_state_dict``, on its recipient.

        Raises:
            RuntimeError: The state was not consolidated on this rank.
        """
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        if all_ranks:
            self.consolidate_state_dict(-1)
        result = state_dict.packed(self.param_groups, self._consolidation.result(self.rank))
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            changed = post_hook(self, result)
            if changed is not None:
                result = changed
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of any world size: of this class, of FairScale's, or of ``optim`` over all parameters.

        The argument stays as it is. All ranks give the same.

        Collective: over the group.

        Raises:
            ValueError: It is of another model or of another class of optimizers; nothing has been loaded (all ranks).
            DisagreementError: Another rank refused, or ranks give different settings.
        """
        self._load(state_dict)

    def _load(self, given: dict[str, Any]) -> None:
        error: Exception | None = None
        rows: list[tuple[str, Any]] = []
        before = (self.optim.state, self.optim.param_groups)
        try:
            given = dict(given)
            for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
                changed = pre_hook(self, given)
                given = given if changed is None else changed
            state_dict.require_fits(given, self.param_groups, self.optim)
            rows = [("group", _text(group)) for group in given["param_groups"]]
        except Exception as raised:
            error = raised
        require_alike(self.group, "OSS.load_state_dict", rows, error)
        try:
            local = state_dict.local(given, self.param_groups, self.optim.param_groups, self._shards.pieces)
            self.optim.load_state_dict(local)
        except Exception as raised:
            error = raised
            self.optim.__setstate__({"state": before[0], "param_groups": before[1]})
        raise_together(self.group, "OSS.load_state_dict", error)
        self.state = self.optim.state
        self._settle()
        state_dict.take_settings(self.optim.param_groups, given["param_groups"], self.param_groups)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def local_state_bytes(self) -> int:
        """Return the bytes of the state that this rank holds."""
        return sum(
            value.nbytes for held in self.optim.state.values() for value in held.values() if isinstance(value, torch.Tensor)
        )

    def _settle(self) -> None:
        self._state.settle(self._shards.pieces, self.optim.state, self._shards.shard_sizes())

    # --- groups ---

    def _by_group(self, pieces: list[Piece]) -> dict[int, list[Tensor]]:
        """Return the pieces' tensors by the group of their parameter; a list for every group."""
        ends, end = [], 0
        for group in self.param_groups:
            end += len(group["params"])
            ends.append(end)
        found: dict[int, list[Tensor]] = {place: [] for place in range(len(ends))}
        for piece in sorted(pieces, key=lambda piece: piece.number):
            found[next(place for place, end in enumerate(ends) if piece.number < end)].append(piece.tensor)
        return found

    @staticmethod
    def _sync(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
        for one, other in zip(source, target, strict=True):
            other.update(_shared(one))

    @staticmethod
    def _rows(groups: list[dict[str, Any]]) -> list[tuple[str, Any]]:
        rows: list[tuple[str, Any]] = []
        for place, group in enumerate(groups):
            rows.append((f"group {place}", _text(group)))
            for number, p in enumerate(group["params"]):
                held = (tuple(p.shape), str(p.dtype), p.device.type, p.requires_grad, p.stride())
                rows.append((f"group {place} parameter {number}", held))
        return rows

    @staticmethod
    def _require_host_memory(one_copy: bool, groups: list[dict[str, Any]]) -> None:
        devices = {p.device.type for group in groups for p in group["params"]} - {"cpu"}
        if one_copy and devices:
            raise ValueError(f"one_copy=True is for parameters in host memory; got some on {', '.join(sorted(devices))}")

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("OSS holds memory and a group that all ranks share, and cannot be copied: build another one on all ranks")

    def __reduce__(self) -> Any:
        raise TypeError("OSS cannot be pickled: save consolidate_state_dict() and state_dict(), load with load_state_dict()")


def _shared(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _OF_RANKS}


def _text(group: dict[str, Any]) -> str:
    """Write a group's settings such that equal ones have equal texts on all ranks."""
    plain = {
        key: value.tolist() if isinstance(value, Tensor) else f"{value:.17g}" if isinstance(value, float) else value
        for key, value in _shared(group).items()
    }
    return str(sorted(plain.items(), key=str))
