"""Rendezvous ``mpi://``: its store, requests that are refused, and waits."""

import os
import signal
import threading
import time
import weakref
from datetime import timedelta

import pytest
import torch.distributed as dist

from mpidist.comm.store import key_value_table, rendezvous
from mpidist.errors import CommTimeout
from tests.tools.support import agree, raises_on_all


class LeftStore:
    """Store of a world, in which nothing is left to do."""

    def leave(self):
        """Do nothing."""


def test_stores_of_former_worlds_are_let_go(monkeypatch):
    monkeypatch.setattr(rendezvous, "_stores", {})
    monkeypatch.setattr(rendezvous, "_former", rendezvous._former.copy())
    alive = []
    for _ in range(20):
        store = rendezvous._stores[(0,)] = LeftStore()
        alive.append(weakref.ref(store))
        del store
        rendezvous._drop()
    assert [one() is None for one in alive] == [True] * 18 + [False] * 2


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
def test_get_waits_for_a_key_that_is_set_later(group, store):
    if group.rank == 0:
        time.sleep(0.1)
        store.set("late", "here")
    agree(group, store.get("late") == b"here")


@pytest.mark.mpi
def test_waits_of_several_threads_do_not_stop_each_other(group, store):
    got = []
    threads = [
        threading.Thread(target=lambda k=k: got.append(store.get(f"k{k}"))) for k in range(4)
    ]
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

    raises_on_all(group, dist.DistStoreError, wait, "did not come within 0.2 s")
    raises_on_all(group, CommTimeout, wait, "did not come within 0.2 s")


@pytest.mark.mpi
def test_torchs_timeout_of_a_store_ends_its_waits(group, store):
    before = store.timeout
    store.set_timeout(timedelta(seconds=0.3))
    for call in (lambda: store.get("never"), lambda: store.wait(["never"])):
        raises_on_all(group, dist.DistStoreError, call, "did not come within 0.3 s")
    store.set_timeout(before)


class Stop(BaseException):
    """Raised by a handler of a signal."""


@pytest.mark.mpi(min_size=2)
def test_the_reply_to_a_call_that_was_left_is_not_another_ones(group, store, monkeypatch):
    # Four tags, so that they come again at once.
    for module in (rendezvous, key_value_table):
        monkeypatch.setattr(module, "REPLY_TAGS", range(16, 20), raising=False)
    group.barrier()
    shared, sums = rendezvous.shared_store(), []
    key = f"sum of {group.rank} at {time.time()}"

    def stop(*_):
        raise Stop

    handler = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    with pytest.raises(Stop):
        shared.wait(["never"])
    signal.signal(signal.SIGALRM, handler)
    time.sleep(1.5)  # the wait is one request of a second
    sums = [shared.add(key, 1) for _ in range(12)]
    agree(group, sums == list(range(1, 13)), f"{sums}")
    agree(group, not shared._unanswered, f"{shared._unanswered}")


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
def test_appended_values_are_joined_in_their_order(group, store):
    for turn in range(group.size):
        group.barrier()
        if group.rank == turn:
            store.append("word", "abcd"[turn % 4])
    group.barrier()
    agree(group, store.get("word") == "".join("abcd"[t % 4] for t in range(group.size)).encode())


# --- invalid requests ---


@pytest.mark.mpi
def test_adding_to_a_value_that_is_not_a_number_raises_in_the_caller_alone(group, store):
    shared = rendezvous.shared_store()
    key = f"text of {group.rank} at {time.time()}"
    shared.set(key, b"abc")
    with pytest.raises(ValueError, match="its value, 3 bytes, is no number"):
        shared.add(key, 1)
    agree(group, shared.get(key) == b"abc")


@pytest.mark.mpi
def test_a_key_that_is_deleted_between_wait_and_read_is_waited_for_again(group, monkeypatch):
    shared = rendezvous.shared_store()
    key = f"deleted of {group.rank} at {time.time()}"
    wait, waits = shared.wait, []

    def waited(keys, timeout=None):
        if not waits:
            shared.set(key, b"first")
            wait(keys, timeout)
            shared.delete_key(key)
        else:
            shared.set(key, b"second")
            wait(keys, timeout)
        waits.append(keys)

    monkeypatch.setattr(shared, "wait", waited)
    agree(group, shared.get(key) == b"second" and len(waits) == 2)
    shared.delete_key(key)


@pytest.mark.mpi
def test_a_forked_child_asks_the_store_nothing(group, store):
    store.set(f"before{group.rank}", "here")
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            for call in (lambda: store.set("of a child", "x"), lambda: store.get("never")):
                try:
                    signal.alarm(60)
                    call()
                    os.write(writing, b"went through\n")
                except Exception as error:
                    os.write(writing, f"{error}\n".encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading) as file:
        texts = file.read().splitlines()
    os.waitpid(child, 0)
    refused = [text for text in texts if "was called in a process forked from the rank" in text]
    agree(group, len(refused) == 2, f"{texts}")
    group.barrier()
    here = [store.get(f"before{rank}") for rank in range(group.size)]
    agree(group, here == [b"here"] * group.size and not store.check(["of a child"]))
