"""Object collectives and messages: small and large objects, data and pickles, refusals."""

import threading

import numpy as np
import pytest
import torch

from mpidist.comm.memory import buffer
from mpidist.comm.messages import object_messages
from mpidist.comm.mpi.library import MPI
from mpidist.comm.mpi.tags import Tag
from mpidist.comm.serialization import frame
from mpidist.errors import CommTimeout, FrameError, MpidistError, NotPlainData
from tests.tools.support import agree, raises_on_all

pytestmark = pytest.mark.mpi


def something(rank, large=False):
    n = 50_000 if large else 3
    return {
        "rank": rank,
        "tensor": torch.full((n,), float(rank)),
        "array": np.arange(n) + rank,
        "text": "ä" * rank,
        "none": None,
    }


def is_something(obj, rank, large=False):
    want = something(rank, large)
    return (
        obj["rank"] == rank
        and torch.equal(obj["tensor"], want["tensor"])
        and np.array_equal(obj["array"], want["array"])
        and obj["text"] == want["text"]
        and obj["none"] is None
    )


@pytest.mark.parametrize("large", [False, True])
def test_objects_arrive_whole_from_and_at_every_root(group, large):
    W, rank = group.size, group.rank
    mine = something(rank, large)
    wrong = []
    for root in range(W):
        if not is_something(group.broadcast_object(mine, root), root, large):
            wrong.append(f"broadcast from {root}")
        got = group.gather_object(mine, root)
        if (rank == root and not all(is_something(got[r], r, large) for r in range(W))) or (
            rank != root and got is not None
        ):
            wrong.append(f"gather to {root}")
        parts = [something(r + 10, large) for r in range(W)] if rank == root else None
        if not is_something(group.scatter_object(parts, root), rank + 10, large):
            wrong.append(f"scatter from {root}")
    if not all(is_something(obj, r, large) for r, obj in enumerate(group.all_gather_object(mine))):
        wrong.append("all_gather")
    listed = [mine, 1] if rank == 0 else [None, None]
    group.broadcast_object_list(listed, 0)
    if not (is_something(listed[0], 0, large) and listed[1] == 1):
        wrong.append("broadcast list")
    agree(group, not wrong, str(wrong))


def test_objects_past_the_limit_of_mpi(group, monkeypatch):
    monkeypatch.setattr(buffer, "MAX_COUNT", 1000)
    monkeypatch.setattr(object_messages, "SMALL_BYTES", 500)
    got = group.all_gather_object(something(group.rank, True))
    ok = all(is_something(obj, r, True) for r, obj in enumerate(got))
    ok &= is_something(
        group.broadcast_object(something(group.rank, True), group.size - 1), group.size - 1, True
    )
    gathered = group.gather_object(something(group.rank, True), 0)
    ok &= group.rank != 0 or all(is_something(obj, r, True) for r, obj in enumerate(gathered))
    agree(group, ok)


@pytest.mark.mpi(min_size=2)
def test_object_messages_arrive_from_a_named_and_from_any_source(group):
    ok = True
    if group.rank == 0:
        for peer in range(1, group.size):
            group.send_object(something(peer, large=peer % 2 == 0), peer)
        seen = [group.recv_object() for _ in range(1, group.size)]
        ok = sorted(source for _, source in seen) == list(range(1, group.size)) and all(
            obj == s * 2 for obj, s in seen
        )
    else:
        obj, source = group.recv_object(0)
        ok = source == 0 and is_something(obj, group.rank, large=group.rank % 2 == 0)
        group.send_object(group.rank * 2, 0)
    agree(group, ok)


def test_a_gathered_object_shares_no_memory_with_the_argument(group):
    mine = torch.zeros(3)
    got = group.gather_object(mine, 0)
    if group.rank == 0:
        got[0] += 1
    agree(group, bool((mine == 0).all()))


def test_an_object_that_cannot_be_pickled_raises_on_all_ranks(group):
    raises_on_all(group, Exception, lambda: group.all_gather_object(lambda: None), "pickle")


def test_a_list_of_another_length_than_the_group_is_refused(group):
    if group.rank == 0:
        with pytest.raises(ValueError, match=f"hold {group.size} objects"):
            group.scatter_object([1] * (group.size + 1), 0)
    group.barrier()


def test_a_receive_without_a_message_times_out(group):
    group.timeout_s = 0.1
    with pytest.raises(CommTimeout):
        group.recv_object()
    group.timeout_s = None
    group.barrier()


@pytest.mark.parametrize(
    "call",
    [
        lambda g: g.broadcast_object(lambda: 0 if g.rank == 0 else None),
        lambda g: g.scatter_object([1] * (g.size + 1) if g.rank == 0 else None),
        lambda g: g.scatter_object([lambda: 0] * g.size if g.rank == 0 else None),
        lambda g: g.all_gather_object((lambda: 0) if g.rank == 0 else 1),
    ],
    ids=["broadcast", "scatter of a short list", "scatter", "all_gather"],
)
def test_an_object_that_one_rank_cannot_send_raises_on_all(group, call):
    raises_on_all(group, Exception, lambda: call(group))
    # The group continues.
    agree(group, group.all_gather_object(group.rank) == list(range(group.size)))


@pytest.mark.mpi(min_size=2)
def test_threads_that_send_and_receive_objects_at_once_do_not_mix_parts(group):
    """Several threads of one rank send objects of several parts to threads of one rank."""
    threads, each = 4, 12
    wrong = []

    def send(number):
        for turn in range(each):
            value = float(number * 100 + turn)
            group.send_object((value, [torch.full((n,), value) for n in (30_000, 7, 20_000)]), 0)

    def receive():
        for _ in range(each):
            (value, tensors), _ = group.recv_object(None if group.size == 2 else 1)
            if [t.numel() for t in tensors] != [30_000, 7, 20_000] or not all(
                bool((t == value).all()) for t in tensors
            ):
                wrong.append(value)

    work = {0: receive, 1: send}.get(group.rank)
    if work is not None:
        args = [()] * threads if work is receive else [(number,) for number in range(threads)]
        running = [threading.Thread(target=work, args=a, daemon=True) for a in args]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join(60)
        if any(thread.is_alive() for thread in running):
            wrong.append("a thread hangs")
    agree(group, not wrong, str(wrong[:5]))


def test_objects_with_tensors_of_one_element_and_any_stride(group):
    x = torch.arange(16.0).view(4, 4)
    odd = {"strided": x[1:2, 2:3].t(), "sliced": torch.arange(4.0)[::4], "column": x[3:, 1]}
    for got in group.all_gather_object(odd):
        same = all(torch.equal(got[name], odd[name]) for name in odd)
        agree(group, same)


@pytest.mark.mpi(min_size=2)
def test_a_sender_that_stops_between_two_parts_is_a_timeout(group):
    """The group's timeout holds for the parts after the first, too."""
    parts = list(object_messages.parts(frame.encode(torch.zeros(100_000)), Tag.OBJECT_MESSAGE))

    def send(part, number):
        group._state.mpi.Send(
            (part, memoryview(part).nbytes, MPI.BYTE), 0, group._comm.own_tag(number)
        )

    if group.rank == 1:
        send(*parts[0])
    group.barrier()
    if group.rank == 0:
        group.timeout_s = 0.2
        with pytest.raises(CommTimeout, match=r"recv_object did not end within 0\.2 s"):
            group.recv_object(1)
        group.timeout_s = None
    group.barrier()
    # Nothing has been received: the next call goes on with the object.
    ok = True
    if group.rank == 1:
        for part in parts[1:]:
            send(*part)
        group.send_object("next", 0)
    elif group.rank == 0:
        ok = torch.equal(group.recv_object(1)[0], torch.zeros(100_000))
        ok &= group.recv_object(1)[0] == "next"
    agree(group, ok)


# --- data only ---


class Own:
    """A class of the user, which is not plain data."""


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("by", ["keyword", "variable"])
def test_objects_arrive_whole_without_a_pickle(group, monkeypatch, large, by):
    options = {"data_only": True} if by == "keyword" else {}
    if by == "variable":
        monkeypatch.setenv("MPIDIST_TRUST", "data")
    # No rank may unpickle.
    monkeypatch.setattr(frame.tensor_pickle, "loads", None)
    W, rank = group.size, group.rank
    mine, last = something(rank, large), group.size - 1
    ok = is_something(group.broadcast_object(mine, last, **options), last, large)
    got = group.gather_object(mine, last, **options)
    ok &= rank != last or all(is_something(obj, r, large) for r, obj in enumerate(got))
    ok &= is_something(
        group.scatter_object(
            [something(r, large) for r in range(W)] if rank == last else None, last, **options
        ),
        rank,
        large,
    )
    ok &= all(
        is_something(obj, r, large)
        for r, obj in enumerate(group.all_gather_object(mine, **options))
    )
    listed = [mine, (rank,)]
    group.broadcast_object_list(listed, last, **options)
    ok &= is_something(listed[0], last, large) and listed[1] == (last,)
    group.send_object(mine, (rank + 1) % W, **options) if W > 1 and rank == 0 else None
    if W > 1 and rank == 1:
        ok &= is_something(group.recv_object(0, **options)[0], 0, large)
    monkeypatch.undo()
    agree(group, ok)


@pytest.mark.parametrize(
    "call",
    [
        lambda g: g.broadcast_object({"x": [1, Own()]}, data_only=True),
        lambda g: g.scatter_object(
            [{"x": [1, Own()]}] * g.size if g.rank == 0 else None, data_only=True
        ),
        lambda g: g.all_gather_object({"x": [1, Own()]} if g.rank == 0 else 1, data_only=True),
    ],
    ids=["broadcast", "scatter", "all_gather"],
)
def test_an_object_that_is_not_data_raises_on_all_with_its_place(group, call):
    text = raises_on_all(
        group,
        MpidistError,
        lambda: call(group),
        "['x'][1]: a tests.comm.test_objects.Own is no plain data",
    )
    agree(group, (group.rank != 0) == ("could not send its object" in text))
    # The group continues.
    agree(group, group.all_gather_object(group.rank) == list(range(group.size)))


@pytest.mark.mpi(min_size=2)
def test_a_gathered_object_that_is_not_data_raises_on_the_root(group):
    try:
        group.gather_object(Own() if group.rank == 1 else 1, 0, data_only=True)
        text = ""
    except MpidistError as error:
        text = str(error)
    words = {0: "could not send its object", 1: "Own is no plain data"}.get(group.rank)
    agree(group, words in text if words else not text, text)


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_asks_for_data_refuses_the_others_pickles(group):
    """No rank waits, because the messages are exchanged before one of them is refused."""
    last = group.size - 1
    is_last = group.rank == last
    calls = [
        lambda: group.all_gather_object({1}, data_only=is_last),
        lambda: group.broadcast_object({1}, 0, data_only=is_last),
        lambda: group.gather_object({1}, last, data_only=is_last),
        lambda: group.scatter_object(
            [{1}] * group.size if group.rank == 0 else None, 0, data_only=is_last
        ),
        lambda: (
            group.send_object({1}, last, data_only=False)
            if group.rank == 0
            else is_last and group.recv_object(0, data_only=True)
        ),
    ]
    for call in calls:
        try:
            call()
            text = ""
        except FrameError as error:
            text = str(error)
        agree(
            group,
            ("a pickle came" in text and f"rank {last} of {group.size}" in text) == is_last,
            text,
        )


@pytest.mark.mpi(min_size=2)
def test_an_object_that_cannot_be_sent_as_data_is_not_sent(group):
    if group.rank == 0:
        with pytest.raises(NotPlainData, match=r"\['x'\]\[1\]"):
            group.send_object({"x": [1, Own()]}, 1, data_only=True)
        group.send_object("next", 1, data_only=True)
    elif group.rank == 1:
        assert group.recv_object(0, data_only=True) == ("next", 0)
    group.barrier()


def test_an_unreadable_setting_is_an_error_before_anything_is_sent(group, monkeypatch):
    monkeypatch.setenv("MPIDIST_TRUST", "yes")
    calls = {
        "broadcast": lambda: group.broadcast_object(1),
        "gather": lambda: group.gather_object(1),
        "scatter": lambda: group.scatter_object([1] * group.size),
        "all_gather": lambda: group.all_gather_object(1),
        "send": lambda: group.send_object(1, 0),
        "recv": lambda: group.recv_object(0),
    }
    refused = {}
    for name, call in calls.items():
        try:
            call()
        except ValueError as error:
            refused[name] = "MPIDIST_TRUST must be 'pickle' or 'data'" in str(error)
    monkeypatch.undo()
    agree(group, refused == dict.fromkeys(calls, True), str(refused))


@pytest.mark.mpi(min_size=2)
def test_a_group_is_made_while_parts_of_an_object_are_under_way(group):
    """Messages of the creation and parts of an object have different tags."""
    sent = [torch.arange(100_000.0), torch.ones(50_000)]
    sending = threading.Thread(target=group.send_object, args=(sent, 1), daemon=True)
    if group.rank == 0:
        sending.start()
    group.barrier()
    child = group.new_group(range(group.size))
    got = group.recv_object(0)[0] if group.rank == 1 else sent
    if group.rank == 0:
        sending.join(60)
    total = torch.ones(1)
    child.all_reduce(total)
    child.close()
    same = all(torch.equal(a, b) for a, b in zip(got, sent, strict=True))
    agree(group, same and total.item() == group.size and not sending.is_alive(), f"{got}")


def fails():
    raise ValueError("not here")


class Unreadable:
    """An object that its receiver cannot unpickle."""

    def __reduce__(self):
        return fails, ()


@pytest.mark.mpi(min_size=2)
def test_an_object_that_cannot_be_unpickled_is_received_once(group):
    if group.rank == 0:
        group.send_object(Unreadable(), 1)
        group.send_object("second", 1)
    elif group.rank == 1:
        with pytest.raises(ValueError, match="not here"):
            group.recv_object(0)
        assert group.recv_object(0) == ("second", 0)


def test_objects_that_calls_have_given_back_keep_their_order(group):
    receiver = object_messages.ObjectReceiver(group._state)
    tag = group._state.comm.own_tag(Tag.OBJECT_MESSAGE_PART)
    first = bytearray(b"".join(frame.encode("one", True)[0:1]))
    made = [
        object_messages.Incoming(group._state.mpi, first, 0, tag, None, number)
        for number in range(3)
    ]
    for given in (made[2], made[0], made[1]):
        receiver.leave(given, CommTimeout("late"))
    assert receiver._objects == made
