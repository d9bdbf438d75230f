"""Messages and objects of torch.distributed on mpidist's backend."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from mpidist.errors import CommTimeout
from tests.tools.support import agree

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.usefixtures("default_group")]


def words(rank, number=0, numel=4):
    return torch.arange(float(numel)) + 10 * rank + 100 * number


def neighbours(world):
    return (world.rank + 1) % world.size, (world.rank - 1) % world.size


def test_send_and_recv_around_a_ring(world):
    right, left = neighbours(world)
    got = torch.zeros(4)
    if world.rank == 0:
        dist.send(words(0), right)
        source = dist.recv(got, left)
    else:
        source = dist.recv(got, left)
        dist.send(words(world.rank), right)
    agree(world, source == left and torch.equal(got, words(left)), f"{got} from {source}")


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.complex64, torch.bool, torch.int64], ids=str
)
def test_isend_and_irecv_of_any_type(world, dtype):
    right, left = neighbours(world)
    got = torch.zeros(4, dtype=dtype)
    works = [dist.irecv(got, left), dist.isend(words(world.rank).to(dtype), right)]
    for work in works:
        work.wait()
    agree(
        world,
        torch.equal(got, words(left).to(dtype)) and all(w.is_completed() for w in works),
        f"{got}",
    )


def test_tags_keep_messages_apart(world):
    right, left = neighbours(world)
    sends = [dist.isend(words(world.rank, tag), right, tag=tag) for tag in (3, 7)]
    got = {tag: torch.zeros(4) for tag in (7, 3)}  # the other order
    for tag, tensor in got.items():
        dist.recv(tensor, left, tag=tag)
    for work in sends:
        work.wait()
    agree(world, all(torch.equal(got[tag], words(left, tag)) for tag in got), f"{got}")


def test_recv_without_a_source_takes_any_rank(world):
    if world.rank == 0:
        received = {}
        for _ in range(1, world.size):
            tensor = torch.zeros(4)
            received[dist.recv(tensor)] = tensor
        ok = received.keys() == set(range(1, world.size)) and all(
            torch.equal(t, words(r)) for r, t in received.items()
        )
    else:
        dist.send(words(world.rank), 0)
        received, ok = None, True
    agree(world, ok, f"{received}")


def test_batches_do_not_depend_on_their_order(world):
    right, left = neighbours(world)
    numel = 1 << 20  # past any eager limit: a send that came first would wait for its receive
    got = [torch.zeros(numel), torch.zeros(numel)]
    operations = [
        dist.P2POp(dist.isend, words(world.rank, 0, numel), right),
        dist.P2POp(dist.isend, words(world.rank, 1, numel), left),
        dist.P2POp(dist.irecv, got[0], left),
        dist.P2POp(dist.irecv, got[1], right),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    wanted = [words(left, 0, numel), words(right, 1, numel)]
    agree(world, all(map(torch.equal, got, wanted)), "wrong neighbour")


def test_a_future_of_a_message(world):
    right, left = neighbours(world)
    send = dist.isend(words(world.rank), right)
    future = dist.irecv(torch.zeros(4), left).get_future().then(lambda done: done.value()[0] + 1)
    agree(world, torch.equal(future.wait(), words(left) + 1), "wrong value")
    send.wait()


def test_ranks_of_a_subgroup_are_translated(world):
    ranks = list(range(world.size))[::-1]
    group = dist.new_group(ranks)
    right, left = neighbours(world)
    got = torch.zeros(4)
    work = dist.isend(words(world.rank), right, group=group)  # global ranks
    source = dist.recv(got, left, group=group)
    work.wait()
    agree(world, source == left and torch.equal(got, words(left)), f"{got} from {source}")
    work = dist.isend(words(world.rank), group=group, group_dst=dist.get_group_rank(group, right))
    dist.recv(got, group=group, group_src=dist.get_group_rank(group, left))
    work.wait()
    agree(world, torch.equal(got, words(left)), f"{got}")
    dist.destroy_process_group(group)


def thing(rank):
    return {
        "rank": rank,
        "tensor": torch.full((3,), rank),
        "text": "x" * rank,
        "large": b"y" * (100_000 * rank),
    }


def equal(a, b):
    return a.keys() == b.keys() and all(
        torch.equal(a[k], b[k]) if k == "tensor" else a[k] == b[k] for k in a
    )


def test_collectives_of_objects(world):
    all_things = [thing(rank) for rank in range(world.size)]
    gathered = [None] * world.size
    dist.all_gather_object(gathered, thing(world.rank))
    agree(world, all(map(equal, gathered, all_things)), "all_gather_object")
    for root in range(world.size):
        pair = [thing(world.rank), world.rank]
        dist.broadcast_object_list(pair, root)
        agree(
            world,
            equal(pair[0], all_things[root]) and pair[1] == root,
            f"broadcast_object_list from {root}",
        )
        gathered = [None] * world.size if world.rank == root else None
        dist.gather_object(thing(world.rank), gathered, root)
        agree(
            world,
            gathered is None or all(map(equal, gathered, all_things)),
            f"gather_object to {root}",
        )
        mine = [None]
        dist.scatter_object_list(mine, all_things if world.rank == root else None, root)
        agree(world, equal(mine[0], all_things[world.rank]), f"scatter_object_list from {root}")


def test_messages_of_objects(world):
    right, left = neighbours(world)
    got = [None, None]
    if world.rank == 0:
        dist.send_object_list([thing(0), "end"], right)
        source = dist.recv_object_list(got, left)
    else:
        source = dist.recv_object_list(got, left)
        dist.send_object_list([thing(world.rank), "end"], right)
    agree(
        world,
        source == left and equal(got[0], thing(left)) and got[1] == "end",
        f"{got} from {source}",
    )


def test_a_message_that_never_comes_raises(world):
    group = dist.new_group(timeout=timedelta(seconds=0.2))
    got, raised = torch.full((4,), -1.0), []
    _, left = neighbours(world)
    for receive in (
        lambda: dist.recv(got, left, group=group),
        lambda: dist.recv(got, group=group),
        lambda: dist.irecv(got, left, group=group).wait(timedelta(seconds=0.1)),
    ):
        try:
            receive()
        except CommTimeout as error:
            raised.append(str(error))
    agree(
        world,
        len(raised) == 3 and all("recv" in text and "did not end" in text for text in raised),
        f"{raised}",
    )
    # The group stays usable.
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=group)
    agree(world, torch.equal(tensor, torch.full((2,), float(world.size))), f"{tensor}")
    world.barrier()


def test_a_wait_that_ends_before_its_operation(world):
    late = world.rank == world.size - 1
    tensor, raised = torch.full((4,), 1.0), ""
    if late:
        for rank in range(world.size - 1):
            dist.recv(torch.zeros(1), rank)  # comes when that rank has seen its timeout
        work = dist.all_reduce(tensor, async_op=True)
    else:
        work = dist.all_reduce(tensor, async_op=True)
        try:
            work.wait(timedelta(seconds=0.1))
        except CommTimeout as error:
            raised = str(error)
        dist.send(torch.zeros(1), world.size - 1)
    work.wait()
    ok = late or ("all_reduce" in raised and "0.1 s" in raised)
    agree(
        world,
        ok and torch.equal(tensor, torch.full((4,), float(world.size))),
        f"{raised!r} {tensor}",
    )


def test_a_receive_past_its_timeout_leaves_the_message_to_the_next(world):
    group, got, raised = dist.new_group(timeout=timedelta(seconds=0.3)), torch.zeros(4), ""
    if world.rank == 0:
        try:
            dist.recv(torch.zeros(4), 1, group=group)
        except CommTimeout as error:
            raised = str(error)
    world.barrier()
    if world.rank == 1:
        dist.send(words(1), 0, group=group)
    elif world.rank == 0:
        dist.recv(got, 1, group=group)
    world.barrier()
    agree(
        world,
        world.rank != 0 or ("did not end" in raised and torch.equal(got, words(1))),
        f"{raised!r} {got}",
    )
    dist.destroy_process_group(group)
