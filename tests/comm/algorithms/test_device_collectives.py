"""Collectives on device tensors: values are computed late, and read as soon as the call returns.

The device is a lazy fake (any number of ranks, no GPU) or, under ``make gpu``, a GPU with slow
kernels.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from mpidist.comm import AVG, MAX, PRODUCT, SUM, PremulSum
from mpidist.comm.algorithms import (
    device_all_reduce,
    reduce_op,
)
from tests.comm.places import Cuda, Lazy, contribution
from tests.tools.support import agree, finished, reduced

pytestmark = pytest.mark.mpi

CASES = [
    (torch.float32, SUM), (torch.float32, AVG), (torch.float32, MAX), (torch.float64, PRODUCT),
    (torch.int32, SUM), (torch.int64, AVG), (torch.bfloat16, SUM), (torch.float16, AVG),
    (torch.bfloat16, MAX), (torch.complex64, AVG), (torch.bool, SUM), (torch.uint8, "bor"),
]  # fmt: skip


def test_all_reduce(place, group):
    wrong = []
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
            if not close:
                wrong.append(
                    f"{op} of {numel} {dtype}, async {async_op}: {got} instead of {wanted}"
                )
    agree(group, not wrong, "; ".join(wrong))


def test_integers_wrap_around(place, group):
    wrong = []
    for dtype in (torch.int8, torch.uint8, torch.int16, torch.uint16):
        limits = torch.iinfo(dtype)
        for value, op in itertools.product((limits.min, limits.max), (SUM, AVG)):
            tensor = place.produce(torch.full((129,), value, dtype=dtype))
            group.all_reduce(tensor, op)
            total = torch.tensor(value * group.size).to(dtype).item()
            wanted = int(total / group.size) if op == AVG else total
            got = place.consume(tensor.clone)
            if got.tolist() != [wanted] * 129:
                wrong.append(f"{dtype} {op}: {got[:3]} {wanted}")
    agree(group, not wrong, "; ".join(wrong))


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
