"""``torch.distributed.batch_isend_irecv`` over a mixed group.

Messages of NCCL between two ranks run one after the other on one stream, so those of a batch have
to be started as one. torch does that for groups of its own class alone, and ``batch_isend_irecv``
with a group of ours would wait for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from mpidist.c10d.overrides import native_of, override


def install() -> None:
    """Have ``batch_isend_irecv`` start batches of mixed groups as one; every other goes to torch's own function."""
    override("batch_isend_irecv", _batching)


def _batching(original: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    def batch_isend_irecv(p2p_op_list: Sequence[Any]) -> list[Any]:
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
