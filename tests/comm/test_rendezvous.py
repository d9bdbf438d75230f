"""The store that lives on MPI."""

import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from mpidist.comm.rendezvous import KeyValueTable
from tests.support import agree, raises_on_all


def test_the_tables_verbs_are_torchs():
    ours, theirs = KeyValueTable(), dist.HashStore()
    ours.set("a", b"1")
    theirs.set("a", "1")
    for key, expected, desired in (("a", "0", "9"), ("a", "1", "2"), ("new", "", "first"), ("missing", "x", "y")):
        mine = ours.compare_set(key, expected.encode(), desired.encode())
        assert mine == theirs.compare_set(key, expected, desired)
    assert ours.add("n", 5) == theirs.add("n", 5)
    assert ours.add("n", -2) == theirs.add("n", -2) == 3
    assert ours.read("n") == theirs.get("n")
    assert ours.has(["a", "n"]) and not ours.has(["a", "zzz"])
    assert ours.delete("a") and not ours.delete("a")
    assert ours.count() == 2


@pytest.fixture
def store(group):
    from mpidist.comm.rendezvous import shared_store

    shared = shared_store()
    name = group.broadcast_object(f"test{time.time()}")
    yield dist.PrefixStore(name, shared)  # through C++ and back, as torch uses it
    group.barrier()


@pytest.mark.mpi
def test_every_rank_reads_what_every_rank_wrote(group, store):
    store.set(f"rank{group.rank}", f"value{group.rank}")
    got = [store.get(f"rank{r}") for r in range(group.size)]
    agree(group, got == [f"value{r}".encode() for r in range(group.size)], str(got))
    count = store.add("counter", 1)
    group.barrier()
    agree(group, 1 <= count <= group.size and store.add("counter", 0) == group.size)
    agree(group, store.check([f"rank{r}" for r in range(group.size)]) and not store.check(["no"]))
    many = store.multi_get([f"rank{r}" for r in range(group.size)])
    agree(group, many == got)


@pytest.mark.mpi
def test_get_waits_for_a_key_that_comes_later(group, store):
    if group.rank == 0:
        time.sleep(0.1)
        store.set("late", "here")
    agree(group, store.get("late") == b"here")


@pytest.mark.mpi
def test_waits_of_several_threads_do_not_stop_each_other(group, store):
    got = []
    threads = [threading.Thread(target=lambda k=k: got.append(store.get(f"k{k}"))) for k in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    group.barrier()
    if group.rank == group.size - 1:
        for k in (3, 1, 0, 2):
            store.set(f"k{k}", str(k))
    for thread in threads:
        thread.join(30)
    agree(group, sorted(got) == [b"0", b"1", b"2", b"3"], str(got))


@pytest.mark.mpi
def test_a_wait_ends_at_its_timeout(group, store):
    def wait():
        store.wait(["never"], timedelta(seconds=0.2))

    # Through C++ a CommTimeout has become a plain RuntimeError.
    raises_on_all(group, RuntimeError, wait, "did not come within")


@pytest.mark.mpi
def test_only_one_rank_wins_a_compare_set(group, store):
    value = store.compare_set("lock", "", str(group.rank))
    winners = set(group.all_gather_object(value))
    assert len(winners) == 1 and int(winners.pop()) in range(group.size)
    group.barrier()
    if group.rank == 0:
        assert store.delete_key("lock")
    group.barrier()
    agree(group, not store.check(["lock"]))


@pytest.mark.mpi
def test_append(group, store):
    for turn in range(group.size):
        group.barrier()
        if group.rank == turn:
            store.append("word", "abcd"[turn % 4])
    group.barrier()
    agree(group, store.get("word") == "".join("abcd"[t % 4] for t in range(group.size)).encode())
