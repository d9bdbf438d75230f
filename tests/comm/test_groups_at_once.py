"""Groups that communicate at the same time, each from a thread of its own.

In jobs of their own: after about a hundred other tests in one process, with communicators on which
collectives were abandoned, such a test on 4 ranks hung in Open MPI's MPI_Allreduce (in two of six
runs; never in 100,000 rounds of a new job).
"""

import pytest

from tests.tools.support import printed, short_job

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.long), 4])
def test_two_groups_and_the_callers_thread(ranks):
    done = short_job(
        ranks,
        """
        import json
        import torch
        import torch.distributed as dist
        import mpidist.comm

        dist.init_process_group("mpidist")  # brings the store's thread
        world = mpidist.comm.init()
        flag = torch.zeros(1)
        receive = world.irecv(flag, (world.rank - 1) % world.size, tag=7)  # and that of receives
        groups = [world.clone(f"group {i}") for i in range(2)]
        part = torch.arange(70_001).to(torch.int8)
        expected = (part.long() * world.size).to(torch.int8)
        wrong = 0
        for _ in range(300):
            tensors = [part.clone() for _ in range(3)]
            pairs = zip(groups, tensors)
            works = [group.all_reduce(tensor, async_op=True) for group, tensor in pairs]
            world.all_reduce(tensors[2])
            for work in works:
                work.wait()
            wrong += sum(not torch.equal(tensor, expected) for tensor in tensors)
        send = world.isend(flag, (world.rank + 1) % world.size, tag=7)
        receive.wait()
        send.wait()
        for group in groups:
            group.close()
        dist.destroy_process_group()
        print(json.dumps({"rank": world.rank, "wrong": wrong}))
        """,
    )
    assert done.returncode == 0, done.stderr
    assert [printed(done)[rank]["wrong"] for rank in range(ranks)] == [0] * ranks
