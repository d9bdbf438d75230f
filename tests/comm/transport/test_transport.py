"""Transport: messages of a pair keep their order, with parts of any number and size, all to all."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

from mpidist.comm.memory import buffer
from mpidist.comm.messages import device_p2p
from mpidist.comm.transport import incoming, loopback
from mpidist.comm.transport.eager_message import EAGER_BYTES, HEADER_BYTES
from mpidist.comm.transport.transport import Transport
from tests.comm.lazy_device import LazyDevice
from tests.tools.support import agree

pytestmark = pytest.mark.mpi(min_size=1)


def receive(transport, count, limit_s=30):
    """Return ``count`` messages in the order of their first return, all complete."""
    seen, deadline = [], time.monotonic() + limit_s
    while (
        len(seen) < count or not all(one.is_complete for one in seen)
    ) and time.monotonic() < deadline:
        one = transport.poll()
        if one is not None and one.is_new:
            one.is_new = False
            seen.append(one)
    assert len(seen) == count and all(one.is_complete for one in seen)
    return seen


def header_of(one):
    return bytes(one.data[one.start : one.end])


def headers(seen, source):
    return [header_of(one) for one in seen if one.source == source]


@pytest.fixture
def transport(group):
    made = Transport(group)
    made.open_receives()
    yield made
    group.barrier()
    made.close(1)


def test_messages_and_parts_all_to_all_at_once(group, transport):
    sizes = [0, 1, 4095, 16 << 10, (16 << 10) + 1, 70_000, 3_000_000]
    for turn in range(4):
        for to in range(group.size):
            transport.send(to, 1, header=b"small %d" % turn)
            parts = [
                torch.full((size,), (turn + group.rank) % 256, dtype=torch.uint8) for size in sizes
            ]
            transport.send(to, 1, header=b"large %d" % turn, parts=parts)
            transport.send(to, 1, header=b"%d" % turn, parts=[bytes([group.rank]) * 10])
    seen = receive(transport, 12 * group.size)
    for source in range(group.size):
        expected = [
            words
            for turn in range(4)
            for words in (b"small %d" % turn, b"large %d" % turn, b"%d" % turn)
        ]
        assert headers(seen, source) == expected
    for one in seen:
        if len(one.parts) == len(sizes):
            turn = int(header_of(one).split()[-1])
            assert [len(part) for part in one.parts] == sizes
            assert all(
                (np.frombuffer(part, np.uint8) == (turn + one.source) % 256).all()
                for part in one.parts
            )
        elif one.parts:
            assert bytes(one.parts[0]) == bytes([one.source]) * 10


@pytest.mark.mpi(min_size=2)
def test_a_stream_of_small_messages_delays_no_payload(group, transport):
    """Polls that always find another small message also complete the large ones of all ranks."""
    if group.rank == 0:
        places = []
        while len(places) < group.size - 1:
            # So many tests that each of these polls returns a message.
            one = transport.poll(tests=1 << 40)
            if one.is_new:
                one.is_new = False
            elif one.is_complete and one.parts:
                assert all(len(part) == 1_000_000 for part in one.parts)
                places.append(one.source)
        assert sorted(places) == list(range(1, group.size))
        for to in range(1, group.size):
            transport.send(to, 2)
    else:
        transport.send(0, 1, header=b"large", parts=[bytes(1_000_000)] * 2)
        # Small messages until the large one is reported as complete; with a pause, so that the
        # receiver's queue stays short.
        deadline = time.monotonic() + 20
        while (one := transport.poll()) is None:
            transport.send(0, 3, header=b"small")
            time.sleep(1e-3)
            assert time.monotonic() < deadline, (
                "the payloads were not received beside the small messages"
            )
        assert one.kind == 2


@pytest.mark.mpi(min_size=2)
def test_incomplete_messages_are_tested_in_turn(group, transport, monkeypatch):
    """Every incomplete message is tested, for any number of them, while other messages arrive."""
    if group.rank == 0:
        for waiting in (2, 3, 4):
            looked = []
            transport._incomplete = [None] * waiting
            monkeypatch.setattr(transport, "_finish", looked.append)
            for _ in range(3 * waiting):
                transport.poll(tests=1 << 40)
            assert set(looked) == set(range(waiting))
        transport._incomplete = []
    elif group.rank == 1:
        for _ in range(3 * (2 + 3 + 4)):
            transport.send(0, 1)


def test_kind_sequence_context_and_flags_arrive_unchanged(group, transport):
    to = (group.rank + 1) % group.size
    transport.send(to, 255, 2**64 - 1, 2**63 + 1, 254, b"x")
    transport.send(to, 7, 3, 2**64 - 1, 1, b"y", [b"part"])
    for one, numbers in zip(
        receive(transport, 2), ((255, 2**64 - 1, 2**63 + 1, 254), (7, 3, 2**64 - 1, 1)), strict=True
    ):
        assert (one.kind, one.sequence, one.context, one.flags) == numbers
    group.barrier()


@pytest.mark.parametrize(
    ("count", "nbytes"),
    [(5000, 8), (40_000, 1), *((count, 17_000) for count in (511, 512, 513, 600, 5000))],
)
def test_any_number_of_parts_arrives(group, transport, count, nbytes):
    """More parts than an eager message can describe, and more large ones than ``MAX_PAYLOADS``."""
    data = bytes(range(250)) * (nbytes // 250 + 1)
    parts = [data[: nbytes - place % 2] for place in range(count)]
    transport.send((group.rank + 1) % group.size, 1, header=b"many", parts=parts)
    (one,) = receive(transport, 1)
    assert len(one.parts) == count and all(
        bytes(part) == sent for part, sent in zip(one.parts, parts, strict=True)
    )
    group.barrier()


def test_messages_with_many_payloads_are_not_mixed(group, transport):
    """Threads send at the same time, and each message has several eager messages."""
    to, n_threads, n_each = (group.rank + 1) % group.size, 3, 4

    def send(number):
        for turn in range(n_each):
            name = b"%d" % number
            transport.send(to, 1, turn, header=name, parts=[name * 20_000] * (600 + 500 * number))
            transport.send(to, 2, turn, header=name)
            transport.send(to, 3, turn, header=name, parts=[name])

    threads = [threading.Thread(target=send, args=(number,)) for number in range(n_threads)]
    for thread in threads:
        thread.start()
    seen = receive(transport, 3 * n_threads * n_each)
    for thread in threads:
        thread.join()
    for number in range(n_threads):
        name = b"%d" % number
        own = [one for one in seen if header_of(one) == name]
        expected = [(kind, turn) for turn in range(n_each) for kind in (1, 2, 3)]
        agree(group, [(one.kind, one.sequence) for one in own] == expected, "the order")
        lengths = {1: (600 + 500 * number, 20_000), 2: (0, 0), 3: (1, 1)}
        wrong = [
            (one.kind, len(one.parts), str(one.damage))
            for one in own
            if len(one.parts) != lengths[one.kind][0]
            or any(bytes(part) != name * lengths[one.kind][1] for part in one.parts)
        ]
        agree(group, not wrong, f"{wrong}")
    group.barrier()


def test_parts_beyond_what_mpi_counts_travel_in_pieces(group, transport, monkeypatch):
    monkeypatch.setattr(buffer, "MAX_COUNT", 1000)
    data = torch.arange(10_000, dtype=torch.int16).view(torch.uint8)
    transport.send((group.rank + 1) % group.size, 1, parts=[data])
    (one,) = receive(transport, 1)
    assert bytes(one.parts[0]) == data.numpy().tobytes()
    group.barrier()


def test_the_longest_header_travels_and_a_longer_one_is_refused(group, transport):
    for limit, parts in ((EAGER_BYTES - 32, ()), (HEADER_BYTES, (b"part", bytes(30_000)))):
        text = (bytes(range(256)) * 128)[:limit]
        transport.send((group.rank + 1) % group.size, 1, header=text, parts=parts)
        (one,) = receive(transport, 1)
        assert header_of(one) == text and [bytes(part) for part in one.parts] == list(parts)
        with pytest.raises(ValueError, match="at most"):
            transport.send(0, 1, header=bytes(limit + 1), parts=parts)
    group.barrier()


def test_messages_of_another_generation_are_dropped_with_their_parts(group, transport):
    to = (group.rank + 1) % group.size
    transport.send(to, 1, header=b"early", parts=[bytes(100_000), b"small"])
    transport.send(to, 1, header=b"early")
    transport.generation += 1
    transport.send(to, 1, header=b"now", parts=[bytes(200_000)])
    (one,) = receive(transport, 1) if group.size > 1 else receive(transport, 3)[2:]
    assert header_of(one) == b"now" and len(one.parts[0]) == 200_000
    group.barrier()


def test_a_sent_tensor_can_still_be_resized(group, transport):
    for numel in (10, 100_000):
        data = torch.ones(numel, dtype=torch.uint8)
        transport.send(group.rank, 1, parts=[data])
        transport.send((group.rank + 1) % group.size, 1, parts=[data])
        receive(transport, 2)
        group.barrier()
        data.resize_(2 * numel)


@pytest.mark.parametrize("aware", ["0", "1"])
def test_a_part_for_a_device_waits_for_no_work_of_users(monkeypatch, group, transport, aware):
    """The polling thread has a user's stream, whose work must not delay other calls."""
    monkeypatch.setenv("MPIDIST_CUDA_AWARE", aware)
    device = LazyDevice(None)
    monkeypatch.setattr(device_p2p, "device_at", lambda where: device)
    monkeypatch.setattr(buffer, "is_direct", lambda tensor: False)
    used = []
    monkeypatch.setattr(incoming, "used_here", used.append)
    if group.size > 1:
        data = torch.arange(3000, dtype=torch.int16).view(torch.uint8)
        monkeypatch.setattr(device_p2p, "device_of", lambda tensors: None)
        transport.send((group.rank + 1) % group.size, 1, parts=[data.numpy()], devices=[0])
        slow = []
        device.current().do(lambda: slow.append("users' kernel"))
        (arrival,) = receive(transport, 1)
        agree(group, not slow, "the receiving thread waited for the user's stream")
        arrival.to_devices()
        device.current().record().synchronize()
        agree(group, arrival.parts[0].tolist() == data.tolist(), "the part")
        agree(group, not device.strays, "work is queued while another device is current")
        agree(
            group,
            [id(part) for part in used] == [id(part) for part in arrival.parts],
            "its memory is let go too early",
        )
    group.barrier()


@pytest.mark.parametrize("count", [511, 512, 513, 600, 5000])
def test_any_number_of_parts_for_devices_travels(monkeypatch, group, transport, count):
    device = LazyDevice(None)
    monkeypatch.setattr(device_p2p, "device_at", lambda where: device)
    monkeypatch.setattr(device_p2p, "device_of", lambda tensors: None)
    monkeypatch.setattr(buffer, "is_direct", lambda tensor: False)
    sizes = [0, 1, 5, 129, 3000, 20_000]
    parts = [
        torch.full((sizes[place % 6],), place % 251, dtype=torch.int16) for place in range(count)
    ]
    devices = [None if place % 7 == 3 else place % 2 for place in range(count)]
    if group.size > 1:
        to = (group.rank + 1) % group.size
        transport.send(to, 1, header=b"many", parts=parts, devices=devices)
        transport.send(to, 2, header=b"next", parts=[bytes(100_000)])
        many, following = receive(transport, 2)
        many.to_devices()
        device.current().record().synchronize()
        agree(group, many.damage is None and following.damage is None, str(many.damage))
        agree(
            group,
            [bytes(np.asarray(part)) for part in many.parts]
            == [part.numpy().tobytes() for part in parts],
            "the parts",
        )
        agree(group, [len(part) for part in following.parts] == [100_000], "the next message")
        memory = {
            part.untyped_storage().data_ptr()
            for part in many.parts
            if isinstance(part, torch.Tensor) and part.nbytes
        }
        alone = sum(
            1 for part, to in zip(parts, devices, strict=True) if part.nbytes and to is not None
        )
        agree(group, len(memory) == alone, "parts share memory, and one keeps all others alive")
    group.barrier()


def test_a_part_to_oneself_comes_behind_the_stream_that_copies_it(monkeypatch, group, transport):
    device = LazyDevice(None)
    monkeypatch.setattr(loopback, "device_at", lambda where: device)
    copied = []

    def to(tensor, where, copy):
        device.current().do(lambda: copied.append(True))
        return tensor.clone()

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(torch.Tensor, "to", to)
        transport.send(group.rank, 1, parts=[torch.ones(4, dtype=torch.uint8)], devices=[0])
    arrival = transport.poll()
    device.leave_default_stream()  # another thread's stream
    arrival.to_devices()
    assert not copied
    device.current().record().synchronize()
    assert copied
