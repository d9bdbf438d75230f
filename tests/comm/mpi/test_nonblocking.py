"""Non-blocking calls between nodes: every collective, compared with blocking calls on one node."""

import threading
import time

import pytest
import torch

from mpidist.comm.mpi import backoff, nonblocking
from tests.tools.simulated_nodes import groups, lay_out
from tests.tools.support import agree, finished

pytestmark = pytest.mark.mpi


@pytest.fixture
def spread(world, monkeypatch):
    """A group whose ranks count as nodes of their own."""
    with groups(world, monkeypatch) as clone:
        yield clone("alone")


def calls(group, numel):
    """Yield (name, call, result tensors)."""
    rank, size = group.rank, group.size

    def own(factor=1, dtype=torch.float32):
        return (torch.arange(numel * factor) % 97 + rank).to(dtype)

    for op in ("sum", "avg", "max"):
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            tensor = own(dtype=dtype)
            yield (
                f"all_reduce {op} {dtype}",
                lambda t=tensor, op=op: group.all_reduce(t, op, async_op=True),
                [tensor],
            )
    tensor = own()
    yield "broadcast", lambda: group.broadcast(tensor, size - 1, async_op=True), [tensor]
    reduced = own()
    yield "reduce", lambda: group.reduce(reduced, 0, async_op=True), [reduced] if rank == 0 else []
    gathered = torch.zeros(numel * size)
    yield (
        "all_gather_into_tensor",
        lambda: group.all_gather_into_tensor(gathered, own(), async_op=True),
        [gathered],
    )
    ragged = [torch.zeros(numel + place) for place in range(size)]
    mine = torch.full((numel + rank,), float(rank))
    yield "all_gather", lambda: group.all_gather(ragged, mine, async_op=True), ragged
    shard = torch.zeros(numel)
    yield (
        "reduce_scatter_tensor",
        lambda: group.reduce_scatter_tensor(shard, own(size), async_op=True),
        [shard],
    )
    swapped = torch.zeros(numel * size)
    yield (
        "all_to_all_single",
        lambda: group.all_to_all_single(swapped, own(size), async_op=True),
        [swapped],
    )
    yield "barrier", lambda: group.barrier(async_op=True), []


@pytest.mark.parametrize("numel", [1, 3000, 600_000])
def test_nonblocking_calls_have_the_results_of_blocking_ones(world, spread, numel, monkeypatch):
    lay_out(world, monkeypatch, "one node")
    plain = world.clone("plain")
    for (name, call, result), (_, expected_call, expected) in zip(
        calls(spread, numel), calls(plain, numel), strict=True
    ):
        call().wait()
        expected_call().wait()
        agree(world, all(torch.equal(a, b) for a, b in zip(result, expected, strict=True)), name)
    plain.close()


def test_synchronous_calls_match_asynchronous_ones(world, spread):
    """Each rank chooses; MPI would not match a blocking collective with a non-blocking one."""
    size = spread.size
    for numel in (1, 3000, 300_000):
        for turn in range(4):
            is_async = bool((turn + spread.rank) % 2)
            for dtype in (torch.float32, torch.bfloat16):
                tensor = torch.full((numel,), spread.rank + 1.0, dtype=dtype)
                finished(spread.all_reduce(tensor, async_op=is_async))
                agree(world, bool((tensor == size * (size + 1) / 2).all()), f"all_reduce {dtype}")
            finished(spread.broadcast(tensor.fill_(spread.rank), size - 1, async_op=is_async))
            gathered = torch.empty(numel * size)
            finished(
                spread.all_gather_into_tensor(
                    gathered, torch.full((numel,), float(spread.rank)), async_op=is_async
                )
            )
            finished(spread.barrier(async_op=is_async))
            agree(
                world,
                bool((tensor == size - 1).all())
                and torch.equal(gathered[::numel], torch.arange(float(size))),
            )


def test_a_waiting_thread_sleeps(spread, monkeypatch):
    """While one rank is late, the other ranks' group threads sleep."""
    sleep, slept = time.sleep, set()
    caller, progress = threading.current_thread().name, f"mpidist-{spread.name}"

    # Other threads of this process sleep as well: mpidist-receives after an earlier test's receive.
    def noting(seconds):
        slept.update({threading.current_thread().name} & {caller, progress})
        sleep(seconds)

    monkeypatch.setattr(backoff.time, "sleep", noting)
    tensor = torch.ones(1000)
    if spread.rank == 0:
        sleep(0.2)
    # With a limit: without one, the caller's thread would execute it, and wait inside MPI.
    spread.all_reduce(tensor, async_op=True).wait(60)
    agree(
        spread,
        bool((tensor == spread.size).all()) and (not spread.rank or slept == {progress}),
        str(slept),
    )


def test_the_wait_passes_the_status():
    class Request:
        left = 3

        def Test(self, status):
            status.append(self.left)
            self.left -= 1
            return not self.left

    seen = []
    nonblocking.wait_sleeping(Request(), seen)
    assert seen == [3, 2, 1]
