"""Shared memory of a node's ranks: averages against NumPy's, failures to share, and lifetime."""

import gc
import itertools
import os

import pytest
import torch

from mpidist.comm.algorithms import shared_memory
from mpidist.errors import GroupError
from tests.tools.support import agree, raises_on_all, reduced

pytestmark = pytest.mark.mpi(min_size=2)


def values(rank, numel, dtype):
    generator = torch.Generator().manual_seed(1000 + rank)
    return torch.randn(
        numel, generator=generator, dtype=torch.complex128 if dtype.is_complex else torch.float64
    ).to(dtype)


def shared(group, numel, dtype):
    memory = shared_memory.share(group, numel * dtype.itemsize + 64)
    agree(group, memory is not None, "no memory was shared")
    return memory.tensor(64, numel, dtype)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64]
)
def test_averages_are_numpys_and_the_same_on_all_ranks(group, dtype):
    # The longest tensor for two types only, because the NumPy reference is slow.
    longest = [1_100_000] if dtype in (torch.float32, torch.bfloat16) else []
    for numel in [1, 2, 7, 1000, 300_001, *longest]:
        memory = shared(group, numel, dtype)
        agree(group, memory.own.shape == (numel,) and memory.own.dtype is dtype)
        agree(group, not memory.own.any(), "zeros at first")
        for step in range(2):
            parts = [values(rank + 10 * step, numel, dtype) for rank in range(group.size)]
            memory.own.copy_(parts[group.rank])
            memory.average()
            tolerance = {torch.float16: 1e-3, torch.bfloat16: 8e-3}.get(dtype, 1e-6)
            wide = [part.float() for part in parts] if dtype in shared_memory._NARROW else parts
            expected = reduced(wide, "avg").to(dtype)
            is_close = torch.allclose(memory.own, expected, rtol=tolerance, atol=tolerance)
            agree(group, is_close, f"{numel} elements, step {step}")
            data = (
                memory.own.contiguous().view(torch.uint8).numpy().tobytes() if numel < 2000 else b""
            )
            agree(
                group,
                len(set(group.all_gather_object(data))) == 1,
                f"{numel} elements: ranks differ",
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_each_range_is_averaged_for_its_owner(group, dtype):
    """The bits are those of ``average``, for any owner."""
    numel = 1000 if dtype is torch.complex64 else 700_001  # more than one block, and parts of one
    cuts = list(
        itertools.pairwise([0, 3, numel // 7, numel // 2, numel // 2 + 1, numel - 5, numel])
    )
    by_rank = [
        [cut for number, cut in enumerate(cuts[:-1]) if number % group.size == rank]
        for rank in range(group.size)
    ]
    everywhere, here = shared(group, numel, dtype), shared(group, numel, dtype)
    for step in range(2):  # a second step overwrites what the first has read
        for memory in (everywhere, here):
            memory.own.copy_(values(group.rank + step, numel, dtype))
        everywhere.average()
        here.reduce_to_owners(by_rank, cuts[-1:])
        own = [*by_rank[group.rank], cuts[-1]]
        agree(
            group,
            all(torch.equal(here.own[a:b], everywhere.own[a:b]) for a, b in own),
            f"step {step}, {own}",
        )


def test_averages_keep_the_groups_order(group):
    memory = shared(group, 100_000, torch.float32)
    memory.own.fill_(group.rank)
    other = torch.full((50_000,), float(group.rank))
    works = [group.all_reduce(other, async_op=True) for _ in range(3)]
    memory.average()
    for work in works:
        work.wait()
    total = sum(range(group.size))
    agree(
        group,
        bool((memory.own == total / group.size).all())
        and bool((other == total * group.size**2).all()),
    )


def test_several_tensors_of_one_memory_do_not_mix(group):
    whole = shared_memory.share(group, 5 * 8192)
    memories = [whole.tensor(8192 * index, 1000 + index, torch.float32) for index in range(5)]
    for index, memory in enumerate(memories):
        memory.own.fill_(index * group.rank)
    for memory in reversed(memories):
        memory.average()
    mean = sum(range(group.size)) / group.size
    agree(
        group,
        all(bool((memory.own == index * mean).all()) for index, memory in enumerate(memories)),
    )


@pytest.mark.parametrize("missing", ["the system call", "room", "the other's files"])
def test_no_rank_shares_if_one_cannot(group, missing, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError("not here")

    before = len(os.listdir("/proc/self/fd"))
    if group.rank == group.size - 1:
        name = {
            "the system call": "memfd_create",
            "room": "posix_fallocate",
            "the other's files": "open",
        }[missing]
        monkeypatch.setattr(shared_memory.os, name, refuse)
    made = shared_memory.share(group, 1000)
    monkeypatch.undo()
    agree(group, made is None)
    agree(group, len(os.listdir("/proc/self/fd")) == before, "a file stayed open")


def test_another_file_with_the_same_number_is_detected(group, monkeypatch):
    if group.rank == 0:
        monkeypatch.setattr(shared_memory.secrets, "randbits", lambda bits: 1)
        true_file = shared_memory.anonymous_file
        kept = []

        # The file number belongs to another file when the other ranks open it.
        def another(nbytes):
            kept.append(true_file(nbytes))
            return os.dup(kept[-1])

        monkeypatch.setattr(shared_memory, "anonymous_file", another)
        monkeypatch.setattr(shared_memory.mmap, "mmap", lambda file, nbytes: bytearray(nbytes))
    made = shared_memory.share(group, 1000)
    monkeypatch.undo()
    agree(group, made is None)


def test_memory_outlives_its_group_and_is_freed(world):
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    group = world.clone("short")
    memory = shared(group, 1_000_000, torch.float32)
    memory.own.fill_(3.0)
    view = memory.own[10:20]
    group.close()
    raises_on_all(world, GroupError, memory.average, "closed")
    del memory, group
    gc.collect()
    agree(world, bool((view == 3).all()))
    del view
    gc.collect()
    agree(world, len(os.listdir("/proc/self/fd")) <= before, "a file stayed open")


def test_one_rank_or_no_bytes_have_no_shared_memory(group):
    alone = group.split(group.rank)
    agree(group, shared_memory.share(group, 0) is None and shared_memory.share(alone, 5) is None)
    alone.close()
