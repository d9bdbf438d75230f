"""Groups that raise on a timeout.

Jobs that a timeout ends are tested in tests/integration/test_lost_ranks.py.
"""

import time
from functools import partial

import pytest
import torch

from mpidist.comm.mpi.nonblocking import MpiCalls
from mpidist.errors import CommTimeout, DisagreementError
from tests.comm.mpi.test_nonblocking import calls
from tests.tools.support import agree, raises_on_all

pytestmark = pytest.mark.mpi

# Calls in which all ranks but the last wait.
_WAITS = {
    "all_reduce": lambda group: group.all_reduce(torch.ones(3)),
    "large all_reduce": lambda group: group.all_reduce(torch.ones(300_000)),
    "bf16": lambda group: group.all_reduce(torch.ones(3, dtype=torch.bfloat16)),
    "asynchronous": lambda group: group.all_reduce(torch.ones(3), async_op=True).wait(),
    "queued": lambda group: [group.all_reduce(torch.ones(3), async_op=True) for _ in range(3)][
        -1
    ].wait(),
    "all_to_all_single": lambda group: group.all_to_all_single(
        torch.ones(group.size), torch.ones(group.size)
    ),
    "scatter_object": lambda group: group.scatter_object(None, group.size - 1),
    "all_gather_object": lambda group: group.all_gather_object("x"),
    "split": lambda group: group.split(0),
    "new_group": lambda group: group.new_group(range(group.size)),
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", _WAITS)
def test_a_timeout_raises_on_every_rank_and_the_group_has_failed(world, name):
    last = world.size - 1
    group = world.clone(name, on_timeout="raise")
    group.timeout_s = 0.2
    message = ""
    try:
        if world.rank != last:
            _WAITS[name](group)
            message = "went through"
    except CommTimeout as error:
        message = str(error)
    # The rank that did not call it gets the failure, too.
    deadline = time.monotonic() + 30
    while group._state.failure is None and time.monotonic() < deadline:
        time.sleep(0.01)
    text = str(group._state.failure)
    fine = world.rank == last or (
        "is past its timeout of 0.2 s" in message and f"rank {last}: " in message
    )
    agree(world, fine and "is past its timeout" in text, f"{message}; {text}")
    for call in (
        partial(group.barrier),
        partial(group.isend, torch.ones(1), 0),
        partial(group.split, 0),
    ):
        with pytest.raises(CommTimeout, match="is past its timeout"):
            call()
    group.close()
    world.barrier()


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_has_closed_the_group_goes_on(world):
    """The others' failure reaches it after its close, and no later group."""
    last = world.size - 1
    for name in ("all_reduce", "large all_reduce"):
        group = world.clone(f"left before {name}", on_timeout="raise")
        group.timeout_s = 0.2
        message = ""
        if world.rank != last:
            try:
                _WAITS[name](group)
            except CommTimeout as error:
                message = str(error)
        group.close()
        is_told = "is past its timeout of 0.2 s" in message and f"rank {last}: " in message
        agree(world, world.rank == last or is_told, f"{name}: {message}")
        fresh = world.clone("after it")
        tensor = torch.ones(300_000)
        fresh.all_reduce(tensor)
        agree(world, bool((tensor == world.size).all()) and fresh._state.failure is None, name)
        fresh.close()


def test_groups_whose_timeouts_raise_compute_the_same(world):
    leavable, plain = world.clone("leavable", on_timeout="raise"), world.clone("plain")
    assert isinstance(leavable._comm.mpi, MpiCalls) and leavable._comm.mpi.is_abandonable
    assert not isinstance(plain._comm.mpi, MpiCalls) or not plain._comm.mpi.is_abandonable
    for numel in (1, 100_000):
        for (name, call, result), (_, other, expected) in zip(
            calls(leavable, numel), calls(plain, numel), strict=True
        ):
            call().wait()
            other().wait()
            agree(
                world, all(torch.equal(a, b) for a, b in zip(result, expected, strict=True)), name
            )
    tensor = torch.ones(5)
    leavable.all_reduce(tensor)
    objects = leavable.all_gather_object({"rank": world.rank})
    children = [leavable.clone(), leavable.split(0), leavable.new_group(range(world.size))]
    inherited = [child.on_timeout for child in children]
    agree(
        world,
        tensor.tolist() == [float(world.size)] * 5
        and objects == [{"rank": r} for r in range(world.size)],
    )
    agree(world, inherited == ["raise"] * 3, str(inherited))
    for group in (*children, leavable, plain):
        group.close()


@pytest.mark.mpi(min_size=2)
def test_ranks_must_agree_on_what_a_timeout_does(group):
    mine = "raise" if group.rank == 0 else "abort"
    text = raises_on_all(
        group,
        DisagreementError,
        lambda: group.clone(on_timeout=mine),
        "must be the same on all ranks",
    )
    agree(group, "abort on rank 1, " in text and "raise on rank 0" in text, text)
    raises_on_all(group, ValueError, lambda: group.clone(on_timeout="ignore"), "got 'ignore'")
    group.barrier()


@pytest.mark.mpi(min_size=2)
def test_an_error_of_one_rank_alone_fails_no_group(world):
    group = world.clone("whole", on_timeout="raise")
    with pytest.raises(ValueError, match="src"):
        group.broadcast(torch.ones(1), 99)
    if group.rank == 0:
        work = group.irecv(torch.ones(1), 1)
        with pytest.raises(CommTimeout):
            work.wait(0.05)
        work.cancel()
    world.barrier()
    group.barrier()
    group.close()
