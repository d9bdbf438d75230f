"""Long messages of staged device memory in pieces, on the lazy device, and on a GPU (``gpu``)."""

import itertools
import os
import warnings
from types import SimpleNamespace

import pytest
import torch

from mpidist.comm.algorithms import host_copies, staging
from mpidist.comm.memory import buffer
from mpidist.comm.memory.fence import StreamFence
from mpidist.comm.memory.stream import HostDevice, HostEvent
from mpidist.comm.messages import device_p2p, message_pieces
from mpidist.comm.messages.direct_messages import DirectMessages
from mpidist.comm.messages.message_pieces import HEAD_BYTES, Head, PieceTransfers
from mpidist.comm.messages.p2p import P2POp
from mpidist.comm.mpi import communicator
from mpidist.comm.mpi.tags import PIECE_TAGS, Tag
from mpidist.errors import GroupError, MpidistError
from tests.comm.lazy_device import LazyDevice
from tests.tools.support import agree

pytestmark = pytest.mark.mpi(min_size=2)

SLOW_CYCLES = 4_000_000  # about 2 ms
PINNED_BYTES, CHUNK_BYTES = 1500, 192


class Lazy:
    """Tensors of the lazy device; memory that it has not made is the host's."""

    def __init__(self, monkeypatch, seed):
        self.device = LazyDevice(seed)
        self.on_device = []  # memory
        is_direct = buffer.is_direct
        monkeypatch.setattr(device_p2p, "device_of", lambda tensors: self._of(*tensors))
        monkeypatch.setattr(
            buffer, "is_direct", lambda tensor: self._of(tensor) is None and is_direct(tensor)
        )
        take = DirectMessages.take
        monkeypatch.setattr(
            DirectMessages,
            "take",
            lambda direct, tensor, *args: self._of(tensor) is None and take(direct, tensor, *args),
        )

    def _of(self, tensor):
        addresses = (memory.untyped_storage().data_ptr() for memory in self.on_device)
        return self.device if tensor.untyped_storage().data_ptr() in addresses else None

    def blank(self, like):
        tensor = torch.full_like(like, 55)
        self.on_device.append(tensor)
        return tensor

    def produce(self, value):
        tensor = self.blank(value)
        self.device.current().do(lambda: tensor.copy_(value))
        return tensor

    def consume(self, tensor):
        seen = []
        self.device.current().do(lambda: seen.append(tensor.clone()))
        self.device.current().record().synchronize()
        return seen[0]


class Cuda:
    """Tensors on the GPU, with a slow kernel before each value."""

    def blank(self, like):
        return torch.full_like(like, 55, device="cuda")

    def produce(self, value):
        tensor, held = self.blank(value), value.cuda()
        torch.cuda._sleep(SLOW_CYCLES)
        return tensor.copy_(held)

    def consume(self, tensor):
        return tensor.cpu()


@pytest.fixture(
    params=[
        *(("lazy", seed) for seed in (None, 1, 2, 3)),
        pytest.param(("cuda", None), marks=pytest.mark.gpu),
    ],
    ids=lambda p: f"{p[0]}-seed {p[1]}",
)
def place(request, monkeypatch):
    """A device whose messages are staged, and in pieces from some numbers on."""
    kind, seed = request.param
    monkeypatch.setenv("MPIDIST_CUDA_AWARE", "0")
    monkeypatch.setattr(host_copies, "PINNED_BYTES", PINNED_BYTES)
    monkeypatch.setattr(staging, "CHUNK_BYTES", CHUNK_BYTES)
    made = Lazy(monkeypatch, seed) if kind == "lazy" else Cuda()
    yield made
    assert kind == "cuda" or made.device.strays == []


@pytest.fixture
def heads(monkeypatch):
    """Return the heads that this rank sends."""
    sent, to_bytes = [], Head.to_bytes
    monkeypatch.setattr(Head, "to_bytes", lambda head: (sent.append(head), to_bytes(head))[1])
    return sent


def around(group):
    return (group.rank + 1) % group.size, (group.rank - 1) % group.size


def values(rank, numel=5001, dtype=torch.float32):
    return (torch.arange(numel) % 113 + rank).to(dtype)


def test_messages_around_the_ring(place, group, heads):
    right, left = around(group)
    for dtype, numel in itertools.product((torch.float32, torch.bool, torch.complex64), (3, 5001)):
        target = place.blank(values(0, numel, dtype))
        receive = group.irecv(target, left)
        send = group.isend(place.produce(values(group.rank, numel, dtype)), right)
        # The send first: the receive goes on meanwhile.
        send.wait()
        receive.wait()
        agree(group, torch.equal(place.consume(target), values(left, numel, dtype)), str(dtype))
    whole = [head.nbytes for head in heads]
    agree(group, whole == [5001 * 4, 5001, 5001 * 8], str(whole))


def test_strided_tensors_and_batches(place, group, heads):
    right, left = around(group)
    base = values(group.rank, 6000).view(60, 100)
    for to_strided in (False, True):
        target = place.blank(base)
        into = target.t() if to_strided else target.view(100, 60)
        sent = place.produce(base).t()
        for work in group.batch_isend_irecv(
            [P2POp("isend", sent, right), P2POp("irecv", into, left)]
        ):
            work.wait()
        wanted = values(left, 6000).view(60, 100).t()
        got = place.consume(target)
        got = got.t() if to_strided else got.view(100, 60)
        agree(group, torch.equal(got, wanted), f"into strided memory: {to_strided}")
    agree(group, len(heads) == 2, str(heads))


def test_each_kind_of_memory_receives_from_each(place, group, heads, monkeypatch):
    """Staged memory, memory that MPI takes by its address, and the host's."""
    right, left = around(group)
    kinds = ("staged", "by address", "host")

    def memory(kind, make, value):
        os.environ["MPIDIST_CUDA_AWARE"] = str(int(kind == "by address"))  # of this rank
        return value.clone() if kind == "host" else make(value)

    for sender, receiver in itertools.product(kinds, kinds):
        if isinstance(place, Cuda) and "by address" in (sender, receiver):
            continue  # the MPI may not take addresses
        heads.clear()
        target = memory(receiver, place.blank, values(55))
        receive = group.irecv(target, left)
        send = group.isend(memory(sender, place.produce, values(group.rank)), right)
        receive.wait()
        send.wait()
        got = target if receiver == "host" else place.consume(target)
        agree(group, torch.equal(got, values(left)), f"{sender} to {receiver}: {got}")
        agree(group, len(heads) == (sender == "staged"), f"{sender}: {heads}")


def test_unequal_sizes_are_an_error_that_names_both(place, group):
    """Of long and of short receives, of one as long as a head; what follows arrives."""
    right, left = around(group)
    numel = 5000
    for expected in (numel - 1, numel + 1, numel * 3, 3, 0, HEAD_BYTES):
        like = torch.zeros(expected, dtype=torch.uint8)
        for is_host in (False, True):
            target = torch.full_like(like, 55) if is_host else place.blank(like)
            send = group.isend(place.produce(values(group.rank, numel, torch.uint8)), right)
            with pytest.raises(
                MpidistError, match=rf"expected {expected} bytes .* rank {left} sent {numel}"
            ):
                group.recv(target, left)
            send.wait()
            got = target if is_host else place.consume(target)
            agree(group, bool((got == 55).all()), f"{expected} bytes have changed")
    target = place.blank(values(0))
    send = group.isend(place.produce(values(group.rank)), right)
    assert group.recv(target, left) == left
    send.wait()
    agree(group, torch.equal(place.consume(target), values(left)))


def test_host_memory_of_another_length_is_an_error_for_a_staged_receive(place, group):
    right, left = around(group)
    for expected in (4999, 5001):
        send = group.isend(values(group.rank, 5000, torch.uint8), right)
        with pytest.raises(
            MpidistError, match=rf"expected {expected} bytes .* rank {left} sent 5000"
        ):
            group.recv(place.blank(torch.zeros(expected, dtype=torch.uint8)), left)
        send.wait()
    group.barrier()


def test_data_of_a_heads_length_arrives(place, group, monkeypatch):
    right, left = around(group)
    for aware in "01" if isinstance(place, Lazy) else "0":
        monkeypatch.setenv("MPIDIST_CUDA_AWARE", aware)
        for is_host in (False, True):
            mine = values(group.rank, HEAD_BYTES, torch.uint8)
            target = torch.zeros_like(mine) if is_host else place.blank(mine)
            receive = group.irecv(target, left)
            group.isend(mine.clone() if is_host else place.produce(mine), right).wait()
            receive.wait()
            got = target if is_host else place.consume(target)
            agree(group, torch.equal(got, values(left, HEAD_BYTES, torch.uint8)), str(got))
    # And one that is too short for its receive.
    send = group.isend(values(group.rank, HEAD_BYTES, torch.uint8), right)
    with pytest.raises(MpidistError, match=f"expected 4000 bytes .* sent {HEAD_BYTES}"):
        group.recv(place.blank(torch.zeros(1000)), left)
    send.wait()
    group.barrier()


def test_more_messages_at_once_than_tags_in_any_order(place, group, heads):
    """Of which those beyond the tags are sent whole; received in another order, and from anyone."""
    right, left = around(group)
    count = PIECE_TAGS + 3
    sends = [
        group.isend(place.produce(values(group.rank + 7 * tag, 400)), right, tag)
        for tag in range(count)
    ]
    agree(group, len(heads) == PIECE_TAGS, f"{len(heads)} messages in pieces")
    group.barrier()
    for tag in reversed(range(count)):
        target = place.blank(torch.zeros(400))
        source = group.recv(target, left if tag % 2 else None, tag)
        agree(
            group,
            source == left and torch.equal(place.consume(target), values(left + 7 * tag, 400)),
        )
    for send in sends:
        send.wait()
    # The tags are free again.
    send = group.isend(place.produce(values(group.rank)), right)
    target = place.blank(values(0))
    group.recv(target, left)
    send.wait()
    agree(group, len(heads) == PIECE_TAGS + 1 and torch.equal(place.consume(target), values(left)))
    agree(
        group,
        len(group._messages.pieces._slots) == PIECE_TAGS and group._messages.pieces.is_empty(),
    )


def test_a_message_goes_on_while_nobody_tests_it(place, group):
    """Its handle may be dropped, too."""
    right, left = around(group)
    for is_dropped in (False, True):
        target, sent = place.blank(values(0)), place.produce(values(group.rank))
        send = group.isend(sent, right)
        if is_dropped:
            del send
        if group.rank % 2:
            group.recv(target, left)
        group.barrier()  # the even ranks' messages have arrived, which no thread of theirs tests
        if not group.rank % 2:
            group.recv(target, left)
        if not is_dropped:
            send.wait()
        agree(group, torch.equal(place.consume(target), values(left)), f"dropped: {is_dropped}")
        group.barrier()


def test_messages_past_the_limit_of_mpi(place, group, heads, monkeypatch):
    monkeypatch.setattr(buffer, "MAX_COUNT", 8000)
    right, left = around(group)
    target = place.blank(values(0))
    receive = group.irecv(target, left)
    group.isend(place.produce(values(group.rank)), right).wait()
    receive.wait()
    agree(group, [head.nbytes for head in heads] == [8000, 8000, 4004], str(heads))
    agree(group, torch.equal(place.consume(target), values(left)))


@pytest.mark.parametrize("forgotten", ["for a piece", "for the tensor", "behind the copies"])
def test_a_missing_wait_gives_wrong_numbers(monkeypatch, world, forgotten):
    """A test of the lazy device, and of the three waits."""
    monkeypatch.setenv("MPIDIST_CUDA_AWARE", "0")
    monkeypatch.setattr(host_copies, "PINNED_BYTES", PINNED_BYTES)
    monkeypatch.setattr(staging, "CHUNK_BYTES", CHUNK_BYTES)
    place = Lazy(monkeypatch, None)
    if forgotten == "for a piece":
        load = device_p2p.StagedSource.load
        monkeypatch.setattr(
            device_p2p.StagedSource, "load", lambda *args: (load(*args)[0], HostEvent())
        )
    elif forgotten == "for the tensor":
        monkeypatch.setattr(StreamFence, "wait_ready", lambda fence: None)
    else:
        call = device_p2p.StagedTarget.__call__
        monkeypatch.setattr(device_p2p.StagedTarget, "__call__", lambda target: call(target)[:0])
    group = world.clone("forgetful")
    right, left = around(group)
    target = place.blank(values(0))
    receive = group.irecv(target, left)
    group.isend(place.produce(values(group.rank)), right).wait()
    receive.wait()
    got = place.consume(target)
    group.close()
    agree(world, not torch.equal(got, values(left)), str(got))


def test_later_pieces_are_copied_while_earlier_ones_are_sent(group, monkeypatch):
    """And no more of them are pinned than the window has."""
    monkeypatch.setattr(staging, "CHUNK_BYTES", 100)
    log, sent = [], []

    class Source:
        device = HostDevice()

        def load(self, start, nbytes):
            log.append(f"copy {start}")
            return torch.zeros(nbytes, dtype=torch.uint8), HostEvent()

    class Sent:
        def __init__(self):
            self.has_arrived = False

        def Test(self, status=None):
            return self.has_arrived

    def issend(space, dst, tag):
        log.append(f"send {space[1]}")
        sent.append(Sent())
        return sent[-1]

    head = Sent()
    head.has_arrived = True
    mpi = SimpleNamespace(Isend=lambda *_: head, Issend=issend)
    transfers = PieceTransfers(SimpleNamespace(own_tag=lambda use: 1000 + use), mpi)
    monkeypatch.setattr(message_pieces.receive_poller, "watch", lambda queue: None)
    (send,) = transfers.send(Source(), [(0, 450)], 1, 0)
    first = [*(f"copy {start}" for start in (0, 100, 200)), *["send 100"] * 3]
    assert log == first and not send.Test()
    sent[1].has_arrived = True  # behind one that has not
    assert not send.Test() and log == first
    sent[0].has_arrived = True
    assert transfers.match() and log[6:] == ["copy 300", "copy 400", "send 100", "send 50"]
    for one in sent:
        one.has_arrived = True
    assert send.Test() and send.Test() and transfers.is_empty()
    group.barrier()


def test_an_error_of_mpi_ends_the_message_and_its_tag_is_not_used_again(group, monkeypatch):
    def fails(*args):
        raise OSError("no way")

    monkeypatch.setattr(message_pieces.receive_poller, "watch", lambda queue: None)
    source = SimpleNamespace(
        device=HostDevice(), load=lambda start, nbytes: (torch.zeros(nbytes), HostEvent())
    )
    done = SimpleNamespace(Test=lambda status=None: True)
    mpi = SimpleNamespace(Isend=lambda *_: done, Issend=fails)
    transfers = PieceTransfers(SimpleNamespace(own_tag=lambda use: 1000 + use), mpi)
    (send,) = transfers.send(source, [(0, 450)], 1, 0)
    for _ in range(2):
        with pytest.raises(OSError, match="no way"):
            send.Test()
    assert transfers.is_empty() and len(transfers._slots) == PIECE_TAGS - 1
    group.barrier()


def test_a_message_that_was_never_received_is_named_with_its_whole_length(place, world):
    group = world.clone("leaving")
    right, left = around(group)
    send = group.isend(place.produce(values(group.rank)), right)
    world.barrier()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        group.close()
    texts = [str(one.message) for one in caught if one.category is ResourceWarning]
    wanted = f"rank {left} (tag 0, {5001 * 4} bytes)"
    agree(world, any(wanted in text for text in texts), str(texts))
    # All its pieces were sent before the group was closed, whose communicator may be freed.
    agree(world, send._request.is_over or not send._request._pieces)


def test_a_message_arrives_whole_whose_sender_has_closed_the_group(place, world):
    group = world.clone("closing")
    target = place.blank(values(0))
    if group.rank == 0:
        group.isend(place.produce(values(3)), 1)
        group.close()
    world.barrier()
    if group.rank == 1:
        group.recv(target, 0)
    if group.rank:
        group.close()
    ok = world.rank != 1 or torch.equal(place.consume(target), values(3))
    agree(world, ok, "the message of a closed group")


def test_a_receive_under_way_ends_when_its_group_is_closed(group, monkeypatch):
    monkeypatch.setattr(message_pieces.receive_poller, "watch", lambda queue: None)
    pending = SimpleNamespace(Test=lambda status=None: False)
    message = SimpleNamespace(Irecv=lambda space: pending)
    transfers = PieceTransfers(SimpleNamespace(own_tag=lambda use: 1000 + use), None)
    receive = transfers.receive(SimpleNamespace(nbytes=5000), message, 1)
    assert not receive.Test() and not transfers.is_empty()
    transfers.close()
    with pytest.raises(GroupError, match="was closed while a message arrived"):
        receive.Test()
    assert transfers.is_empty()
    group.barrier()


def test_tags_of_pieces_are_within_the_librarys():
    assert Tag.MESSAGE_PIECE + PIECE_TAGS <= communicator._RESERVED_TAGS
    assert Head.from_bytes(Head(1 << 40, 4 << 20, 31).to_bytes()) == Head(1 << 40, 4 << 20, 31)
    assert Head.from_bytes(bytes(HEAD_BYTES)) is None
