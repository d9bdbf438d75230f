"""Objects whose parts do not arrive, or arrive with another length than announced."""

from __future__ import annotations

import struct
from types import SimpleNamespace

import pytest

from mpidist.comm import objects
from mpidist.comm.memory import buffer
from mpidist.comm.memory.buffer_pool import zeroed
from mpidist.comm.messages import object_messages
from mpidist.comm.mpi.library import MPI
from mpidist.comm.mpi.tags import Tag
from mpidist.comm.serialization import frame
from mpidist.errors import CommTimeout, FrameError
from tests.tools.support import agree

GIB = 1 << 30
MOST_MIB = 256


def header(*lengths):
    """Return a frame's header that announces parts of these lengths."""
    fixed = bytearray(frame.to_bytes(None, data_only=True)[: frame.HEADER_BYTES])
    struct.pack_into("<QQ", fixed, frame.HEADER_BYTES - 16, len(lengths) - 1, lengths[0])
    return bytes(fixed) + struct.pack(f"<{len(lengths) - 1}Q", *lengths[1:])


def resident_mib():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) >> 10 for line in status if line.startswith("VmRSS"))


class Left(Exception):
    """Raised where a rank would wait for a message that is not sent."""


class Silent:
    """MPI whose other rank announces lengths and sends no content."""

    def __init__(self, *words):
        self.words = list(words)

    def Bcast(self, space, root):
        if not self.words:
            raise Left
        memoryview(space[0])[:] = self.words.pop(0)

    def Allgather(self, mine, all_of):
        memoryview(all_of[0]).cast("B")[:] = self.words.pop(0)


def broadcast(mpi):
    objects._broadcast(SimpleNamespace(mpi=mpi, rank=0, size=2), (), (), None, 1)


def all_gather(mpi):
    objects._all_gather(SimpleNamespace(mpi=mpi, rank=1, size=2), (), (), bytearray(3))


def announcing(*lengths):
    head = header(*lengths)
    return Silent(struct.pack("<Q", len(head)), head)


SILENT = {
    "broadcast": lambda: broadcast(announcing(2 * GIB)),
    "broadcast of parts": lambda: broadcast(announcing(8, GIB, GIB)),
    "broadcast of a header": lambda: broadcast(Silent(struct.pack("<Q", 2 * GIB))),
    "all_gather": lambda: all_gather(Silent(struct.pack("<qq", 2 * GIB, 3))),
}


@pytest.mark.parametrize("case", SILENT)
def test_what_is_announced_and_not_sent_takes_no_memory(case):
    before = resident_mib()
    with pytest.raises(Left) as left:
        SILENT[case]()
    assert left.tb is not None  # keeps the frames and their memory
    assert resident_mib() - before < MOST_MIB


@pytest.mark.parametrize(
    "call",
    [
        lambda: broadcast(announcing(1 << 49)),
        lambda: broadcast(Silent(b"\xff" * 8)),
        lambda: all_gather(Silent(struct.pack("<qq", 1 << 62, 3))),
        lambda: all_gather(Silent(struct.pack("<qq", -1, 3))),
        lambda: zeroed(1 << 70),
    ],
)
def test_more_than_the_machine_has_is_a_frame_error(call):
    with pytest.raises(FrameError):
        call()


def test_memory_for_what_is_announced_is_zeroed_and_writable():
    for nbytes in (0, 1, 100_000):
        memory = zeroed(nbytes)
        assert bytes(memory) == bytes(nbytes) and not memory.readonly and memory.format == "B"


def send(group, part, dst, tag):
    group._state.mpi.Send((part, memoryview(part).nbytes, MPI.BYTE), dst, group._comm.own_tag(tag))


@pytest.mark.mpi(min_size=2)
def test_a_receive_of_what_is_announced_and_not_sent_takes_no_memory(group):
    grown = 0
    if group.rank == 1:
        send(group, header(2 * GIB), 0, Tag.OBJECT_MESSAGE)
    group.barrier()
    if group.rank == 0:
        before = resident_mib()
        group.timeout_s = 0.2
        with pytest.raises(CommTimeout):
            group.recv_object(1)
        group.timeout_s = None
        grown = resident_mib() - before
    group.barrier()
    if group.rank == 1:
        for _ in buffer.pieces(2 * GIB):
            send(group, b"late", 0, Tag.OBJECT_MESSAGE_PART)
    # The next call goes on with it.
    if group.rank == 0:
        with pytest.raises(FrameError, match="sent 4 bytes"):
            group.recv_object(1)
    agree(group, grown < MOST_MIB, f"{grown} MiB")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("sent", [0, 70_000, 99_999, 100_001, 300_000])
def test_a_part_of_another_length_than_announced_is_a_frame_error(group, sent):
    wrong = ""
    if group.rank == 1:
        send(group, header(100_000), 0, Tag.OBJECT_MESSAGE)
        send(group, bytes(sent), 0, Tag.OBJECT_MESSAGE_PART)
        group.send_object("next", 0)
    elif group.rank == 0:
        with pytest.raises(FrameError, match=f"sent {sent} bytes"):
            group.recv_object(1)
        wrong = group.recv_object(1)[0]
    agree(group, wrong in ("", "next"), str(wrong))


@pytest.mark.mpi(min_size=2)
def test_a_gathered_part_of_another_length_than_announced_is_a_frame_error(group):
    comm = group._comm
    if group.rank == 1:
        comm.mpi.Send(
            (header(100_000), frame.HEADER_BYTES, MPI.BYTE),
            0,
            comm.own_tag(Tag.OBJECT_COLLECTIVE),
        )
        comm.mpi.Send((bytes(7), 7, MPI.BYTE), 0, comm.own_tag(Tag.OBJECT_COLLECTIVE_PART))
    elif group.rank == 0:
        with pytest.raises(FrameError, match="sent 7 bytes"):
            object_messages.receive(comm, 1, Tag.OBJECT_COLLECTIVE)
    group.barrier()
