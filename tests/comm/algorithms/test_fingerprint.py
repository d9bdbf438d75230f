"""Debug mode: ranks that call different operations all raise an error."""

import pytest
import torch

from mpidist.comm.algorithms import fingerprint
from mpidist.errors import DisagreementError
from tests.tools.support import agree, raises_on_all


def test_differences_name_ranks_and_values():
    lines = [
        fingerprint.describe(
            "all_reduce", 3, [("shape", (2, 4)), ("dtype", torch.float32), ("op", "sum")]
        ),
        fingerprint.describe(
            "all_reduce", 3, [("shape", (2, 5)), ("dtype", torch.float32), ("op", "sum")]
        ),
        fingerprint.describe(
            "all_reduce", 3, [("shape", (2, 4)), ("dtype", torch.float32), ("op", "max")]
        ),
    ]
    text = fingerprint.differences(lines)
    assert (
        text
        == "shape: (2, 4) on ranks 0, 2, (2, 5) on rank 1; op: sum on ranks 0, 1, max on rank 2"
    )
    assert fingerprint.differences(lines[:1] * 4) == ""


def test_of_different_operations_the_arguments_are_not_compared():
    lines = [
        fingerprint.describe("broadcast", 3, [("tensors", [torch.ones(2)]), ("src", 0)]),
        fingerprint.describe("all_reduce", 3, [("tensor", torch.ones(2)), ("op", "sum")]),
    ]
    assert fingerprint.differences(lines) == "operation: broadcast on rank 0, all_reduce on rank 1"
    lines[1] = fingerprint.describe("all_reduce", 4, [("tensor", torch.ones(2))])
    assert "; sequence: 3 on rank 0, 4 on rank 1" in fingerprint.differences(lines)


def test_only_the_refusal_of_arguments_is_reported():
    lines = [
        fingerprint.describe("all_reduce", 3, [("shape", (2, 4))]),
        fingerprint.describe("all_reduce", 3, [(fingerprint.REFUSAL, "needs a tensor")]),
    ]
    assert (
        fingerprint.differences(lines)
        == "arguments refused: nothing on rank 0, needs a tensor on rank 1"
    )


def test_many_ranks_are_a_range():
    lines = [fingerprint.describe("a" if rank else "b", 1, ()) for rank in range(20)]
    assert "b on rank 0, a on ranks 1-19" in fingerprint.differences(lines)


@pytest.fixture
def strict(world):
    from mpidist.comm.world_group import from_world

    group = from_world("strict", 600, debug=True)
    yield group
    group.close()


@pytest.mark.mpi(min_size=2)
def test_disagreements_raise_on_all_ranks_and_the_group_continues(world, strict):
    odd = strict.rank == strict.size - 1
    last = strict.size - 1

    def check(call, *words):
        message = raises_on_all(world, DisagreementError, call)
        agree(world, all(word in message for word in words), message)
        tensor = torch.ones(3)
        strict.all_reduce(tensor)
        agree(world, bool((tensor == strict.size).all()), "after the error")

    check(
        lambda: strict.all_reduce(torch.ones(3 if odd else 2)),
        "shape: (2,)",
        f"(3,) on rank {last}",
    )
    check(
        lambda: strict.all_reduce(torch.ones(2, dtype=torch.float64 if odd else torch.float32)),
        "dtype: torch.float32",
        "torch.float64",
    )
    check(lambda: strict.all_reduce(torch.ones(2), "max" if odd else "sum"), "op: sum", "max")
    check(
        lambda: strict.broadcast(torch.ones(2), last if odd else 0),
        "src: 0",
        f"{last} on rank {last}",
    )
    check(
        lambda: strict.barrier() if odd else strict.all_reduce(torch.ones(2)),
        "operation: all_reduce",
        f"barrier on rank {last}",
    )
    check(
        lambda: strict.all_reduce([1] if odd else torch.ones(2)),
        "arguments refused",
        "got list",
        f"on rank {last}",
    )
    check(lambda: strict.broadcast(torch.ones(2), 99 if odd else 0), "got 99")
    check(lambda: strict.gather_object(1, last if odd else 0), "dst: 0")
    sends = [2 if odd else 1] * strict.size
    check(
        lambda: strict.all_to_all_single(
            torch.ones(sum(sends)), torch.ones(sum(sends)), sends, sends
        ),
        f"rank 0 sends 1 rows to rank {last}, which expects 2",
    )
    works = strict.all_reduce(torch.ones(3 if odd else 2), async_op=True)
    raises_on_all(world, DisagreementError, works.wait, "shape")


@pytest.mark.mpi
def test_an_equal_mistake_of_all_ranks_is_an_error_of_each(world, strict):
    raises_on_all(world, ValueError, lambda: strict.broadcast(torch.ones(2), 99), "got 99")


@pytest.mark.mpi
def test_every_collective_passes_in_debug_mode(world, strict):
    W, rank = strict.size, strict.rank
    strict.all_gather([torch.zeros(r) for r in range(W)], torch.zeros(rank))
    strict.all_gather_into_tensor(torch.zeros(2 * W), torch.zeros(2))
    strict.reduce_scatter_tensor(torch.zeros(2), torch.zeros(2 * W))
    strict.all_to_all_single(torch.zeros(W), torch.zeros(W))
    strict.all_to_all([torch.zeros(2)] * W, [torch.zeros(2)] * W)
    strict.gather(torch.zeros(1), [torch.zeros(1)] * W if rank == 0 else None)
    strict.scatter(torch.zeros(1), [torch.zeros(1)] * W if rank == 0 else None)
    strict.all_reduce_coalesced([torch.zeros(1), torch.zeros(2)])
    agree(
        strict, strict.broadcast_object(5) == 5 and strict.all_gather_object(rank) == list(range(W))
    )
