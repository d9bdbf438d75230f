"""Hierarchical averages of parameters: each level is a group size with its own period.

Source: ``torch.distributed.algorithms.model_averaging.hierarchical_model_averager``, for names and
meanings; Castiglia, Das, Patterson, "Multi-Level Local SGD" (arXiv 2007.13819). torch's groups are
always consecutive ranks. Here they are ranks of a node, or of whole nodes, where the sizes allow
it, for any placement of the ranks.
"""

from __future__ import annotations

import itertools
import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from mpidist.comm.consistency import comparing
from mpidist.comm.group import ProcessGroup
from mpidist.comm.group_types import AnyGroup
from mpidist.comm.mpi.runtime import world
from mpidist.comm.resolve_group import native_group
from mpidist.ddp.model_averaging.averagers import ModelAverager, warn_of_period_1
from mpidist.ddp.model_averaging.parameters import (
    Averaged,
    average_parameters_or_parameter_groups,
)
from mpidist.ddp.settings_checks import require_int

_log = logging.getLogger(__name__)


class HierarchicalModelAverager(ModelAverager):
    """Average parameters among groups of several sizes, each with its own period.

    At a step that several periods divide, the ranks average in the groups of the largest period,
    which contain the smaller groups.

    Collective: constructed by all ranks of ``process_group`` with the same arguments.

    Args:
        period_group_size_dict: Periods in steps → sizes of the groups, both increasing; the last
            size is that of ``process_group``.
        warmup_steps: Steps before the first average.
        process_group: A group of mpidist; None for the default.

    Attributes:
        period_process_group_dict: For each period the group in which this rank averages.

    Raises:
        TypeError: A number is no int, ``period_group_size_dict`` no mapping, or the group is of
            another backend.
        ValueError: There is no period, a period is below 1, periods do not increase, a size does
            not divide the next, or the last is not the group's.
        DisagreementError: Another rank has other arguments, or raised one of the above.
    """

    def __init__(
        self,
        period_group_size_dict: Mapping[int, int] | None = None,
        warmup_steps: int = 0,
        process_group: AnyGroup = None,
    ) -> None:
        super().__init__(process_group)
        group = native_group(self.process_group)
        levels = (
            list(period_group_size_dict.items())
            if isinstance(period_group_size_dict, Mapping)
            else []
        )
        with comparing(group, "HierarchicalModelAverager") as rows:
            require_int("warmup_steps", warmup_steps, least=0)
            require_levels(levels, period_group_size_dict, group.size)
            rows.append(("arguments", f"{dict(levels)}, warmup_steps={warmup_steps}"))
        if levels[-1][0] == 1:
            warn_of_period_1()
        self.warmup_steps = warmup_steps
        self.period_process_group_dict: OrderedDict[int, AnyGroup] = OrderedDict()
        nodes = world().nodes_of(group.world_ranks)
        for period, size in levels:
            _log.info(
                "groups of %d ranks average parameters every %d steps, if no larger ones do",
                size,
                period,
            )
            self.period_process_group_dict[period] = (
                self.process_group if size == group.size else _part(group, nodes, size)
            )

    def average_parameters(self, params: Averaged) -> None:
        """Count a step, and average the parameters with a gradient at the steps of a period.

        Collective: over the groups of the step, by all ranks at the same steps.

        Args:
            params: Parameters, the parameter groups of an optimizer, or an optimizer.

        Raises:
            DisagreementError: Parameters differ between ranks of a group (on all of them).
        """
        group = self._find_process_group() if self.step >= self.warmup_steps else None
        if group is not None:
            average_parameters_or_parameter_groups(params, group)
        self.step += 1

    def _find_process_group(self) -> AnyGroup:
        for period, group in reversed(self.period_process_group_dict.items()):
            if self.step % period == 0:
                return group
        return None


def require_levels(levels: Sequence[tuple[int, int]], argument: object, ranks: int) -> None:
    """Require periods and sizes that form a hierarchy over a group.

    Args:
        levels: Pairs of a period and a size.
        argument: The caller's argument, for messages.
        ranks: The group's size.

    Raises:
        TypeError, ValueError: The periods and sizes do not form one.
    """
    if not levels:
        kind = ValueError if not argument else TypeError
        raise kind(
            f"period_group_size_dict must map periods to group sizes, as in {{2: 4, 8: {ranks}}}; "
            f"got {argument!r}"
        )
    for period, size in levels:
        require_int("each period", period, least=1)
        require_int("each group size", size, least=1)
    for (period, size), (next_period, next_size) in itertools.pairwise(levels):
        if next_period <= period or next_size % size:
            raise ValueError(
                "period_group_size_dict must have growing periods, and sizes that divide the "
                f"next: groups of {size} every {period} steps stand before groups of {next_size} "
                f"every {next_period}"
            )
    if levels[-1][1] != ranks:
        raise ValueError(
            f"the last size in period_group_size_dict must be that of process_group, {ranks}; got "
            f"{levels[-1][1]}"
        )


def parts_of(nodes: Sequence[int], size: int) -> list[tuple[int, ...]]:
    """Divide ranks into parts of one size, along the nodes or consecutively.

    Along the nodes, if every part then lies within a node or consists of whole nodes.

    Args:
        nodes: For each rank the number of its node.
        size: A divisor of the number of ranks.
    """
    ranks = range(len(nodes))
    by_node = sorted(ranks, key=lambda rank: (nodes[rank], rank))
    parts = [tuple(by_node[start : start + size]) for start in range(0, len(nodes), size)]
    if all(
        len({nodes[rank] for rank in part}) == 1 or _is_of_whole_nodes(part, nodes)
        for part in parts
    ):
        return parts
    return [tuple(ranks[start : start + size]) for start in range(0, len(nodes), size)]


def _is_of_whole_nodes(part: Sequence[int], nodes: Sequence[int]) -> bool:
    own = {nodes[rank] for rank in part}
    return len(part) == sum(node in own for node in nodes)


def _part(group: ProcessGroup, nodes: Sequence[int], size: int) -> ProcessGroup | None:
    color, key = next(
        (number, part.index(group.rank))
        for number, part in enumerate(parts_of(nodes, size))
        if group.rank in part
    )
    return group.split(color, key)
