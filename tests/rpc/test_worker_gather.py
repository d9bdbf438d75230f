"""All-gather of one object from each worker, by calls."""

import operator
import threading
import time

import pytest
import torch

import mpidist.rpc as rpc
from mpidist.errors import MpidistError
from mpidist.rpc import current, worker_gather
from tests.rpc.limits import soon
from tests.tools.support import agree

pytestmark = pytest.mark.mpi


def test_every_worker_gets_every_workers_object_each_time(group, workers):
    for turn in range(3):
        got = worker_gather.all_gather(
            {"of": group.rank, "turn": turn, "tensor": torch.full((3,), float(group.rank))}
        )
        ok = list(sorted(got)) == sorted(workers)
        ok &= all(
            got[name]["of"] == rank and got[name]["turn"] == turn
            for rank, name in enumerate(workers)
        )
        ok &= all(bool((got[name]["tensor"] == rank).all()) for rank, name in enumerate(workers))
        agree(group, ok, f"turn {turn}: {got}")


@pytest.mark.mpi(min_size=2)
def test_some_workers_gather_among_themselves(group, workers):
    some = workers[1:]
    if workers[group.rank] in some:
        got = worker_gather.all_gather(group.rank, some)
        ok = got == {name: rank for rank, name in enumerate(workers) if name in some}
    else:
        ok = True
    agree(group, ok)
    worker_gather.barrier(workers)


@pytest.mark.mpi(min_size=2)
def test_a_worker_that_does_not_come_is_named(group, workers):
    late = workers[-1]
    group.barrier()
    if workers[group.rank] == late:
        ok = True
    else:
        with pytest.raises(MpidistError) as caught:
            worker_gather.all_gather(group.rank, workers, timeout=0.2)
        ok = f"['{late}'] missing" in str(caught.value)
        ok &= "timed out in _all_gather after 0.20 seconds" in str(caught.value)
    agree(group, ok)


@pytest.mark.mpi(min_size=2)
def test_what_is_sent_ahead_is_bounded_and_dropped_at_the_end(group, workers):
    """A worker may be some gatherings ahead of another; its objects end with the agent."""
    generation = current.require().generation
    refused = 0
    if group.rank == 1:
        for number in range(100):
            try:
                rpc.rpc_sync(
                    workers[0],
                    worker_gather.put_part,
                    args=(generation, number, tuple(workers[:2]), b"x"),
                )
            except MpidistError as error:
                refused += "too far ahead" in str(error)
    group.barrier()
    ok = refused == (36 if group.rank == 1 else 0) and len(worker_gather._parts) == (
        64 if group.rank == 0 else 0
    )
    agree(group, ok, f"{refused} refused, {len(worker_gather._parts)} kept")
    rpc.shutdown()
    agree(group, not worker_gather._parts and not worker_gather._counts)


@pytest.mark.mpi(min_size=2)
def test_one_deadline_holds_for_the_whole_call(group, workers):
    """The answer of a worker takes most of the time, and its object does not come at all."""
    took = 0.0
    group.barrier()
    if group.rank == 0:
        with worker_gather._changed:
            group.barrier()
            time.sleep(0.8)
    else:
        group.barrier()
        start = time.monotonic()
        if group.rank == 1:
            with pytest.raises(MpidistError, match="timed out"):
                worker_gather.all_gather(1, workers[:2], timeout=1.0)
        took = time.monotonic() - start
    agree(group, took < 1.5, f"{took} s")


@pytest.mark.mpi(min_size=2)
def test_a_worker_waits_without_a_limit_by_default(monkeypatch, group, workers):
    """As in torch: one that comes late is no error."""
    monkeypatch.setattr(current.require().calls, "rpc_timeout", 0.5)
    group.barrier()
    if group.rank == group.size - 1:
        time.sleep(1.5)
    got = worker_gather.all_gather(group.rank)
    agree(group, sorted(got.values()) == list(range(group.size)))


@pytest.mark.mpi(min_size=2)
def test_a_gathering_that_was_late_leaves_nothing(group, workers):
    if group.rank != group.size - 1:
        with pytest.raises(MpidistError):
            worker_gather.all_gather(group.rank, workers, timeout=0.1)
    group.barrier()
    if group.rank == group.size - 1:
        with pytest.raises(MpidistError):
            worker_gather.all_gather(group.rank, workers, timeout=0.1)
    group.barrier()
    agree(group, not worker_gather._parts, f"{list(worker_gather._parts)}")
    got = worker_gather.all_gather(group.rank)
    agree(group, sorted(got) == sorted(workers))


class Unsendable:
    def __reduce__(self):
        raise RuntimeError("not this one")


class Code:
    """An instance is sent as a pickle, which a worker with a list does not read."""


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("comes_late", [False, True])
@pytest.mark.parametrize("what", ["object", "reference"])
def test_an_object_that_cannot_be_sent_is_an_error_of_all(group, workers, what, comes_late):
    obj = group.rank
    words = "was deleted" if what == "reference" else "not this one"
    if group.rank == 1:
        obj = Unsendable() if what == "object" else rpc.remote(workers[0], int)
        if what == "reference":
            obj.to_here()
            obj.delete()
    elif comes_late:
        # Behind the reason of worker1.
        assert soon(
            lambda: any(
                isinstance(part, worker_gather._Absence)
                for parts in list(worker_gather._parts.values())
                for part in list(parts.values())
            )
        )
    with pytest.raises(RuntimeError) as caught:
        worker_gather.all_gather(obj, timeout=30)
    text = str(caught.value)
    # One may learn it from the refusal of its own object first.
    ok = (words in text and (group.rank == 1 or "worker1 cannot send its object" in text)) or (
        group.rank != 1 and not comes_late and "worker1 has given up" in text
    )
    group.barrier()
    agree(group, ok, text)
    got = worker_gather.all_gather(group.rank)
    agree(group, sorted(got.values()) == list(range(group.size)) and not worker_gather._parts)


@pytest.mark.mpi(min_size=3)
def test_an_object_that_one_worker_cannot_read_is_an_error_of_all(group):
    allowed = [operator.add] if group.rank == group.size - 1 else None
    rpc.init_rpc(f"worker{group.rank}", group=group, allowed=allowed)
    obj = Code() if group.rank == 1 else group.rank
    with pytest.raises(MpidistError, match=f"worker{group.size - 1} reads data only|given up"):
        worker_gather.all_gather(obj, timeout=30)
    group.barrier()
    got = worker_gather.all_gather(group.rank)
    agree(group, sorted(got.values()) == list(range(group.size)))
    rpc.shutdown()


def test_a_worker_that_is_not_named_is_told_so(group, workers):
    counts = dict(worker_gather._counts)
    others = [name for name in workers if name != workers[group.rank]] or ["nobody"]
    with pytest.raises(MpidistError, match=f"^worker{group.rank} takes no part in an _all_gather"):
        worker_gather.all_gather(1, others)
    for wrong, kind in ((-2, ValueError), ("5", TypeError)):
        with pytest.raises(kind, match="a timeout is"):
            worker_gather.all_gather(1, timeout=wrong)
    # Not begun, so the others' numbers stay the same.
    assert worker_gather._counts == counts
    worker_gather.barrier(workers)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("graceful", [False, True])
def test_a_gathering_ends_with_rpc(group, workers, graceful):
    raised = []

    def gather():
        try:
            worker_gather.all_gather(group.rank, workers)
        except MpidistError as error:
            raised.append(str(error))

    thread = threading.Thread(target=gather)
    group.barrier()
    if group.rank == 0:
        thread.start()
        assert soon(lambda: worker_gather._parts and not len(current.require().calls))
    group.barrier()
    rpc.shutdown(graceful)
    if group.rank == 0:
        thread.join(30)
    agree(group, not thread.is_alive() and len(raised) == (group.rank == 0), f"{raised}")
