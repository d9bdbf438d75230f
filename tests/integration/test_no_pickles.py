"""Absence of pickles: none before a user's object is sent, none at all with MPIDIST_TRUST=data."""

from __future__ import annotations

import pytest

from tests.tools.support import job, printed

pytestmark = pytest.mark.slow

_EVERYTHING = """
import json, os, pickle
from mpi4py import MPI

def refuse(*args, **kwargs):
    raise AssertionError("mpi4py was asked to {}")

MPI.pickle.__init__(refuse, refuse)
{own}
import torch, torch.distributed as dist
import mpidist.comm
from mpidist import rpc
from mpidist.cli import doctor, facts, questions
from mpidist.comm.discovery import installed
from mpidist.ddp import DistributedDataParallel
from mpidist.optim import OSS

dist.init_process_group("mpidist", init_method="mpi://")
group = mpidist.comm.init()
half = group.split(group.rank % 2)
pair = group.new_group([0, 1])
for made in (group, half, pair):
    made.all_reduce(torch.ones(3))
    made.broadcast(torch.ones(3), 0)
    made.barrier()
dist.all_reduce(torch.ones(3))
gathered = group.all_gather_object((group.rank, {{"t": torch.ones(2)}}), data_only={data_only})
assert [rank for rank, _ in gathered] == list(range(group.size))
model = DistributedDataParallel(torch.nn.Linear(3, 2), process_group=group)
optimizer = OSS(model.parameters(), torch.optim.Adam, group)
model(torch.ones(4, 3)).sum().backward()
optimizer.step()
optimizer.consolidate_state_dict(0)
own = questions.ask(facts.collect(os.environ), installed.installed())
assert len(questions.gather(own)) == group.size
if {rpc}:
    rpc.init_rpc(f"worker{{group.rank}}")
    result = rpc.rpc_sync(f"worker{{1 - group.rank}}", torch.add, (torch.ones(2), 1))
    assert torch.equal(result, torch.full((2,), 2.0))
    rpc.shutdown()
print(json.dumps({{"rank": group.rank, "size": group.size}}), flush=True)
dist.destroy_process_group()
"""


def test_nothing_is_unpickled_by_mpi4py_in_any_step_of_a_job():
    script = _EVERYTHING.format("pickle", own="", data_only=None, rpc=True)
    assert printed(job(2, script, timeout_s=90)).keys() == {0, 1}


def test_with_data_alone_no_message_is_a_pickle():
    own = (
        "from mpidist.comm.serialization import tensor_pickle\n"
        "tensor_pickle.loads = tensor_pickle.dumps = refuse"
    )
    script = _EVERYTHING.format("pickle", own=own, data_only=None, rpc=False)
    assert printed(job(2, script, env={"MPIDIST_TRUST": "data"}, timeout_s=90)).keys() == {0, 1}


def test_ranks_with_different_settings_fail_at_the_start():
    script = """
    import os
    os.environ["MPIDIST_TRUST"] = "data" if os.environ["OMPI_COMM_WORLD_RANK"] == "1" else "pickle"
    import mpidist.comm
    from mpidist.errors import LaunchError
    try:
        mpidist.comm.init()
    except LaunchError as error:
        rank, is_named = os.environ["OMPI_COMM_WORLD_RANK"], "'data' on rank 1" in str(error)
        print('{"rank": %s, "named": %d}' % (rank, is_named), flush=True)
    """
    assert {
        rank: line["named"] for rank, line in printed(job(2, script, timeout_s=60)).items()
    } == {
        0: 1,
        1: 1,
    }
