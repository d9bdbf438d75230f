"""torch's reconfigure API: groups shrink, grow back and change their order; errors; training."""

import datetime
import threading

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from mpidist.errors import CommTimeout, GroupError
from tests.tools.support import agree, printed, raises_on_all, short_job

pytestmark = pytest.mark.skipif(
    not hasattr(dist, "_reconfigure"), reason="torch has groups that change members from 2.14 on"
)
MPI = pytest.mark.mpi(min_size=2)
SHORT = datetime.timedelta(seconds=0.5)


@pytest.fixture
def default(world):
    """Make torch's default group for one test; verdicts use the native group."""
    world.barrier()
    dist.init_process_group("mpidist", enable_reconfigure=True)
    yield dist.group.WORLD
    world.barrier()
    dist.destroy_process_group()


@pytest.fixture
def uuids():
    """Return numbers that no call of a test has had; all ranks count alike."""
    return iter(range(1, 1000))


def facts(world):
    """Return what the default group says of itself, and results of its collectives."""
    group = dist.group.WORLD
    mine = torch.tensor([float(world.rank)])
    dist.all_reduce(mine)
    every = torch.empty(dist.get_world_size())
    dist.all_gather_single(every, torch.tensor([float(world.rank)]), async_op=True).wait()
    listed = functional.wait_tensor(
        functional.all_gather_tensor(torch.tensor([world.rank]), 0, group)
    )
    first = torch.tensor([world.rank])
    dist.broadcast(first, src=0)
    backend = group._get_backend(torch.device("cpu"))
    child = dist.new_group(list(range(dist.get_world_size())))
    child_sum = torch.ones(1)
    dist.all_reduce(child_sum, group=child)
    dist.destroy_process_group(child)
    return {
        "rank": (dist.get_rank(), group.rank(), backend.rank()),
        "size": (dist.get_world_size(), group.size(), backend.size()),
        "ranks": dist.get_process_group_ranks(group),
        "sum": mine.item(),
        "every": every.tolist(),
        "listed": listed.tolist(),
        "first": first.item(),
        "child": child_sum.item(),
    }


def expected(world, members):
    rank, size = members.index(world.rank), len(members)
    return {
        "rank": (rank,) * 3,
        "size": (size,) * 3,
        "ranks": list(range(size)),
        "sum": float(sum(members)),
        "every": [float(member) for member in members],
        "listed": members,
        "first": members[0],
        "child": float(size),
    }


@MPI
@pytest.mark.parametrize("gone", [0, -1], ids=["first", "last"])
def test_a_group_shrinks_and_grows_back(world, default, uuids, gone):
    handles = world.all_gather_object(dist._get_reconfigure_handle())
    assert dist._supports_reconfigure()
    everyone = list(range(world.size))
    left = [rank for rank in everyone if rank != gone % world.size]
    for members in (left, everyone, everyone[::-1], left[::-1], everyone):
        uuid, found = next(uuids), None
        if world.rank in members:
            dist._reconfigure(uuid, [handles[rank] for rank in members]).wait()
            assert dist._get_reconfigure_handle() == handles[world.rank]
            found = facts(world)
        wanted = expected(world, members) if world.rank in members else None
        agree(world, found == wanted, f"{members}: {found} in place of {wanted}")


@MPI
def test_a_set_of_handles_orders_members_by_the_job(world, default, uuids):
    handles = world.all_gather_object(dist._get_reconfigure_handle())
    dist._reconfigure(next(uuids), set(handles[::-1])).wait()
    found, wanted = facts(world), expected(world, list(range(world.size)))
    agree(world, found == wanted, f"{found} in place of {wanted}")


@MPI
def test_wrong_calls_are_refused_before_anything_is_sent(world, default, uuids):
    handles = world.all_gather_object(dist._get_reconfigure_handle())
    scheme, origin, rank = handles[world.rank].split(":")
    others = handles[: world.rank] + handles[world.rank + 1 :]
    uuid = next(uuids)
    dist._reconfigure(uuid, handles).wait()
    for wrong, hints, words in (
        (
            [*handles, f"{scheme}:0123456789abcdef:{rank}"],
            None,
            "of another group, or of a process of another job",
        ),
        ([*handles, "tcp://10.0.0.1:29500"], None, "handles of mpidist"),
        ([*handles, f"{scheme}:{origin}:x"], None, "handles of mpidist"),
        ([*handles, handles[0]], None, "none twice"),
        ([*handles, f"{scheme}:{origin}:{world.size}"], None, str(world.size)),
        ([], None, "at least one rank"),
        (others, None, "is not among"),
        (handles, {"blocking": "1"}, "takes no hints"),
    ):
        again = next(uuids)
        raises_on_all(
            world,
            ValueError,
            lambda again=again, wrong=wrong, hints=hints: dist._reconfigure(
                again, wrong, hints=hints
            ),
            words,
        )
    raises_on_all(world, ValueError, lambda: dist._reconfigure(uuid, handles), "fresh uuid")
    found, wanted = facts(world), expected(world, list(range(world.size)))
    agree(world, found == wanted, f"{found} in place of {wanted}")


@MPI
@pytest.mark.parametrize("differ", ["order", "uuid", "a rank stays away"])
def test_ranks_that_disagree_get_an_error_and_keep_their_group(world, default, uuids, differ):
    handles = world.all_gather_object(dist._get_reconfigure_handle())
    uuid, other = next(uuids), next(uuids)
    is_last = world.rank == world.size - 1
    words = "must give the same ranks and key"
    if not (is_last and differ == "a rank stays away"):
        given = handles[::-1] if is_last and differ == "order" else handles
        number = other if is_last and differ == "uuid" else uuid
        try:
            dist._reconfigure(number, given, timeout=SHORT)
            words = "went through"
        except CommTimeout as error:
            words = str(error)
    agree(world, "must give the same ranks and key" in words, words)
    everyone = list(range(world.size))
    found, wanted = facts(world), expected(world, everyone)
    agree(world, found == wanted, f"{found} in place of {wanted}")
    dist._reconfigure(next(uuids), handles[::-1]).wait()
    found, wanted = facts(world), expected(world, everyone[::-1])
    agree(world, found == wanted, f"{found} in place of {wanted}")


@MPI
def test_a_group_with_operations_queued_refuses(world, default, uuids):
    handles = world.all_gather_object(dist._get_reconfigure_handle())
    gate = threading.Event()
    work = default.native.in_order(gate.wait, operation="a queued operation")
    uuid = next(uuids)
    raises_on_all(world, GroupError, lambda: dist._reconfigure(uuid, handles), "1 operations")
    gate.set()
    work.wait()
    dist._reconfigure(next(uuids), handles).wait()
    dist.barrier()


@MPI
def test_a_sub_group_changes_and_keeps_torchs_ranks(world, default, uuids):
    everyone = list(range(world.size))
    group = dist.new_group(everyone)
    of_default = world.all_gather_object(dist._get_reconfigure_handle())
    uuid, words = next(uuids), "of another group"
    raises_on_all(world, ValueError, lambda: dist._reconfigure(uuid, of_default, group), words)
    handles = world.all_gather_object(dist._get_reconfigure_handle(group))
    orders = [everyone[::-1], everyone[1:], everyone]
    for members in orders:
        uuid, found = next(uuids), None
        if world.rank in members:
            dist._reconfigure(uuid, [handles[rank] for rank in members], group).wait()
            value = torch.tensor([world.rank])
            dist.broadcast(value, src=members[-1], group=group)
            found = (
                dist.get_rank(group),
                dist.get_world_size(group),
                dist.get_process_group_ranks(group),
                dist.get_global_rank(group, 0),
                value.item(),
            )
        wanted = (members.index(world.rank) if world.rank in members else None,)
        wanted += (len(members), members, members[0], members[-1])
        agree(world, found is None or found == wanted, f"{members}: {found}, not {wanted}")
    # The default group's ranks are others from here on: torch counts all groups by them.
    dist._reconfigure(next(uuids), of_default[::-1]).wait()
    raises_on_all(world, GroupError, lambda: group.barrier().wait(), "closed")
    dist.barrier()


@MPI
def test_a_sub_group_takes_no_rank_from_outside_the_default_group(world, default, uuids):
    handles = world.all_gather_object(dist._get_reconfigure_handle())
    uuid = next(uuids)
    if world.rank > 0:
        dist._reconfigure(uuid, handles[1:]).wait()
        group = dist.new_group(list(range(world.size - 1)))
        own = dist._get_reconfigure_handle(group)
        outside = f"{own.rpartition(':')[0]}:0"
        with pytest.raises(ValueError, match="of a sub-group needs ranks of the default group"):
            dist._reconfigure(next(uuids), [own, outside], group)
    agree(world, True)


@MPI
def test_a_shrunk_group_grows_back(world, default, uuids):
    handles = world.all_gather_object(dist._get_reconfigure_handle())
    uuid, held = next(uuids), default
    if world.rank > 0:
        held = dist.shrink_group([0])
        agreed = dist._get_reconfigure_handle() == handles[world.rank]
        assert agreed and dist.get_world_size() == world.size - 1
    dist._reconfigure(uuid, handles).wait()
    found, wanted = facts(world), expected(world, list(range(world.size)))
    agree(world, held is dist.group.WORLD and found == wanted, f"{found}, not {wanted}")


def trained(group):
    """Return weights after steps in torch's DDP on a group, a rank's data by its rank in it."""
    torch.manual_seed(1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(7, 3), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        data = torch.randn(
            5, 7, generator=torch.Generator().manual_seed(10 * step + dist.get_rank(group))
        )
        model(data).square().mean().backward()
        optimizer.step()
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


@MPI
def test_ddp_trains_as_on_a_fresh_group_of_that_size(world, default, uuids):
    handles = world.all_gather_object(dist._get_reconfigure_handle())
    everyone = list(range(world.size))
    for members in (everyone, everyone[1:], everyone[::-1]):
        uuid, same = next(uuids), True
        if world.rank in members:
            dist._reconfigure(uuid, [handles[rank] for rank in members]).wait()
            weights = trained(dist.group.WORLD)
            fresh = dist.new_group(list(range(len(members))))
            same = torch.equal(weights, trained(fresh))
        agree(world, same, f"{members}")


@pytest.mark.mpi(min_size=1)
def test_a_group_without_the_flag_says_what_it_needs(world):
    world.barrier()
    dist.init_process_group("mpidist")
    agree(world, not dist._supports_reconfigure())
    for call in (dist._get_reconfigure_handle, lambda: dist._reconfigure(1, ["x"])):
        raises_on_all(world, NotImplementedError, call, "enable_reconfigure=True")
    world.barrier()
    dist.destroy_process_group()


_DIES = """
import faulthandler, json, os, signal, torch
import torch.distributed as dist
from mpidist.errors import RankFailureError
from tests.c10d.test_reconfiguring import trained

faulthandler.dump_traceback_later(60)  # where a job hangs
os.environ["MPIDIST_ON_TIMEOUT"] = "raise"
dist.init_process_group("mpidist", enable_reconfigure=True)
handles = [None] * 4
dist.all_gather_object(handles, dist._get_reconfigure_handle())
mine = dist.get_rank()
trained(dist.group.WORLD)
if mine == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    while True:
        dist.all_reduce(torch.ones(1000))
except RankFailureError:
    pass
dist._reconfigure(7, [handles[rank] for rank in (3, 2, 0)]).wait()
total = torch.tensor([float(mine)])
dist.all_reduce(total)
same = torch.equal(trained(dist.group.WORLD), trained(dist.new_group([0, 1, 2])))
found = {"rank": mine, "new": dist.get_rank(), "sum": total.item(), "same": same}
print(json.dumps(found), flush=True)
dist.barrier()
os._exit(0)
"""


@pytest.mark.slow
def test_training_goes_on_after_a_death():
    found = printed(short_job(4, _DIES, "--with-ft", "ulfm"))
    assert sorted(found) == [0, 2, 3], found
    for rank, facts in found.items():
        wanted = {"rank": rank, "new": (3, 2, 0).index(rank), "sum": 5.0, "same": True}
        assert facts == wanted, facts
