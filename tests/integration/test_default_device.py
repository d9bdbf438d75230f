"""Scripts with a default device set: the library's internal tensors stay on the CPU."""

import pytest
import torch

from mpidist import ddp as mddp
from mpidist.comm import AVG, MAX
from tests.tools.support import agree

pytestmark = pytest.mark.mpi


def test_collectives_and_training_with_another_default_device(group):
    tensors = [
        torch.full((n,), group.rank + 1.0, dtype=d)
        for n in (5, 70_000)
        for d in (torch.float32, torch.bfloat16)
    ]
    net = torch.nn.Linear(30, 40)
    x = torch.randn(7, 30)
    with torch.device("meta"):
        for tensor in tensors:
            group.all_reduce(tensor, AVG)
            group.all_reduce(tensor, MAX, async_op=True).wait()
        group.all_reduce_coalesced(tensors[::2])
        gathered = group.all_gather_object({"rank": group.rank, "tensor": tensors[0]})
        group.broadcast(tensors[1].view(5, 1).expand(5, 3).contiguous().t(), 0)
        ddp = mddp.DistributedDataParallel(net, process_group=group)
        ddp.register_comm_hook(mddp.PowerSGDState(group, 2, 0), mddp.powerSGD_hook)
        with ddp.join():
            for _ in range(2):
                ddp(x).square().sum().backward()
    agree(
        group,
        [one["rank"] for one in gathered] == list(range(group.size))
        and not gathered[0]["tensor"].is_meta,
    )
    agree(group, not any(t.is_meta for t in tensors) and bool(net.weight.grad.isfinite().all()))
    agree(group, float(tensors[0][0]) == pytest.approx((group.size + 1) / 2 * group.size))
