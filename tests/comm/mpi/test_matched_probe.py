"""Messages longer than their receives: no write past the end, and an error with both lengths."""

import pytest
import torch

from mpidist.comm.mpi import mpi_errors
from mpidist.comm.mpi.library import MPI
from mpidist.errors import DisagreementError, MpidistError
from tests.tools.support import agree, raises_on_all

HALF = torch.bfloat16

pytestmark = pytest.mark.mpi(min_size=2)

GUARD = 77.0


def guarded(numel, beyond, dtype=torch.float32):
    """Return a tensor and the memory after it."""
    memory = torch.full((numel + beyond,), GUARD).to(dtype)
    return memory[:numel], memory[numel:]


def is_untouched(memory):
    return bool((memory == GUARD).all())


@pytest.mark.parametrize("posted_first", [True, False])
def test_a_longer_message_stays_outside_the_tensor(group, posted_first):
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    wrong = []
    for numel, sent in (
        (1, 3),
        (100, 900),
        (100, 3000),
        (1000, 20_000),
        (1, 300_000),
        (200_000, 700_000),
    ):
        tensor, behind = guarded(numel, sent)
        if posted_first:
            incoming = group.irecv(tensor, left)
            group.barrier()
            outgoing = group.isend(torch.zeros(sent), right)
        else:
            outgoing = group.isend(torch.zeros(sent), right)
            group.barrier()
            incoming = group.irecv(tensor, left)
        try:
            incoming.wait()
            wrong.append(f"{numel} of {sent}: no error")
        except MpidistError as error:
            if f"expected {4 * numel} bytes" not in str(
                error
            ) or f"rank {left} sent {4 * sent}" not in str(error):
                wrong.append(str(error))
        outgoing.wait()
        if not is_untouched(tensor) or not is_untouched(behind):
            wrong.append(f"{numel} of {sent}: written past the end")
        # The next message is received as usual.
        outgoing = group.isend(torch.full((2,), float(group.rank)), right)
        into = torch.zeros(2)
        if group.recv(into, left) != left or not bool((into == left).all()):
            wrong.append(f"the message after {sent}: {into}")
        outgoing.wait()
    agree(group, not wrong, "; ".join(wrong))


def test_collectives_of_different_sizes_keep_to_their_memory(group):
    """One rank's tensor is longer than the others': errors, and no write past the end."""
    wrong = []
    small, large = 3000, 9000

    def is_longer(rank):
        return rank == 0

    numel = large if is_longer(group.rank) else small
    for name, dtype, call in (
        ("broadcast", torch.float32, lambda t: group.broadcast(t, 0)),
        ("short broadcast", torch.float32, lambda t: group.broadcast(t[: len(t) // 1000], 0)),
        ("all_reduce", torch.bfloat16, group.all_reduce),
    ):
        if name == "all_reduce" and group.size > 2:
            continue  # MPI's own reduction, whose sizes are the same on all ranks
        tensor, behind = guarded(numel, large, dtype)
        tensor = tensor.clone() if dtype is torch.bfloat16 and is_longer(group.rank) else tensor
        try:
            call(tensor)
            if not (name.endswith("broadcast") and group.rank == 0):  # the root gets no length
                wrong.append(f"{name}: no error")
        except DisagreementError as error:
            if "sent" not in str(error) or "MPIDIST_DEBUG" not in str(error):
                wrong.append(f"{name}: {error}")
        if not is_untouched(behind):
            wrong.append(f"{name}: written past the end")
    agree(group, not wrong, "; ".join(wrong))


@pytest.mark.mpi(min_size=2)
def test_our_reductions_of_different_sizes_return_on_no_rank(group):
    """One rank has an element more: without a word to the others some would have a number."""
    for numel, dtype in ((1 << 22, torch.float32), (1 << 22, torch.bfloat16), (100_000, HALF)):
        for odd in {0, group.size - 1}:
            tensor = torch.ones(numel + (group.rank == odd), dtype=dtype)
            text = raises_on_all(
                group, DisagreementError, lambda tensor=tensor: group.all_reduce(tensor), "bytes"
            )
            assert "MPIDIST_DEBUG=1" in text
    total = torch.ones(100_000, dtype=HALF)
    group.all_reduce(total)
    agree(group, bool((total == group.size).all()))


def test_the_error_of_one_call_of_mpi_names_the_debug_mode(group):
    error = MPI.Exception(MPI.ERR_TRUNCATE)
    text = str(mpi_errors.translate(error, "rank 0: all_reduce"))
    assert "differ in size, or they called different collectives: with MPIDIST_DEBUG=1" in text
    error = MPI.Exception(MPI.ERR_ARG)
    assert "MPIDIST_DEBUG" not in str(mpi_errors.translate(error, "rank 0: all_reduce"))


def test_lists_of_other_sizes_than_the_messages_keep_to_their_memory(group):
    wrong = []
    right = (group.rank + 1) % group.size
    sent, expected = 30_000, 10_000
    memory = [guarded(sent if peer == group.rank else expected, sent) for peer in range(group.size)]
    try:
        group.all_gather([tensor for tensor, _ in memory], torch.zeros(sent))
        wrong.append("all_gather: no error")
    except DisagreementError as error:
        if f"sent {4 * sent} bytes, and this rank expected {4 * expected}" not in str(error):
            wrong.append(str(error))
    wrong += [
        f"all_gather wrote past the end of {peer}"
        for peer, (_, behind) in enumerate(memory)
        if not is_untouched(behind)
    ]
    inputs = [torch.zeros(expected) for _ in range(group.size)]
    inputs[right] = torch.zeros(sent)
    memory = [guarded(expected, sent) for _ in range(group.size)]
    try:
        group.all_to_all([tensor for tensor, _ in memory], inputs)
        wrong.append("all_to_all: no error")
    except DisagreementError:
        pass
    wrong += [
        f"all_to_all wrote past the end of {peer}"
        for peer, (_, behind) in enumerate(memory)
        if not is_untouched(behind)
    ]
    agree(group, not wrong, "; ".join(wrong))
    total = torch.ones(3)
    group.all_reduce(total)  # the group still works
    agree(group, total.tolist() == [group.size] * 3)
