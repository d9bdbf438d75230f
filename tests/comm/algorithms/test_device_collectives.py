"""Collectives on device tensors: values are computed late, and read as soon as the call returns.

The device is a lazy fake (any number of ranks, no GPU) or, under ``make gpu``, a GPU with slow
kernels.
"""

from __future__ import annotations

import itertools
import time
from functools import partial

import pytest
import torch

from mpidist.comm import AVG, MAX, PRODUCT, SUM, PremulSum
from mpidist.comm.algorithms import (
    device_all_reduce,
    device_collectives,
    host_copies,
    reduce_op,
    ring,
    staging,
)
from mpidist.comm.discovery import trial_operations
from mpidist.comm.execution import execution, fast_path
from mpidist.comm.memory import buffer
from mpidist.comm.memory.fence import StreamFence
from mpidist.comm.memory.stream import device_at
from mpidist.comm.messages import device_p2p, direct_messages
from tests.comm.lazy_device import LazyDevice, WatchedComm
from tests.tools.support import agree, finished, reduced

pytestmark = pytest.mark.mpi

SLOW_CYCLES = 4_000_000  # about 2 ms


class Lazy:
    """Tensors on the lazy device: their values are work on the current stream."""

    def __init__(self, monkeypatch, seed):
        self.device = LazyDevice(seed)
        for module in (execution, device_p2p):
            monkeypatch.setattr(
                module, "device_of", lambda tensors: self.device if list(tensors) else None
            )
        monkeypatch.setattr(
            execution, "device_at", lambda device: self.device if device is not None else None
        )
        monkeypatch.setattr(buffer, "is_direct", lambda tensor: False)
        # The fast path would use the host memory directly.
        monkeypatch.setattr(fast_path.FastPath, "find", lambda path, tensor, op: None)
        monkeypatch.setattr(direct_messages.DirectMessages, "take", lambda direct, *args: False)

    def produce(self, value):
        tensor = torch.full_like(value, 77)
        self.device.current().do(lambda: tensor.copy_(value))
        return tensor

    def blank(self, like):
        return torch.full_like(like, 55)

    def read_later(self, tensor):
        values = []
        self.device.current().do(lambda: values.append(tensor.clone()))
        return lambda: values[0]

    def consume(self, function):
        seen = []
        self.device.current().do(lambda: seen.append(function()))
        self.device.current().record().synchronize()
        return seen[0]


class Cuda:
    """Tensors on the GPU, with a slow kernel before each value."""

    def produce(self, value):
        tensor = torch.full_like(value, 77, device="cuda")
        held = value.cuda()
        torch.cuda._sleep(SLOW_CYCLES)
        return tensor.copy_(held)

    def blank(self, like):
        return torch.full_like(like, 55, device="cuda")

    def read_later(self, tensor):
        torch.cuda._sleep(SLOW_CYCLES)
        values = tensor.clone()
        return lambda: values

    def consume(self, function):
        result = function()
        return [t.cpu() for t in result] if isinstance(result, list) else result.cpu()


@pytest.fixture(
    params=[
        ("lazy", None, "0"),
        ("lazy", None, "1"),
        ("lazy", 1, "0"),
        ("lazy", 2, "1"),
        ("lazy", 3, "1"),
        pytest.param(("cuda", None, ""), marks=pytest.mark.gpu),
        pytest.param(("cuda", None, "0"), marks=pytest.mark.gpu),
    ],
    ids=lambda p: f"{p[0]}-seed {p[1]}-aware {p[2]}",
)
def place(request, monkeypatch):
    """A device, with or without an MPI that takes its addresses; chunks are short."""
    kind, seed, aware = request.param
    monkeypatch.setenv("MPIDIST_CUDA_AWARE", aware)
    monkeypatch.setattr(ring, "CHUNK_BYTES", 256)
    monkeypatch.setattr(staging, "CHUNK_BYTES", 192)
    monkeypatch.setattr(host_copies, "PINNED_BYTES", 1500)
    made = Lazy(monkeypatch, seed) if kind == "lazy" else Cuda()
    yield made
    assert kind == "cuda" or made.device.strays == []


def contribution(rank, numel, dtype):
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-4, 5, (numel,), generator=generator).to(dtype)


CASES = [
    (torch.float32, SUM), (torch.float32, AVG), (torch.float32, MAX), (torch.float64, PRODUCT),
    (torch.int32, SUM), (torch.int64, AVG), (torch.bfloat16, SUM), (torch.float16, AVG),
    (torch.bfloat16, MAX), (torch.complex64, AVG), (torch.bool, SUM), (torch.uint8, "bor"),
]  # fmt: skip


def test_all_reduce(place, group):
    for (dtype, op), numel in itertools.product(CASES, (0, 1, 2, 5, 129, 1000)):
        parts = [contribution(rank, numel, dtype) for rank in range(group.size)]
        for async_op in (False, True):
            tensor = place.produce(parts[group.rank])
            finished(group.all_reduce(tensor, op, async_op=async_op))
            got = place.consume(tensor.clone)
            wanted = reduced(parts, op)
            close = (
                torch.equal(got, wanted) if not dtype.is_complex else torch.allclose(got, wanted)
            )
            agree(
                group,
                close,
                f"{op} of {numel} {dtype}, async {async_op}: {got} instead of {wanted}",
            )


def test_integers_wrap_around(place, group):
    for dtype in (torch.int8, torch.uint8, torch.int16, torch.uint16):
        limits = torch.iinfo(dtype)
        for value, op in itertools.product((limits.min, limits.max), (SUM, AVG)):
            tensor = place.produce(torch.full((129,), value, dtype=dtype))
            group.all_reduce(tensor, op)
            total = torch.tensor(value * group.size).to(dtype).item()
            wanted = int(total / group.size) if op == AVG else total
            got = place.consume(tensor.clone)
            agree(group, got.tolist() == [wanted] * 129, f"{dtype} {op}: {got[:3]} {wanted}")


def test_mpi_gets_no_callback_for_device_memory():
    """MPI's operation is a Python function, which cannot read device memory."""
    for dtype in (torch.int8, torch.uint8, torch.int16, torch.uint16):
        assert not device_all_reduce.is_reduced_by_mpi(dtype, reduce_op.reduction(dtype, SUM))
        assert device_all_reduce.is_reduced_by_mpi(dtype, reduce_op.reduction(dtype, MAX))


def test_premul_sum_multiplies_before_the_sum(place, group):
    for dtype in (torch.float32, torch.bfloat16):
        parts = [contribution(rank, 300, dtype) for rank in range(group.size)]
        tensor = place.produce(parts[group.rank])
        group.all_reduce(tensor, PremulSum(group.rank + 1.0))
        wanted = sum(part.double() * (rank + 1) for rank, part in enumerate(parts)).to(dtype)
        agree(group, torch.equal(place.consume(tensor.clone), wanted))


def test_nan_wins_on_all_ranks(place, group):
    values = torch.tensor([1.0, -0.0, torch.nan, 3.0])
    values[0] = torch.nan if group.rank == group.size - 1 else 1.0
    tensor = place.produce(values)
    group.all_reduce(tensor, MAX)
    got = place.consume(tensor.clone)
    agree(
        group, got.isnan().tolist() == [True, False, True, False] and float(got[3]) == 3, str(got)
    )


def test_half_types_are_summed_in_fp32(place, group):
    tensor = place.produce(
        torch.full((700,), 1.0 if group.rank == 0 else 2.0**-9, dtype=torch.bfloat16)
    )
    group.all_reduce(tensor)
    wanted = torch.tensor(1 + (group.size - 1) * 2.0**-9).to(torch.bfloat16)
    agree(group, bool((place.consume(tensor.clone) == wanted).all()))


def test_strided_tensors(place, group):
    base = torch.arange(60.0).view(6, 10)
    tensor = place.produce(base)
    group.all_reduce(tensor.t()[1:4])
    wanted = base.clone()
    wanted[:, 1:4] *= group.size
    agree(group, torch.equal(place.consume(tensor.clone), wanted))


def test_lists_are_one_operation(place, group):
    values = [torch.arange(float(n)) + group.rank for n in (3, 0, 70, 1000)]
    tensors = [place.produce(value) for value in values]
    group.all_reduce_coalesced(tensors, AVG)
    got = place.consume(lambda: [t.clone() for t in tensors])
    middle = (group.size - 1) / 2
    agree(group, all(torch.allclose(g, torch.arange(float(g.numel())) + middle) for g in got))


def test_reduce_scatter(place, group):
    cases = itertools.product(
        [torch.float32, torch.bfloat16], [SUM, AVG, MAX, PremulSum(2.0)], (0, 1, 333)
    )
    for dtype, op, numel in cases:
        parts = [contribution(rank, numel * group.size, dtype) for rank in range(group.size)]
        source = place.produce(parts[group.rank])
        output = place.blank(torch.empty(numel, dtype=dtype))
        group.reduce_scatter_tensor(output, source, op)
        total = (
            reduced([part * 2 for part in parts], "sum")
            if isinstance(op, PremulSum)
            else reduced(parts, op)
        )
        got = place.consume(lambda output=output, source=source: [output.clone(), source.clone()])
        is_right = torch.equal(got[0], total.view(group.size, -1)[group.rank])
        agree(
            group, is_right and torch.equal(got[1], parts[group.rank]), f"{op} of {numel} {dtype}"
        )


@pytest.mark.parametrize("numel", [1, 1000, 30_000])
def test_every_collective_without_arithmetic_moves_its_values(place, group, numel):
    parts = [contribution(rank, numel, torch.float32) + 100 * rank for rank in range(group.size)]
    every, mine = torch.stack(parts), parts[group.rank]

    tensor = place.produce(mine)
    group.broadcast(tensor, group.size - 1)
    agree(group, torch.equal(place.consume(tensor.clone), parts[-1]), "broadcast")

    many = [place.produce(mine[:n]) for n in (1, 0, numel)]
    group.broadcast_coalesced(many, 0)
    got = place.consume(lambda: [t.clone() for t in many])
    agree(group, all(torch.equal(g, parts[0][: g.numel()]) for g in got), "broadcast_coalesced")

    output = place.blank(every.view(-1))
    group.all_gather_into_tensor(output, place.produce(mine))
    agree(group, torch.equal(place.consume(output.clone), every.view(-1)), "all_gather_into_tensor")

    outputs = [place.blank(mine) for _ in parts]
    group.all_gather(outputs, place.produce(mine), async_op=True).wait()
    agree(
        group,
        torch.equal(place.consume(lambda: [o.clone() for o in outputs])[0], parts[0]),
        "all_gather",
    )

    outputs = [place.blank(mine) for _ in parts]
    group.all_to_all(outputs, [place.produce(mine + to) for to in range(group.size)])
    got = place.consume(lambda: [o.clone() for o in outputs])
    agree(
        group,
        all(torch.equal(g, part + group.rank) for g, part in zip(got, parts, strict=True)),
        "all_to_all",
    )

    output = place.blank(every)
    group.all_to_all_single(
        output, place.produce(torch.stack([mine + to for to in range(group.size)]))
    )
    agree(group, torch.equal(place.consume(output.clone), every + group.rank), "all_to_all_single")

    outputs = [place.blank(mine) for _ in parts] if group.rank == 0 else None
    group.gather(place.produce(mine), outputs, 0)
    if outputs is not None:
        assert torch.equal(torch.stack(place.consume(lambda: [o.clone() for o in outputs])), every)

    output = place.blank(mine)
    group.scatter(output, [place.produce(part) for part in parts] if group.rank == 0 else None, 0)
    agree(group, torch.equal(place.consume(output.clone), mine), "scatter")

    tensor = place.produce(mine)
    group.reduce(tensor, 0)
    agree(
        group,
        torch.equal(place.consume(tensor.clone), every.sum(0) if group.rank == 0 else mine),
        "reduce",
    )


def test_messages_carry_values_that_are_computed_late(place, group):
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    for numel in (3, 5000):
        mine = torch.arange(float(numel)) + group.rank
        target = place.blank(mine)
        receive = group.irecv(target, left)
        send = group.isend(place.produce(mine), right)
        receive.wait()
        send.wait()
        agree(
            group,
            torch.equal(place.consume(target.clone), torch.arange(float(numel)) + left),
            f"{numel} elements",
        )


def test_a_slow_consumer_reads_before_the_next_call_overwrites(place, group):
    tensor = place.produce(torch.full((700,), 1.0))
    seen = []
    for _ in range(3):
        group.all_reduce(tensor)
        seen.append(place.read_later(tensor))
    got = place.consume(lambda: [read() for read in seen])
    agree(
        group,
        [float(values[-1]) for values in got] == [float(group.size**n) for n in (1, 2, 3)],
        str(got),
    )


def test_memory_is_kept_until_the_last_copy(monkeypatch, group):
    """torch's allocator must not reuse the memory before the copies to it are complete."""
    monkeypatch.setenv("MPIDIST_CUDA_AWARE", "0")
    place = Lazy(monkeypatch, None)
    tensor, gathered = place.produce(torch.ones(500)), place.blank(torch.ones(500 * group.size))
    # With a factor, because on one rank a sum leaves the tensor unchanged.
    reduce = partial(group.all_reduce, tensor, PremulSum(2.0), async_op=True)
    for call in (reduce, partial(group.all_gather_into_tensor, gathered, tensor, async_op=True)):
        call().wait()
        for stream in (place.device.down, place.device.up):
            agree(
                group,
                stream.kept.get(tensor.data_ptr(), -1) == len(stream.queue),
                "the tensor is let go too early",
            )
    agree(group, place.device.up.kept.get(gathered.data_ptr(), -1) == len(place.device.up.queue))


def test_a_single_rank_makes_no_fence_and_copies_nothing(monkeypatch, world):
    """No event, no wait and no copy; a wait for an asynchronous call still waits for its tensor."""
    place, made = Lazy(monkeypatch, None), []
    fence = device_collectives.StreamFence
    monkeypatch.setattr(
        device_collectives, "StreamFence", lambda *args: (made.append(args), fence(*args))[1]
    )
    alone = world.split(world.rank)
    tensors = [place.produce(torch.full((300,), 3.0)), place.produce(torch.full((5,), 3.0))]
    count = sum(len(stream.queue) for stream in place.device.streams)
    for op in (SUM, AVG, MAX):
        alone.all_reduce(tensors[0], op)
        alone.all_reduce_coalesced(tensors, op)
    alone.reduce(tensors[0], 0)
    alone.broadcast(tensors[0], 0)
    agree(
        world,
        not made and count == sum(len(stream.queue) for stream in place.device.streams),
        f"{len(made)} orders",
    )
    work = alone.all_reduce(tensors[0], async_op=True)
    place.device.leave_default_stream()  # to a stream without the tensor's work
    work.wait()
    agree(
        world,
        not made and bool((place.consume(tensors[0].clone) == 3).all()),
        f"{len(made)} orders",
    )
    alone.all_reduce(tensors[0], PremulSum(2.0))
    agree(world, len(made) == 1 and bool((place.consume(tensors[0].clone) == 6).all()))
    alone.close()


def test_a_single_rank_keeps_the_order_of_its_asynchronous_calls(monkeypatch, world):
    """As on several ranks, a wait for the last call covers the copies of earlier calls."""
    place = Lazy(monkeypatch, None)
    alone = world.split(world.rank)
    gathered = place.blank(torch.ones(300))
    first = alone.all_gather_into_tensor(
        gathered, place.produce(torch.full((300,), 3.0)), async_op=True
    )
    alone.all_reduce(gathered, async_op=True).wait()
    agree(world, bool((place.consume(gathered.clone) == 3).all()), f"{gathered}")
    first.wait()
    alone.close()


@pytest.mark.gpu
def test_dropped_memory_is_not_reused_too_early(group):
    for turn in range(20):
        tensor = torch.full((1 << 20,), 1.0, device="cuda")
        work = group.all_reduce(tensor, async_op=True)
        address = tensor.data_ptr()
        work.tensors = ()
        del tensor
        other = torch.full((1 << 20,), -5.0, device="cuda")
        work.wait()
        agree(
            group,
            bool((other == -5).all()),
            f"turn {turn}, the same memory: {other.data_ptr() == address}",
        )


def test_outputs_are_not_overwritten_before_they_were_read(monkeypatch, group):
    monkeypatch.setenv("MPIDIST_CUDA_AWARE", "0")
    for seed in range(12):
        with pytest.MonkeyPatch.context() as patches:
            place = Lazy(patches, seed)
            output = place.produce(torch.full((300,), 5.0))
            read = place.read_later(output)
            parts = [place.produce(torch.full((300,), float(rank))) for rank in range(group.size)]
            group.scatter(output, parts if group.rank == 0 else None, 0)
            for _ in range(5):
                place.device.drift()
            agree(group, bool((place.consume(read) == 5).all()), f"seed {seed}")


def test_long_messages_around_the_ring(monkeypatch, group):
    """Messages past MPI's eager limit, in several chunks."""
    monkeypatch.setenv("MPIDIST_CUDA_AWARE", "1")
    monkeypatch.setattr(ring, "CHUNK_BYTES", 400_000)
    place = Lazy(monkeypatch, 4)
    for dtype in (torch.float32, torch.bfloat16):
        tensor = place.produce((torch.arange(900_000) % 100 + group.rank).to(dtype))
        group.all_reduce(tensor, async_op=True).wait()
        wanted = (
            (torch.arange(900_000) % 100) * group.size + group.size * (group.size - 1) // 2
        ).to(dtype)
        agree(group, torch.equal(place.consume(tensor.clone), wanted), str(dtype))


def test_a_plain_sum_is_computed_in_place(monkeypatch, group):
    """Shards are sent from their own memory; a copy would cost a launch and a pass over it."""
    monkeypatch.setenv("MPIDIST_CUDA_AWARE", "1")
    for name in ("_scaled_copy", "_finish"):
        monkeypatch.setattr(ring, name, None)
    place = Lazy(monkeypatch, 5)
    for dtype, op in [(torch.float32, SUM), (torch.float64, AVG), (torch.int32, MAX)]:
        parts = [contribution(rank, 5000, dtype) for rank in range(group.size)]
        tensor = place.produce(parts[group.rank])
        fence = StreamFence(place.device, (tensor,))
        fence.wait_ready()
        ring.all_reduce(group._comm, fence, tensor, op, 900)
        for event in fence.record():
            event.block_current_stream()
        agree(group, torch.equal(place.consume(tensor.clone), reduced(parts, op)), f"{dtype} {op}")


def test_pairs_of_several_types(place, group):
    sources = [
        place.produce(torch.full((4 * group.size,), 3).to(dtype))
        for dtype in (torch.float32, torch.int64)
    ]
    outputs = [place.blank(torch.empty(4, dtype=source.dtype)) for source in sources]
    group.reduce_scatter_tensor_coalesced(outputs, sources, AVG)
    agree(
        group,
        all(bool((got == 3).all()) for got in place.consume(lambda: [o.clone() for o in outputs])),
    )


def test_conjugated_and_negated_tensors(place, group):
    plain = torch.complex(torch.arange(6.0), torch.ones(6)) + group.rank
    outputs = [place.blank(plain) for _ in range(group.size)] if group.rank == 0 else None
    group.gather(place.produce(plain).conj(), outputs, 0)
    if outputs is not None:
        got = place.consume(lambda: [o.clone() for o in outputs])
        assert all(
            torch.equal(g, (plain + rank).conj().resolve_conj()) for rank, g in enumerate(got)
        )
    tensor = place.produce(plain).conj()
    group.broadcast(tensor.imag, 0)
    agree(group, bool((place.consume(lambda: tensor.imag.clone()) == -1).all()))


def test_every_wait_for_a_message_orders_its_own_stream(place, group):
    if not isinstance(place, Lazy):
        pytest.skip("the lazy device shows it")
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    target = place.blank(torch.ones(300))
    receive = group.irecv(target, left)
    group.isend(place.produce(torch.full((300,), 3.0)), right).wait()
    while not receive.is_completed():
        pass
    place.device.leave_default_stream()  # another stream than at the first test
    receive.wait()
    agree(group, bool((place.consume(target.clone) == 3).all()))


def test_callbacks_see_the_results(place, group):
    tensor = place.produce(torch.full((500,), float(group.rank)))
    future = group.all_reduce(tensor, async_op=True).get_future()
    if isinstance(place, Lazy):
        device = place.device

        def double(future):
            (result,) = future.value()
            device.current().do(lambda: result.mul_(2))
            return result

    else:

        def double(future):
            (result,) = future.value()
            return result.mul_(2)

    doubled = future.then(double)
    result = doubled.wait()
    total = group.size * (group.size - 1)
    agree(group, bool((place.consume(result.clone) == total).all()))


def test_stages_are_ordered_with_the_callers_stream(place, group):
    tensor = place.produce(torch.full((500,), 1.0))
    where = torch.device("cuda", 0) if isinstance(place, Cuda) else torch.device("cpu")

    def stages():
        group.all_reduce(tensor)
        group.all_reduce(tensor)

    group.in_order(stages, device=where).wait()
    agree(group, bool((place.consume(tensor.clone) == group.size**2).all()))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("forgotten", ["wait_ready", "record"])
def test_a_missing_wait_gives_wrong_numbers_on_the_lazy_device(monkeypatch, world, forgotten):
    # A test of the lazy device: without a wait of the library, results are wrong.
    monkeypatch.setenv("MPIDIST_CUDA_AWARE", "0")
    place = Lazy(monkeypatch, None)
    group = world.clone("forgetful")
    monkeypatch.setattr(StreamFence, forgotten, lambda fence: [])
    tensor = place.produce(torch.ones(100))
    group.all_reduce(tensor)
    got = place.consume(tensor.clone)
    group.close()
    agree(world, not bool((got == world.size).all()), str(got))


def test_each_shard_of_the_ring_passes_every_rank():
    for size in range(1, 7):
        for longest, chunk in [(0, 4), (1, 4), (9, 4)]:
            # Rank i sends the shard that it received in the previous step; each shard's sum starts
            # at one rank and has W contributions.
            routes = [ring.legs(size, longest, chunk, (rank - 1) % size) for rank in range(size)]
            assert all(len(route) == (size - 1) * -(-longest // chunk) for route in routes)
            for rank, route in enumerate(routes):
                for mine, theirs in zip(route, routes[(rank - 1) % size], strict=True):
                    assert mine.received == theirs.sent and mine.start == theirs.start
                if route:
                    assert route[-1].received == rank
                for earlier, later in zip(route, route[-(-longest // chunk) :], strict=False):
                    assert later.sent == earlier.received


def test_pinned_memory_is_bounded(monkeypatch, group):
    """Staged operations and messages: torch would keep pinned memory of each size for ever."""
    monkeypatch.setenv("MPIDIST_CUDA_AWARE", "0")
    monkeypatch.setattr(host_copies, "PINNED_BYTES", 1 << 12)
    monkeypatch.setattr(staging, "CHUNK_BYTES", 1 << 10)
    place = Lazy(monkeypatch, 5)
    pinned, real = [], place.device.staging
    monkeypatch.setattr(
        place.device,
        "staging",
        lambda numel, dtype: pinned.append(numel * dtype.itemsize) or real(numel, dtype),
    )
    mine = torch.arange(5000.0) + group.rank
    left, right = (group.rank - 1) % group.size, (group.rank + 1) % group.size

    outputs = [place.blank(mine) for _ in range(group.size)]
    group.all_gather(outputs, place.produce(mine))
    target = place.blank(mine)
    receive = group.irecv(target, left)
    group.isend(place.produce(mine), right).wait()
    receive.wait()
    strided = place.produce(torch.arange(15_000.0).view(3, 5000))
    group.reduce(strided.t(), 0)

    got = place.consume(
        lambda: [target.clone(), strided.clone(), *(output.clone() for output in outputs)]
    )
    ok = torch.equal(got[0], torch.arange(5000.0) + left)
    ok &= torch.equal(
        got[1], torch.arange(15_000.0).view(3, 5000) * (group.size if group.rank == 0 else 1)
    )
    ok &= all(
        torch.equal(values, torch.arange(5000.0) + rank) for rank, values in enumerate(got[2:])
    )
    agree(group, ok, f"{got}")
    agree(group, pinned and max(pinned) <= 1 << 12, f"{pinned}")


def watched(monkeypatch, group, device, watches_results):
    """Record the group's MPI calls, and whether the device was current in the calling thread."""
    seen = []
    watch = WatchedComm(group._state.mpi, device, seen, watches_results)
    for owner, name in [
        (group._state, "mpi"),
        (group._comm, "mpi"),
        (group._comm, "plain"),
        (group._messages.receives, "_mpi"),
    ]:
        monkeypatch.setattr(owner, name, watch)
    return seen


def test_mpi_works_on_device_memory_with_that_device_current(monkeypatch, group):
    """In the caller's thread and in the group's: MPI uses the calling thread's CUDA context."""
    monkeypatch.setenv("MPIDIST_CUDA_AWARE", "1")
    place = Lazy(monkeypatch, None)
    group._comm.device_operations["cpu"] = frozenset(trial_operations.OPERATIONS)
    with pytest.MonkeyPatch.context() as patches:
        seen = watched(patches, group, place.device, watches_results=False)
        for async_op in (False, True):
            works = [
                group.all_reduce(place.produce(torch.ones(5)), async_op=async_op),
                group.all_reduce(place.produce(torch.ones(100_000)), async_op=async_op),
                group.broadcast(place.produce(torch.ones(5)), 0, async_op=async_op),
                group.all_gather_into_tensor(
                    place.blank(torch.ones(5 * group.size)), place.produce(torch.ones(5)), async_op
                ),
            ]
            for work in works:
                finished(work)
    agree(group, all(is_current for _, is_current in seen) and (group.size == 1 or seen), f"{seen}")
    agree(group, not place.device.is_current(), "the device stays current")


@pytest.mark.parametrize("by", ["the owner", "another thread"])
def test_messages_of_device_memory_are_tested_with_that_device_current(monkeypatch, group, by):
    """In any thread that matches a receive or tests a request: its owner's, or posted receives'."""
    monkeypatch.setenv("MPIDIST_CUDA_AWARE", "1")
    place = Lazy(monkeypatch, None)
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    target = place.blank(torch.ones(300))
    is_matched = True
    with pytest.MonkeyPatch.context() as patches:
        seen = watched(patches, group, place.device, watches_results=True)
        receive = group.irecv(target, left)
        send = group.isend(place.produce(torch.full((300,), 3.0)), right)
        if by == "another thread":
            queue, deadline = group._messages.receives, time.monotonic() + 30
            while not queue.is_empty() and time.monotonic() < deadline:
                time.sleep(1e-3)
            is_matched = queue.is_empty()
        send.wait()
        receive.wait()
    agree(group, is_matched, "no other thread matches the receive")
    agree(group, {"Isend", "Irecv", "Test"} <= {name for name, _ in seen}, f"{seen}")
    agree(group, all(is_current for _, is_current in seen), f"{seen}")
    agree(group, bool((place.consume(target.clone) == 3).all()), "the message")


def test_memory_of_the_host_has_no_device():
    assert device_at(None) is None and device_at(torch.device("cpu")) is None


def test_inputs_that_outputs_overwrite(place, group):
    size, rank = group.size, group.rank
    for numel in (3, 500):
        whole = torch.arange(float(size * numel)) + 1000 * rank
        tensor = place.produce(whole)
        group.all_to_all_single(tensor, tensor)
        own = slice(rank * numel, (rank + 1) * numel)
        wanted = torch.cat(
            [torch.arange(float(size * numel))[own] + 1000 * peer for peer in range(size)]
        )
        ok = torch.equal(place.consume(tensor.clone), wanted)
        for step in (0, numel):
            shift = rank * step
            tensor = place.produce(whole)
            group.reduce_scatter_tensor(tensor[shift : shift + numel], tensor)
            total = size * torch.arange(float(size * numel))[own] + 500 * size * (size - 1)
            ok &= torch.equal(place.consume(tensor[shift : shift + numel].clone), total)
            tensor = place.produce(whole)
            group.all_gather_into_tensor(tensor, tensor[shift : shift + numel])
            parts = [torch.arange(float(numel)) + (step + 1000) * peer for peer in range(size)]
            ok &= torch.equal(place.consume(tensor.clone), torch.cat(parts))
        agree(group, ok, f"{numel}")
