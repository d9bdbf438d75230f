"""Plans of flat buffers: every element once, contiguous shards, cuts at multiples of 64."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist.zero.shards import buffer_plan
from mpidist.zero.shards.partition import greedy

KINDS = [torch.float32, torch.bfloat16, torch.complex64]
PARAMETERS = st.lists(st.tuples(st.integers(0, 300), st.sampled_from(KINDS)), max_size=12)
RANKS = st.integers(1, 6)
HOST = torch.device("cpu")


def made(given_parameters, ranks, is_cut):
    tensors = {
        number: torch.empty(numel, dtype=dtype, device="meta")
        for number, (numel, dtype) in enumerate(given_parameters)
    }
    if is_cut:
        return tensors, buffer_plan.cut(tensors, ranks), None
    owners, _ = greedy([tensor.numel() for tensor in tensors.values()], [0] * ranks)
    return tensors, buffer_plan.whole(tensors, dict(enumerate(owners)), ranks), owners


@settings(max_examples=100, deadline=None)
@given(PARAMETERS, RANKS, st.booleans())
def test_every_element_has_one_place_and_one_owner(parameters, ranks, is_cut):
    tensors, plans, owners = made(parameters, ranks, is_cut)
    assert len(plans) == len({tensor.dtype for tensor in tensors.values() if tensor.numel()})
    owned = {number: [] for number in tensors}
    for plan in plans:
        assert plan.nbytes == plan.numel * plan.dtype.itemsize and len(plan.bounds) == ranks + 1
        assert not any(bound % 64 for bound in plan.bounds) and plan.bounds[0] == 0
        end = 0
        for number, offset, numel in plan.slots:
            assert (
                offset == end
                and numel == tensors[number].numel()
                and plan.dtype is tensors[number].dtype
            )
            end = offset + buffer_plan.padded(numel)
        assert end == plan.numel
        lengths = [high - low for low, high in zip(plan.bounds, plan.bounds[1:], strict=False)]
        if is_cut:
            assert max(lengths) - min(lengths) <= 64
        for rank in range(ranks):
            for number, start, stop, offset in plan.spans(rank):
                assert plan.bounds[rank] <= offset < offset + stop - start <= plan.bounds[rank + 1]
                assert owners is None or owners[number] == rank
                slot = next(slot for slot in plan.slots if slot.number == number)
                assert slot.offset + start == offset and start % 64 == 0
                owned[number].append((start, stop))
    for number, spans in owned.items():
        assert [element for start, stop in spans for element in range(start, stop)] == list(
            range(tensors[number].numel())
        )


@settings(max_examples=100, deadline=None)
@given(PARAMETERS, RANKS, st.booleans(), st.sets(st.integers(0, 11)))
def test_a_plan_of_some_parameters_leaves_each_element_to_its_owner(
    parameters, ranks, is_cut, numbers
):
    _, plans, _ = made(parameters, ranks, is_cut)
    for plan in plans:
        fewer = plan.only(frozenset(numbers), torch.float64, HOST)
        assert (
            fewer.dtype is torch.float64
            and fewer.device == HOST
            and not any(bound % 64 for bound in fewer.bounds)
        )
        for rank in range(ranks):
            before = {
                (number, start, stop)
                for number, start, stop, _ in plan.spans(rank)
                if number in numbers
            }
            assert before == {(number, start, stop) for number, start, stop, _ in fewer.spans(rank)}


def test_a_net_much_smaller_than_a_unit_for_each_rank():
    (plan,) = buffer_plan.cut({0: torch.empty(3), 1: torch.empty(70)}, 8)
    assert plan.numel == 64 + 128 and sum(high > low for low, high in pairwise(plan.bounds)) == 3
    assert [len(plan.spans(rank)) for rank in range(8)].count(1) == 3


def test_parameters_of_several_devices_and_dtypes_lie_apart():
    parameters = {
        3: torch.empty(5),
        4: torch.empty(6, device="meta"),
        7: torch.empty(7),
        9: torch.empty(2).double(),
    }
    plans = buffer_plan.whole(parameters, {3: 1, 4: 0, 7: 0, 9: 1}, 2)
    assert [[slot.number for slot in plan.slots] for plan in plans] == [[7, 3], [4], [9]]
    assert [plan.device.type for plan in plans] == ["cpu", "meta", "cpu"]


def test_a_plan_is_split_by_what_its_parameters_are_now():
    parameters = [torch.empty(100), torch.empty(3), torch.empty(200)]
    (plan,) = buffer_plan.cut(dict(enumerate(parameters)), 3)
    parameters[1] = parameters[1].double()
    again = buffer_plan.split(plan, parameters)
    assert [(part.dtype, [slot.number for slot in part.slots]) for part in again] == [
        (torch.float32, [0, 2]),
        (torch.float64, [1]),
    ]
    assert again[0].by_number[2] == buffer_plan.Slot(2, 128, 200)
    assert buffer_plan.owned_parts(again) == buffer_plan.owned_parts([plan])
    assert buffer_plan.owned_parts([plan])[0] == ((0, 0, 100),)
    assert [rank for rank, _, _ in buffer_plan.owned_parts([plan])[2]] == [1, 2]
