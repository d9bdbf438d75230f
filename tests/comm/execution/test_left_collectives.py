"""Collectives that an exception of a signal handler leaves before their end."""

import contextlib
import gc
import signal
import weakref

import pytest
import torch

from mpidist.comm.mpi import runtime
from mpidist.errors import GroupError
from tests import interrupt_fuzz
from tests.interrupt_fuzz import Interrupt
from tests.tools.simulated_nodes import groups
from tests.tools.support import agree

pytestmark = pytest.mark.mpi(min_size=2)


@pytest.fixture
def alarm():
    """Return a function that has a handler called after a moment, until the test's end."""
    former = signal.getsignal(signal.SIGALRM)

    def start(handler):
        signal.signal(signal.SIGALRM, lambda number, frame: handler())
        signal.setitimer(signal.ITIMER_REAL, 0.1)

    yield start
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, former)


def interrupt():
    raise Interrupt


@pytest.fixture
def leaves(alarm, monkeypatch):
    """Return a function that calls another, which the handler leaves by raising."""
    # MPI's end waits for the other ranks, which come later here than it would wait.
    monkeypatch.setattr(runtime, "note_failure", lambda *args: None)

    def leave(call):
        alarm(interrupt)
        with pytest.raises(Interrupt):
            call()

    return leave


_CALLS = {
    "all_reduce": lambda group, tensor: group.all_reduce(tensor),
    "bf16": lambda group, tensor: group.all_reduce(tensor.to(torch.bfloat16)),
    "reduce_scatter": lambda group, tensor: group.reduce_scatter_tensor(
        tensor, torch.ones(tensor.numel() * group.size)
    ),
    "all_to_all": lambda group, tensor: group.all_to_all(
        [tensor, *(torch.zeros_like(tensor) for _ in range(group.size - 1))],
        [torch.ones_like(tensor) for _ in range(group.size)],
    ),
    "all_gather_object": lambda group, tensor: group.all_gather_object(tensor),
    "in_order": lambda group, tensor: group.in_order(group.barrier, async_op=False),
}


@pytest.mark.parametrize("name", _CALLS)
@pytest.mark.parametrize("numel", [3, 50_000])
def test_the_group_has_failed_and_its_memory_is_kept(world, alarm, leaves, name, numel):
    group = world.clone(name, on_timeout="raise")
    if group.rank == 0:
        tensor = torch.ones(numel)
        kept = weakref.ref(tensor)
        leaves(lambda: _CALLS[name](group, tensor))
        del tensor
        gc.collect()
        assert name in ("bf16", "all_gather_object", "in_order") or kept() is not None
        for call in (group.barrier, lambda: group.isend(torch.ones(1), 1)):
            with pytest.raises(GroupError, match="was left by Interrupt before its end"):
                call()
        zeros = [torch.zeros(numel) for _ in range(20)]
    world.barrier()
    if group.rank == 1:
        # Its parts come now, and it may wait for ever for those of rank 0.
        alarm(interrupt)
        with contextlib.suppress(Interrupt):
            _CALLS[name](group, torch.full((numel,), 42.0))
            signal.setitimer(signal.ITIMER_REAL, 0)
    world.barrier()
    agree(world, group.rank != 0 or all(bool((each == 0).all()) for each in zeros))
    group.close()
    behind = world.clone(f"behind {name}")
    total = torch.ones(4)
    behind.all_reduce(total)
    agree(world, bool((total == world.size).all()))
    behind.close()


def test_a_later_wait_raises_the_failure_and_not_the_interrupt(world, leaves, monkeypatch):
    group = world.clone("waited for", on_timeout="raise")
    # The thread that waits executes the operation: the group's thread would go on with it.
    monkeypatch.setattr(group._progress, "_wakes_thread", lambda: False)
    monkeypatch.setattr(group._execution, "helps", True)
    monkeypatch.setattr(group._fast_path, "_help", group._progress.help)
    if group.rank == 0:
        works = [group.all_reduce(torch.ones(3), async_op=True) for _ in range(2)]
        leaves(works[0].wait)
        for work in (*works, works[0]):
            with pytest.raises(GroupError, match="was left by Interrupt before its end"):
                work.wait()
    world.barrier()
    group.close()


@pytest.mark.parametrize("kind", ["nodes", "raise"])
def test_handlers_are_called_while_a_collective_waits(world, alarm, monkeypatch, kind):
    """The others begin it when the handler has told them: otherwise the job would hang."""
    with groups(world, monkeypatch) as clone:
        group = clone("alone") if kind == "nodes" else clone("one node", on_timeout="raise")
        for call in (
            lambda: group.all_reduce(torch.ones(3)),
            lambda: group.all_reduce(torch.ones(3), async_op=True).wait(),
            group.barrier,
            lambda: group.broadcast(torch.ones(3), 1),
            lambda: group.all_gather_object(None),
        ):
            for rank in range(1, world.size):
                if world.rank == rank:
                    world.recv(torch.zeros(1), 0)
            if world.rank == 0:
                alarm(lambda: [world.send(torch.ones(1), rank) for rank in range(1, world.size)])
            call()
    world.barrier()


def test_interrupts_at_random_moments(world, monkeypatch):
    monkeypatch.setattr(runtime, "note_failure", lambda *args: None)
    outcomes = interrupt_fuzz.run(world, range(20), lambda: False)
    agree(world, outcomes.total() == 20 and len(outcomes) > 1, str(outcomes))
