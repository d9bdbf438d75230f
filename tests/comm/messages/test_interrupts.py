"""Messages that a handler of a signal leaves at a random moment; then the same call again."""

import threading
import time

import pytest
import torch

from mpidist.comm.messages.p2p import P2POp
from mpidist.comm.messages.request_work import RequestWork
from tests.tools.interrupts import Interrupts
from tests.tools.support import agree

# Elements, and the latest moment in seconds.
SIZES = ((4, 2e-5), (20_000, 1e-4), (1_000_000, 1e-3))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(("size", "longest_s"), SIZES)
@pytest.mark.parametrize("side", [0, 1], ids=["send", "recv"])
def test_a_tensor_is_whole(group, size, longest_s, side):
    """A message that is left is sent or received whole, or not at all."""
    rounds, wrong, got, sent = 100, [], [], []
    with Interrupts(size, longest_s) as interrupts:
        if group.rank == 0:
            for label in range(rounds):
                tensor = torch.full((size,), float(label))
                is_left = side == 0 and interrupts.left(lambda t=tensor: group.send(t, 1))[0]
                if side == 1:
                    group.send(tensor, 1)
                # The memory of a message that was left is kept.
                del tensor
                torch.full((size,), -1.0)
                if not is_left:
                    sent.append(float(label))
            group.send(torch.full((size,), -2.0), 1)
        elif group.rank == 1:
            last = None
            while last != -2.0:
                tensor = torch.full((size,), -3.0)
                is_left = side == 1 and interrupts.left(lambda t=tensor: group.recv(t, 0))[0]
                if side == 0:
                    group.recv(tensor, 0)
                first = tensor[0].item()
                if not tensor.eq(first).all():
                    wrong.append((is_left, tensor.unique().tolist()))
                # A receive that was left has its message, or has left it for the next.
                if first != -3.0:
                    last = first
                    got.append(first)
                elif not is_left:
                    wrong.append("nothing")
        count = interrupts.count
    every = group.all_gather_object((sent, got, count))
    sent, got = every[0][0], every[1][1][:-1]
    if got != sorted(set(got)) or not set(sent) <= set(got):
        wrong.append((sent, got))
    agree(group, not wrong, str(wrong[:3]))
    assert every[side][2] > 0, every


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("side", [0, 1], ids=["send", "recv"])
def test_an_object_is_whole_and_comes_once(group, side):
    rounds, wrong, got, sent = 60, [], [], []
    with Interrupts(7, 2e-3) as interrupts:
        if group.rank == 0:
            for label in range(rounds):
                given = label, [torch.full((n,), float(label)) for n in (50_000, 7, 30_000)]
                is_left = side == 0 and interrupts.left(lambda o=given: group.send_object(o, 1))[0]
                if side == 1:
                    group.send_object(given, 1)
                del given
                [torch.full((n,), -1.0) for n in (50_000, 7, 30_000)]
                if not is_left:
                    sent.append(label)
            group.send_object(None, 1)
        elif group.rank == 1:
            while True:
                is_left, found = False, None
                if side == 1:
                    is_left, found = interrupts.left(lambda: group.recv_object(0))
                else:
                    found = group.recv_object(0)
                if is_left:
                    continue
                if found[0] is None:
                    break
                label, tensors = found[0]
                if not all(tensor.eq(float(label)).all() for tensor in tensors):
                    wrong.append(label)
                got.append(label)
        count = interrupts.count
    every = group.all_gather_object((sent, got, count))
    sent, got = every[0][0], every[1][1]
    is_complete = set(sent) <= set(got) if side == 0 else got == sent
    if got != sorted(set(got)) or not is_complete:
        wrong.append((sent, got))
    agree(group, not wrong, str(wrong[:3]))
    assert every[side][2] > 0, every


class _OneThread:
    """A request that says whether two threads have tested it at once."""

    is_shared = False

    def __init__(self):
        self._inside = threading.Lock()
        self._left = 20

    def Test(self, status=None):
        if not self._inside.acquire(blocking=False):
            self.is_shared = True
            return False
        time.sleep(1e-3)
        self._left -= 1
        self._inside.release()
        return self._left <= 0


def test_one_thread_at_a_time_calls_mpi_for_a_handle(group):
    request = _OneThread()
    work = RequestWork(group._state, "send", None, request, 0)
    threads = [threading.Thread(target=work.wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    while not work.is_completed():
        pass
    for thread in threads:
        thread.join()
    agree(group, not request.is_shared)


def test_an_exception_of_a_handler_is_none_of_the_message(group):
    """As any exception that Python raises between two steps of a test."""

    class Left(Exception):
        pass

    class Request:
        has_raised = False

        def Test(self, status=None):
            if not self.has_raised:
                self.has_raised = True
                raise Left
            return True

    work = RequestWork(group._state, "send", None, Request(), 0)
    with pytest.raises(Left):
        work.wait()
    assert work.exception() is None and work.wait()
    agree(group, True)


@pytest.mark.mpi(min_size=2)
def test_a_batch_that_is_refused_leaves_no_receive(group):
    got, lost = torch.zeros(4), torch.zeros(4)
    if group.rank == 0:
        for wrong in (P2POp("isend", torch.zeros(4), group.size), P2POp("isend", None, 1)):
            with pytest.raises((ValueError, TypeError)):
                group.batch_isend_irecv([P2POp("irecv", lost, 1), wrong])
    group.barrier()
    if group.rank == 1:
        group.send(torch.ones(4), 0)
    elif group.rank == 0:
        group.recv(got, 1)
    ok = group.rank != 0 or (got.tolist() == [1] * 4 and lost.tolist() == [0] * 4)
    agree(group, ok, f"{got} {lost}")
