"""Comparison of replicas: sums of all dtypes and layouts, a flipped bit, ranks that are named."""

import pytest
import torch

from mpidist.checkpoint import model_state, replicas
from mpidist.ddp import DistributedDataParallel
from mpidist.errors import ReplicaError

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int8, torch.bool]


def checksum(module):
    return replicas.checksum(list(model_state.replicated_parameters(module).values()))


def model(values, dtype=torch.float32, shift=0):
    """Return a module whose parameters are views of one memory, ``shift`` elements into it."""
    made = torch.nn.Module()
    held = torch.zeros(shift + values.numel()).to(dtype)
    held[shift:] = values.flatten()
    for number, (start, end) in enumerate(((0, 13), (13, 13), (13, 40))):
        made.register_parameter(
            f"p{number}", torch.nn.Parameter(held[shift + start : shift + end], False)
        )
    return made


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_bits_have_equal_sums_wherever_they_lie(dtype):
    values = torch.randn(40, generator=torch.Generator().manual_seed(1)).mul(9)
    sums = {checksum(model(values, dtype, shift)) for shift in (0, 1, 3, 8)}
    assert len(sums) == 1
    other = values.clone()
    other[20] = 50.0 if dtype is not torch.bool else float(not values[20])
    assert checksum(model(other, dtype)) not in sums


def test_each_bit_counts_and_each_place():
    values = torch.randn(40, generator=torch.Generator().manual_seed(1))
    one = checksum(model(values))
    for bit in (0, 17, 31):
        flipped = model(values)
        flipped.p2.view(torch.int32)[-1] ^= torch.tensor(1 << bit, dtype=torch.int64).to(
            torch.int32
        )
        assert checksum(flipped) != one
    pair = torch.nn.ParameterList([torch.zeros(4), torch.ones(4)])
    swapped = torch.nn.ParameterList([torch.ones(4), torch.zeros(4)])
    assert checksum(pair) != checksum(swapped)
    image = torch.randn(2, 3, 4, 5)
    last = image.to(memory_format=torch.channels_last)
    assert len({checksum(torch.nn.ParameterList([each])) for each in (image, last)}) == 1
    assert checksum(torch.nn.Module()) == 0


@pytest.mark.mpi(min_size=1)
def test_ignored_parameters_may_differ(group):
    net = torch.nn.Linear(2, 2)
    torch.nn.init.ones_(net.weight)
    torch.nn.init.constant_(net.bias, float(group.rank))
    net._ddp_params_and_buffers_to_ignore = ["bias"]
    wrapped = DistributedDataParallel(net, process_group=group)
    assert len(set(group.all_gather_object(checksum(wrapped)))) == 1


@pytest.mark.parametrize(
    ("sums", "ranks", "words"),
    [
        ([1, 1, 2], (9,), "rank 2 differ from those that the other 2 ranks share"),
        ([3, 1, 1, 2, 1], (5, 11), "ranks 0, 3 differ from those that the other 3 ranks share"),
        ([1, 2], (5, 7), "no majority shares a sum. rank 0: 0000000000000001; rank 1: 000"),
        ([1, 2, 1, 2], (5, 7, 9, 11), "no majority"),
    ],
)
def test_the_minority_is_named(sums, ranks, words):
    with pytest.raises(ReplicaError, match=words) as caught:
        replicas.require_same("commit", sums, [5, 7, 9, 11, 13])
    assert caught.value.ranks == ranks
    replicas.require_same("commit", sums[:1] * 3, [5, 7, 9])
