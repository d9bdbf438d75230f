"""Background consolidation: the state at the time of the call; atomic files."""

import copy
import os
import sys
import threading
import time

import pytest
import torch

from mpidist.errors import CommTimeout, DisagreementError, MpidistError
from mpidist.zero.state import background
from tests.tools.support import agree, raises_on_all
from tests.zero.stateful import ADAM, SGD, parameters_of, same, sharded, train, whole

pytestmark = pytest.mark.mpi(min_size=1)


@pytest.fixture
def folder(group, tmp_path):
    """One folder for all ranks: rank 0's."""
    return tmp_path.__class__(group.broadcast_object(str(tmp_path), 0))


@pytest.fixture
def gate(monkeypatch):
    """Gate that blocks all transfers until it is opened."""
    opened = threading.Event()
    real = background.gathered

    def later(*args):
        assert opened.wait(60)
        return real(*args)

    monkeypatch.setattr(background, "gathered", later)
    return opened


@pytest.mark.parametrize("partition", ["greedy", "flat"])
def test_the_state_of_the_call_arrives_while_steps_and_settings_go_on(
    group, folder, gate, partition
):
    last = group.size - 1
    for kind in (ADAM, SGD):
        expected, optimizer = whole(kind), sharded(group, kind, partition)
        for one in (expected, optimizer):
            train(one, range(2))
        wanted, path = copy.deepcopy(expected.state_dict()), folder / f"{kind[0].__name__}.pt"
        gate.clear()
        pending = optimizer.consolidate_async(last, path, chunk_bytes=100)
        train(optimizer, range(2, 4))
        optimizer.param_groups[0]["lr"] = 0.5
        early = pending.done() or path.exists()
        with pytest.raises(CommTimeout):
            pending.wait(1e-3)
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
        gate.set()
        found = pending.result()
        ok = not early and pending.done() and same(found, wanted if group.rank == last else None)
        ok = (
            ok
            and same(torch.load(path, weights_only=True), wanted)
            and [one.name for one in folder.glob("*.part")] == []
        )
        agree(group, ok, f"{kind[0].__name__}: not the state of the call")
        # The next consolidation waits for the last one and does not change its result; freed memory
        # is reused.
        first, second = optimizer.consolidate_async(-1), optimizer.consolidate_async(-1)
        agree(
            group,
            first.done()
            and same(first.result(), second.result())
            and len(parameters_of(optimizer)) == 7,
        )
        agree(
            group,
            same(found, wanted if group.rank == last else None),
            "an earlier result has changed",
        )
        optimizer.close()
        optimizer.close()
        agree(group, not background._open)


def test_errors_reach_all_ranks_and_the_old_file_stays(group, folder):
    optimizer = sharded(group, ADAM, "flat")
    train(optimizer, range(1))
    path = folder / "state.pt"
    optimizer.consolidate_async(0, path).wait()
    group.barrier()
    before = path.read_bytes()
    taken = folder / "taken.pt"
    taken.mkdir(exist_ok=True)
    pending = optimizer.consolidate_async(0, taken)
    error = IsADirectoryError if group.rank == 0 else MpidistError
    raises_on_all(group, error, pending.wait, "taken.pt")
    ok = path.read_bytes() == before and not list(folder.glob("*.part"))
    group.barrier()
    optimizer.consolidate_async(0, path).wait()  # works again
    agree(group, ok and path.read_bytes() == before)
    raises_on_all(group, ValueError, lambda: optimizer.consolidate_async(-1, path), "one recipient")
    raises_on_all(group, TypeError, lambda: optimizer.consolidate_async(0, 5), "path must be")
    raises_on_all(
        group, ValueError, lambda: optimizer.consolidate_async(group.size), "recipient_rank"
    )
    if group.size > 1:
        mine = path if group.rank else None
        raises_on_all(
            group, DisagreementError, lambda: optimizer.consolidate_async(0, mine), "has path"
        )
    optimizer.close()


def test_what_breaks_while_it_is_written_leaves_no_file(tmp_path, monkeypatch):
    path = tmp_path / "state.pt"
    background.write({"a": torch.ones(2)}, path)
    before = path.read_bytes()

    def broken(fd):
        raise OSError("no space left")

    monkeypatch.setattr(background.os, "fsync", broken)
    with pytest.raises(OSError, match="no space left"):
        background.write({"a": torch.zeros(2)}, path)
    assert path.read_bytes() == before and [one.name for one in tmp_path.iterdir()] == ["state.pt"]


@pytest.mark.skipif(sys.platform != "linux", reason="priorities of threads are Linux's")
def test_a_thread_that_waits_for_a_transfer_keeps_its_priority(world):
    own, lowered = threading.get_native_id(), []
    before = os.getpriority(os.PRIO_PROCESS, own)
    group = world.new_group(range(world.size))
    optimizer = sharded(group, SGD)
    train(optimizer, range(1))
    for _ in range(3):
        optimizer.consolidate_async().wait()

    def lower():
        background._lower_priority()
        lowered.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    lower()  # as a transfer does that this thread executes
    work = group.in_order(lower, async_op=True)
    while not work.done():  # a wait would execute it here
        time.sleep(1e-3)
    optimizer.close()
    group.close()
    after = os.getpriority(os.PRIO_PROCESS, own)
    agree(world, (after, lowered) == (before, [before, 19]), f"{before} {after} {lowered}")
