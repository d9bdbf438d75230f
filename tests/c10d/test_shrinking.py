"""torch.distributed.shrink_group: sub-groups, the default group, and training after it."""

import pytest
import torch.distributed as dist

from tests.tools.support import printed, raises_on_all, short_job

SLOW = pytest.mark.slow


@pytest.mark.mpi(min_size=2)
def test_torch_refuses_wrong_ranks(world, default_group):
    group = dist.new_group(list(range(world.size)))
    other = (world.rank + 1) % world.size
    for wrong, error in (
        ([], ValueError),
        ([other, other], ValueError),
        ([world.size], ValueError),
        ([world.rank], RuntimeError),
        (list(range(world.size)), ValueError),
    ):
        raises_on_all(world, error, lambda wrong=wrong: dist.shrink_group(wrong, group))
    dist.destroy_process_group(group)


_START = """
import faulthandler, json, os, signal, sys, torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from mpidist import ddp
from mpidist.errors import RankFailureError

faulthandler.dump_traceback_later(60)  # where a job hangs
os.environ["MPIDIST_ON_TIMEOUT"] = "raise"
dist.init_process_group("mpidist")
extra = dist.new_group([0, 1])
mine = dist.get_rank()

def losses(wrap):
    torch.manual_seed(1)
    model = wrap(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    out = []
    for step in range(3):
        optimizer.zero_grad()
        x = torch.full((2, 4), float(dist.get_rank() + step))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss.detach())
        out.append(loss.item())
    return out

def facts(mine):
    x = torch.tensor([float(mine)])
    dist.all_reduce(x)
    pair = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        dist.barrier(pair)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        "rank": mine, "new": dist.get_rank(), "size": dist.get_world_size(), "sum": x.item(),
        "torch": losses(torch.nn.parallel.DistributedDataParallel),
        "ours": losses(ddp.DistributedDataParallel),
        "fsdp": losses(lambda model: fully_shard(model, mesh=mesh)),
    }
"""
_DIES = """
if mine == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    while True:
        dist.all_reduce(torch.ones(1000))
except RankFailureError:
    pass
small = dist.shrink_group([1], shrink_flags={flags})
assert small is dist.group.WORLD
print(json.dumps(facts(mine)), flush=True)
dist.barrier()
os._exit(0)
"""
_LIVES = """
import mpidist.comm
everyone = mpidist.comm.init()
whole = dist.new_group([0, 1, 2, 3])
if mine != 1:
    small = dist.shrink_group([1], whole)
    x = torch.tensor([float(mine)])
    dist.all_reduce(x, group=small)
    assert type(small) is type(dist.group.WORLD) and x.item() == 5.0
    assert dist.get_process_group_ranks(small) == [0, 2, 3] and dist.get_world_size(small) == 3
    assert dist.get_backend(small) == "mpidist"
    dist.destroy_process_group(small)
    # The group of all; torch destroys all others.
    assert dist.shrink_group([1]) is dist.group.WORLD
    print(json.dumps(facts(mine)), flush=True)
    dist.destroy_process_group()
everyone.barrier()
"""


def check(found):
    assert sorted(found) == [0, 2, 3], found
    for new, rank in enumerate((0, 2, 3)):
        facts = found[rank]
        assert (facts["new"], facts["size"], facts["sum"]) == (new, 3, 5.0), facts
        for kind in ("ours", "fsdp"):
            assert facts[kind] == pytest.approx(facts["torch"], rel=1e-5), kind


@SLOW
@pytest.mark.parametrize("flags", [0, 1], ids=["default", "abort"])
def test_training_goes_on_without_a_dead_rank(flags):
    done = short_job(4, _START + _DIES.format(flags=flags), "--with-ft", "ulfm")
    check(printed(done))


@SLOW
def test_training_goes_on_without_a_rank_that_lives():
    check(printed(short_job(4, _START + _LIVES)))
