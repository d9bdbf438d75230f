"""Check for NaN: which tensors it looks at, and the calls that make it."""

import pytest
import torch

from mpidist.comm import AVG
from mpidist.comm.algorithms import shared_memory
from mpidist.comm.execution import nan_check
from mpidist.errors import MpidistError

NAN = float("nan")


def test_either_of_torchs_variables_asks_for_it():
    assert nan_check.is_asked({"TORCH_DIST_NAN_CHECK": "1"})
    assert nan_check.is_asked({"TORCH_NCCL_NAN_CHECK": "1"})
    assert not nan_check.is_asked({"TORCH_DIST_NAN_CHECK": "0"}) and not nan_check.is_asked({})


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e5m2,
        torch.complex64,
    ],
)
def test_a_nan_is_counted_and_placed_and_an_infinity_passes(dtype):
    values = torch.zeros(3, 4)
    values[0, 1] = float("inf")
    nan_check.require_none("here", [torch.arange(5), values.to(dtype)])
    values[1, 2] = values[2, 0] = NAN
    with pytest.raises(MpidistError, match=r"here: 2 of 12 .* the first is element 6"):
        nan_check.require_none("here", [torch.zeros(2), values.to(dtype).requires_grad_()])


def test_values_of_a_sparse_tensor_are_looked_at():
    sparse = torch.sparse_coo_tensor([[1, 3]], [1.0, NAN], (5,))
    with pytest.raises(MpidistError, match="1 of 2"):
        nan_check.require_none("here", [sparse])


@pytest.fixture
def checked(world, monkeypatch):
    monkeypatch.setenv("TORCH_DIST_NAN_CHECK", "1")
    group = world.clone("checked")
    yield group
    group.close()


@pytest.mark.mpi(min_size=2)
def test_every_call_that_sends_looks_and_the_group_goes_on(checked):
    group, x = checked, torch.ones(8)
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    # By the prepared call of this memory, were there one.
    group.all_reduce(x, AVG)
    group.all_reduce(x, AVG)
    x[3] = NAN
    into = torch.empty(8 * group.size)
    calls = {
        "all_reduce": lambda: group.all_reduce(x),
        "all_reduce, asynchronous": lambda: group.all_reduce(x, async_op=True),
        "all_gather": lambda: group.all_gather_into_tensor(into, x),
        "send": lambda: group.send(x, after),
        "send of every other": lambda: group.send(x.repeat_interleave(2)[::2], after),
        "isend": lambda: group.isend(x, after),
    }
    for name, call in calls.items():
        operation = name.split(maxsplit=1)[0].rstrip(",")
        with pytest.raises(MpidistError, match=f"{operation}.* is element 3"):
            call()
    x[3] = 1.0
    group.all_reduce(x, AVG)
    work = group.isend(x, after)
    group.recv(into[:8], before)
    work.wait()
    assert into[:8].tolist() == [1.0] * 8


@pytest.mark.mpi(min_size=2)
def test_averages_in_memory_of_the_node_look(checked):
    memory = shared_memory.share(checked, 32)
    if memory is None:
        pytest.skip("the ranks share no memory")
    tensor = memory.tensor(0, 8, torch.float32)
    tensor.own.fill_(1.0)[2] = NAN
    for call in (tensor.average, lambda: tensor.reduce_to_owners([[(0, 8)]])):
        with pytest.raises(MpidistError, match=r"1 of 8 .* first is element 2"):
            call()
    tensor.own.fill_(float(checked.rank))
    tensor.average()
    assert tensor.own.tolist() == [(checked.size - 1) / 2] * 8
