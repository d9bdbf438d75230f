"""Override of ``torch.distributed.batch_isend_irecv`` for mixed groups.

NCCL messages between two ranks run one after the other on one stream, so the messages of a batch
must be launched together. torch coalesces them only for groups of its own class;
``batch_isend_irecv`` with a mixed group would never return.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from mpidist.c10d.native import native_of
from mpidist.c10d.up_to_213.overrides import Function, override


def install() -> None:
    """Let ``batch_isend_irecv`` launch the batches of mixed groups together."""
    override("batch_isend_irecv", _batching)


def _batching(original: Function) -> Function:
    def batch_isend_irecv(p2p_op_list: Sequence[dist.P2POp]) -> list[dist.Work]:
        """See torch.distributed.batch_isend_irecv."""
        first = p2p_op_list[0] if p2p_op_list else None
        group: Any = getattr(first, "group", None) or dist.group.WORLD
        if first is None or native_of(group) is None or not group.coalesces(first.tensor.device):
            return original(p2p_op_list)
        distributed_c10d._check_p2p_op_list(p2p_op_list)
        with distributed_c10d._coalescing_manager(
            group, first.tensor.device, async_ops=True
        ) as manager:
            for one in p2p_op_list:
                peer = {"group_dst" if one.op is dist.isend else "group_src": one.group_peer}
                one.op(one.tensor, group=one.group, tag=one.tag, **peer)
        return list(manager.works)

    return batch_isend_irecv
