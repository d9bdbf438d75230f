"""Rendezvous ``mpi://``: its store, requests that are refused, and waits."""

import struct
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from mpidist.comm.mpi.library import MPI
from mpidist.comm.serialization import frame
from mpidist.comm.store import key_value_table, rendezvous
from mpidist.comm.store.key_value_table import REPLY_TAGS, KeyValueTable
from mpidist.errors import FrameError
from tests.tools.support import EndsProcess, agree, raises_on_all


def test_operations_of_the_table_return_what_torchs_store_returns():
    ours, theirs = KeyValueTable(), dist.HashStore()
    ours.set("a", b"1")
    theirs.set("a", "1")
    for key, expected, desired in (
        ("a", "0", "9"),
        ("a", "1", "2"),
        ("new", "", "first"),
        ("missing", "x", "y"),
    ):
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
    from mpidist.comm.store.rendezvous import shared_store

    shared = shared_store()
    name = group.broadcast_object(f"test{time.time()}")
    # Through C++ and back, as torch uses the store.
    yield dist.PrefixStore(name, shared)
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

    # C++ turns a CommTimeout into a RuntimeError.
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
def test_appended_values_are_joined_in_their_order(group, store):
    for turn in range(group.size):
        group.barrier()
        if group.rank == turn:
            store.append("word", "abcd"[turn % 4])
    group.barrier()
    agree(group, store.get("word") == "".join("abcd"[t % 4] for t in range(group.size)).encode())


# --- invalid requests ---

TAG = REPLY_TAGS[0]


def written(*items):
    return bytes(frame.to_bytes(list(items), data_only=True))


FOREIGN = {
    "nothing": b"",
    "text": b"GET / HTTP/1.1",
    "a pickle": bytes(frame.to_bytes((TAG, "read", (EndsProcess(),)))),
    "a pickle under the number of data": bytes(frame.to_bytes(EndsProcess())).replace(
        b"\x03\0\0\0", b"\x03\0\1\0", 1
    ),
    "an unknown verb": written(TAG, "__init__", []),
    "a verb that is no text": written(TAG, 3, []),
    "a tag beyond": written(REPLY_TAGS[-1] + 1, "count", []),
    "a tag that is no number": written("16", "count", []),
    "too few arguments": written(TAG, "set", ["a"]),
    "too many": written(TAG, "count", [1]),
    "a value that is no bytes": written(TAG, "set", ["a", "text"]),
    "a key that is no text": written(TAG, "set", [b"a", b"b"]),
    "an amount past 64 bits": written(TAG, "add", ["a", 1 << 63]),
    "a true amount": written(TAG, "add", ["a", True]),
    "keys that are none": written(TAG, "wait", [[1], 1.0]),
    "an endless wait": written(TAG, "wait", [["a"], float("inf")]),
    "a wait of no number": written(TAG, "wait", [["a"], float("nan")]),
    "no list": written(TAG, "count", []).replace(b"\x93", b"\xc0"),
    "no three": written(TAG, "count"),
    "a length of 2**40": struct.pack("<4sHHQQ", b"MPIF", 3, 1, 0, 1 << 40),
    "2**20 buffers": struct.pack("<4sHHQQ", b"MPIF", 3, 1, 1 << 20, 0),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_an_invalid_request_is_refused(name):
    with pytest.raises(FrameError):
        key_value_table.request_of(FOREIGN[name])


@pytest.mark.parametrize(
    "data", [b"", written(1), written(1, 2), bytes(frame.to_bytes([EndsProcess(), None]))]
)
def test_an_invalid_reply_is_refused(data):
    with pytest.raises(FrameError):
        key_value_table.answer_of(data)


@pytest.mark.mpi(min_size=2)
def test_the_server_drops_invalid_requests_and_continues(group, store, logged):
    server = rendezvous.shared_store()
    if group.rank == 1:
        for data in FOREIGN.values():
            server._mpi.Send((data, len(data), MPI.BYTE), 0, rendezvous.REQUEST_TAG)
        store.set("still", "there")
    agree(group, store.get("still") == b"there")
    warnings = [text for text in logged if "is no request" in text]
    agree(
        group,
        group.rank != 0
        or (len(warnings) == len(FOREIGN) and all("of rank 1, " in text for text in warnings)),
        str(warnings),
    )


@pytest.mark.mpi(min_size=2)
def test_a_reply_that_a_client_does_not_receive_delays_no_rank(group, store):
    server = rendezvous.shared_store()
    if group.rank == 1:
        store.set("large", b"x" * (8 << 20))
        data = key_value_table.request(TAG, "compare_set", ("untaken", b"", b"y" * (8 << 20)))
        server._mpi.Send((data, len(data), MPI.BYTE), 0, rendezvous.REQUEST_TAG)
    group.barrier()
    store.set(f"rank{group.rank}", "here")
    agree(group, all(store.get(f"rank{rank}") == b"here" for rank in range(group.size)))
    if group.rank == 1:  # received in the end, so that the job can end
        status = MPI.Status()
        while (message := server._mpi.Improbe(0, TAG, status)) is None:
            time.sleep(1e-3)
        message.Recv((bytearray(status.Get_count(MPI.BYTE)), status.Get_count(MPI.BYTE), MPI.BYTE))
        server.delete_key("untaken")


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
