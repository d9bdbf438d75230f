"""Changes of a sharded optimizer's parameters: new groups, freezing, other devices or dtypes."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.profiler import record_function

from mpidist.comm.consistency import comparing, maximum, require_same
from mpidist.zero.shards import groups
from mpidist.zero.shards.groups import ParamGroup
from mpidist.zero.shards.pieces import unchanged
from mpidist.zero.shards.shards import Shards
from mpidist.zero.state.local_optimizer import LocalOptimizer

_NEW, _MOVED, _REFUSED = 1, 2, 3


class ParameterChanges:
    """Follower of parameter changes, which each step detects and some calls make.

    Args:
        parameter_groups: Of all parameters; the sharded optimizer's own list.
        shards: The sharded optimizer's.
        local: Its base optimizer.
        one_copy: Parameters must be in host memory.
        code: Memory of ``maximum``.
    """

    def __init__(
        self,
        parameter_groups: list[ParamGroup],
        shards: Shards,
        local: LocalOptimizer,
        one_copy: bool,
        code: Tensor,
    ) -> None:
        self._group = shards.group
        self._groups = parameter_groups
        self._shards = shards
        self._local = local
        self._one_copy = one_copy
        self._code = code

    def follow(self, refusal: Exception | None = None) -> None:
        """Follow changes of the parameters' memory and the groups' settings since the last step.

        Collective: over the group.

        Args:
            refusal: This rank's reason to take no step; all ranks then raise.
        """
        shards = self._shards
        # Also a barrier: no rank still reads the one copy when the first rank writes.
        own = _MOVED if shards.has_moved() else _NEW if shards.has_new() else 0
        changed = maximum(self._group, own if refusal is None else _REFUSED, self._code)
        if changed == _REFUSED:
            require_same(self._group, "OSS.step", (), refusal)
        if changed == _MOVED:
            with record_function("mpidist::oss::follow"):
                self._move()
        if changed:
            self.refresh("OSS.step")
        if shards.wire is not None:
            shards.masters.renew(shards.pieces)
        groups.sync(self._groups, self._local.optim.param_groups)

    def refresh(self, where: str) -> None:
        """Follow changes of ``requires_grad``. Collective: over the group.

        Args:
            where: The method, for messages.
        """
        with comparing(self._group, where) as rows:
            groups.require_carried(self._groups, self._shards.wire)
            rows += groups.rows(self._groups)
        shards = self._shards
        shards.refresh()
        self._local.extend(shards.make())
        shards.place_parameters()
        self._local.flatten()
        self._local.restore_deferred()

    def add(self, append: Callable[[], None]) -> None:
        """Follow the addition of a group. Collective: over the group.

        Args:
            append: Append a group to the groups of all parameters.
        """
        count = len(self._groups)
        try:
            with comparing(self._group, "OSS.add_param_group") as rows:
                append()
                groups.require_host_memory(self._groups[-1:] if self._one_copy else [])
                groups.require_whole(self._groups[-1:])
                groups.require_distinct(self._groups)
                # All groups: other parameters may train again since the last step.
                groups.require_carried(self._groups, self._shards.wire)
                rows += groups.rows(self._groups)
                owners, _ = self._shards.owners.choose(self._groups[-1]["params"])
                rows.append(("owners", owners))
        except Exception:
            del self._groups[count:]
            raise
        local, shards = self._local, self._shards
        # A scheduler may have changed settings since the last step.
        groups.sync(self._groups[:-1], local.optim.param_groups)
        local.extend(shards.add(self._groups[-1]["params"]) + shards.make())
        shards.place_parameters()
        groups.sync(local.optim.param_groups, self._groups)
        local.flatten()
        local.restore_deferred()

    def _move(self) -> None:
        """Move the buffers and the state to the parameters' new device or dtype.

        Collective: over the group.
        """
        shards = self._shards
        with comparing(self._group, "OSS.step") as rows:
            groups.require_host_memory(self._groups if self._one_copy else [])
            shards.require_shapes()
            rows += groups.rows(self._groups)
        same = unchanged(shards.pieces, shards.plans)
        shards.follow()
        # load_state_dict converts state by torch's rules; unchanged pieces keep their own.
        self._local.convert(same)
