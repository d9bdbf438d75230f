"""Inputs that share memory with outputs: every collective, compared with separate memory."""

import pytest
import torch

from mpidist.comm import MAX, SUM
from mpidist.comm.memory.overlap import separated
from tests.tools.support import agree

# Below and above the limit of one flat buffer; the ways of a dtype do not depend on it.
CASES = (
    *((numel, torch.float32) for numel in (3, 3000, 50_000)),
    *((numel, torch.bfloat16) for numel in (3, 50_000)),
    (3000, torch.int64),
)


def test_only_what_an_output_would_overwrite_is_copied():
    memory = torch.arange(12.0)
    a, b, c = memory[:4], memory[4:8], memory[8:]
    assert separated((a, b), (c,))[0] is a
    mixed = separated((a, b), (memory[2:6],))
    assert (
        mixed[0] is not a
        and mixed[1] is not b
        and torch.equal(mixed[0], a)
        and torch.equal(mixed[1], b)
    )
    assert separated((b,), (memory,), lambda: {(0, 0): b.data_ptr()})[0] is b
    assert separated((a,), (memory,), lambda: {(0, 0): b.data_ptr()})[0] is not a
    assert separated((b,), (memory, memory[5:]), lambda: {(0, 0): b.data_ptr()})[0] is not b
    empty = memory[4:4]
    assert separated((empty,), (memory,))[0] is empty


def layouts(group, numel, dtype):
    """Yield (name, call on (output, input), the two as views of one memory, input values)."""
    size, rank = group.size, group.rank
    many = size * numel

    def memory(length):
        return (torch.arange(length) % 50 + rank).to(dtype)

    for turn, shift in enumerate((0, 1, numel // 2, numel * rank, numel * (size - 1))):
        whole = memory(many + many)
        yield (
            "all_to_all_single",
            group.all_to_all_single,
            whole[shift : shift + many],
            whole[:many],
        )
        whole = memory(many + many)
        yield (
            "all_to_all", lambda o, i: group.all_to_all(list(o.split(numel)), list(i.split(numel))),
            whole[shift : shift + many], whole[:many],
        )  # fmt: skip
        whole = memory(many + numel)
        yield (
            "all_gather_into_tensor",
            group.all_gather_into_tensor,
            whole[:many],
            whole[shift : shift + numel],
        )
        whole = memory(many + numel)
        yield (
            "all_gather", lambda o, i: group.all_gather(list(o.split(numel)), i),
            whole[:many], whole[shift : shift + numel],
        )  # fmt: skip
        for op in (SUM, MAX):
            whole = memory(many + numel)
            yield (
                "reduce_scatter_tensor "
                f"{op}", lambda o, i, op=op: group.reduce_scatter_tensor(o, i, op),
                whole[shift : shift + numel], whole[:many],
            )  # fmt: skip
        whole = memory(many + numel)
        yield (
            "reduce_scatter", lambda o, i: group.reduce_scatter(o, list(i.split(numel))),
            whole[shift : shift + numel], whole[:many],
        )  # fmt: skip
        whole = memory(many + numel)
        root = turn % size
        yield (
            "gather",
            lambda o, i, root=root: group.gather(
                i, list(o.split(numel)) if rank == root else None, root
            ),
            whole[:many], whole[shift : shift + numel],
        )  # fmt: skip
        whole = memory(many + numel)
        yield (
            "scatter",
            lambda o, i, root=root: group.scatter(
                o, list(i.split(numel)) if rank == root else None, root
            ),
            whole[shift : shift + numel], whole[:many],
        )  # fmt: skip


@pytest.mark.mpi
def test_every_collective_is_right_whatever_overlaps(group):
    wrong = []
    for numel, dtype in CASES:
        for name, call, output, source in layouts(group, numel, dtype):
            apart, kept = output.clone(), source.clone()
            call(apart, kept)
            call(output, source)
            if not torch.equal(output, apart):
                wrong.append((name, numel, dtype, output.storage_offset(), source.storage_offset()))
    agree(group, not wrong, str(wrong[:4]))


@pytest.mark.mpi
def test_strided_and_asynchronous_overlaps(group):
    size = group.size
    table = (torch.arange(size * size) + 100.0 * group.rank).view(size, size).t()
    expected = torch.empty(size, size)
    group.all_to_all_single(expected, table.contiguous())
    group.all_to_all_single(table, table, async_op=True).wait()
    # The input is read when the operation is executed, after the operations queued before.
    chained = torch.ones(size)
    first = group.all_reduce(chained, async_op=True)
    second = group.all_to_all_single(chained, chained, async_op=True)
    first.wait(), second.wait()
    agree(group, torch.equal(table, expected) and chained.tolist() == [size] * size, str(table))
