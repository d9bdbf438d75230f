"""All-reduce of sparse COO tensors: the dense sum, coalesced, the same bits on all ranks."""

import pytest
import torch
import torch.distributed as dist

from mpidist.comm.algorithms import sparse
from mpidist.comm.algorithms.reduce_op import PremulSum
from mpidist.comm.world_group import from_world
from mpidist.errors import DisagreementError
from tests.tools.support import agree, finished, raises_on_all

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex32, torch.complex64,
    torch.complex128, torch.float8_e5m2, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool,
]  # fmt: skip
SHAPES = [
    ((7,), 1),
    ((7, 3), 1),
    ((5, 4), 2),
    ((3, 4, 2, 2), 2),
    ((2, 3, 4), 3),
    ((), 0),
    ((4, 0), 1),
    ((1 << 30, 1 << 20, 2), 2),
]


def contribution(rank, shape, sparse_dim, dtype=torch.float64, nnz=None, seed=0):
    """Return elements in random order, some twice; rank 0 has none without ``nnz``."""
    generator = torch.Generator().manual_seed(10 * seed + rank)
    nnz = 3 * rank if nnz is None else nnz
    rows = [torch.randint(size, (nnz,), generator=generator) for size in shape[:sparse_dim]]
    indices = torch.stack(rows) if rows else torch.empty(0, nnz, dtype=torch.int64)
    values = torch.randint(0, 3, (nnz, *shape[sparse_dim:]), generator=generator)
    return torch.sparse_coo_tensor(indices, values.to(dtype), shape, check_invariants=True)


def held(tensor):
    """Return the elements by indices, duplicates summed."""
    table = {}
    for place, values in zip(tensor._indices().t().tolist(), tensor._values(), strict=True):
        values = values.to(torch.complex128 if values.is_complex() else torch.float64)
        table[tuple(place)] = table.get(tuple(place), 0) + values
    return table


def wanted(group, shape, sparse_dim, dtype, divisor=1):
    table = {}
    for rank in range(group.size):
        for place, values in held(contribution(rank, shape, sparse_dim, dtype)).items():
            table[place] = table.get(place, 0) + values
    return {
        place: values.bool() if dtype is torch.bool else values / divisor
        for place, values in table.items()
    }


def is_right(group, tensor, expected):
    results = group.all_gather_object(
        (tensor._indices(), tensor._values().view(-1).view(torch.uint8))
    )
    same = all(torch.equal(a, results[0][0]) and torch.equal(b, results[0][1]) for a, b in results)
    found = held(tensor)
    if tensor.dtype is torch.bool:
        found = {place: values.bool() for place, values in found.items()}
    right = list(found) == sorted(found) and found.keys() == expected.keys()
    return (
        same
        and right
        and tensor.is_coalesced()
        and all(torch.equal(found[p].cpu(), expected[p]) for p in found)
    )


@pytest.mark.mpi
@pytest.mark.parametrize("async_op", [False, True])
def test_every_dtype_and_shape(group, async_op):
    for dtype in DTYPES:
        for shape, sparse_dim in SHAPES if dtype is torch.float32 else SHAPES[1:3]:
            tensor = contribution(group.rank, shape, sparse_dim, dtype)
            work = group.all_reduce(tensor, "sum", async_op=async_op)
            if async_op:
                work.wait()
                assert work.get_future().value()[0] is tensor
            agree(
                group,
                is_right(group, tensor, wanted(group, shape, sparse_dim, dtype)),
                f"{dtype} {shape} {tensor}",
            )


@pytest.mark.mpi
def test_integers_wrap_around(group):
    places = torch.arange(100)[None]
    for dtype in (torch.int8, torch.uint8, torch.int16, torch.uint16):
        limits = torch.iinfo(dtype)
        for value in (limits.min, limits.max):
            tensor = torch.sparse_coo_tensor(
                places, torch.full((100,), value, dtype=dtype), (100,), check_invariants=True
            )
            group.all_reduce(tensor)
            expected = torch.tensor(value * group.size).to(dtype)
            agree(group, bool((tensor._values() == expected).all()), f"{dtype} {value} {tensor}")


@pytest.mark.mpi
def test_a_mean_is_divided_by_the_number_of_ranks(group):
    for dtype in (torch.float64, torch.complex64):
        tensor = contribution(group.rank, (7, 3), 1, dtype)
        group.all_reduce(tensor, "avg")
        exact = group.size in (1, 2, 4)
        expected = wanted(group, (7, 3), 1, dtype, group.size)
        close = held(tensor).keys() == expected.keys() and all(
            torch.allclose(values.cpu(), expected[place], atol=1e-6)
            for place, values in held(tensor).items()
        )
        agree(group, close and (not exact or is_right(group, tensor, expected)), str(tensor))


@pytest.mark.mpi
def test_a_sum_of_empty_tensors_is_empty(group):
    tensor = contribution(group.rank, (7, 3), 1, nnz=0)
    group.all_reduce(tensor)
    agree(group, tensor._nnz() == 0 and tensor.is_coalesced() and tensor.shape == (7, 3))


@pytest.mark.mpi
def test_sparse_and_dense_calls_keep_one_order(group):
    """The stages of an asynchronous sparse all-reduce do not mix with synchronous dense ones."""
    tensors = [contribution(group.rank, (7, 3), 1, seed=0) for _ in range(4)]
    works, sums = [], []
    for tensor in tensors:
        works.append(group.all_reduce(tensor, async_op=True))
        sums.append(torch.ones(3))
        group.all_reduce(sums[-1])
    for work in works:
        work.wait()
    expected = wanted(group, (7, 3), 1, torch.float64)
    agree(
        group,
        all(is_right(group, tensor, expected) for tensor in tensors)
        and all(bool((s == group.size).all()) for s in sums),
    )


@pytest.mark.mpi
def test_inference_tensors_are_reduced_and_leaves_under_no_grad_alone(group):
    expected = wanted(group, (7, 3), 1, torch.float64)
    with torch.inference_mode():
        tensor = contribution(group.rank, (7, 3), 1)
    for async_op in (False, True):
        with torch.inference_mode():
            tensor.copy_(contribution(group.rank, (7, 3), 1))
        finished(group.all_reduce(tensor, async_op=async_op))
        agree(group, is_right(group, tensor, expected), "inference tensor")
    leaf = contribution(group.rank, (7, 3), 1).requires_grad_()
    raises_on_all(group, ValueError, lambda: group.all_reduce(leaf), "a leaf that requires grad")
    with torch.no_grad():
        group.all_reduce(leaf)
    agree(group, is_right(group, leaf.detach(), expected) and leaf.requires_grad, "leaf")


@pytest.mark.mpi
@pytest.mark.parametrize("op", ["max", "product", "bxor", PremulSum(2.0)])
def test_other_operations_are_refused(group, op):
    tensor = contribution(group.rank, (7, 3), 1)
    raises_on_all(group, ValueError, lambda: group.all_reduce(tensor, op), "by sum or avg")
    raises_on_all(
        group,
        TypeError,
        lambda: group.all_reduce(contribution(0, (3,), 1, torch.bool), "avg"),
        "torch.bool",
    )
    for async_op in (False, True):
        raises_on_all(
            group,
            TypeError,
            lambda async_op=async_op: group.all_reduce(
                torch.eye(3).to_sparse_csr(), async_op=async_op
            ),
            "sparse_csr",
        )


@pytest.mark.mpi(min_size=2)
def test_shapes_dtypes_and_operations_that_differ_raise_on_all(group):
    """Also without debug mode: the comparison is part of the message with the counts."""
    last = group.rank == group.size - 1
    for tensor in (
        contribution(group.rank, (7, 4 if last else 3), 1),
        contribution(group.rank, (7, 3), 1, torch.float32 if last else torch.float64),
        contribution(group.rank, (7, 3), 2 if last else 1),
    ):
        raises_on_all(
            group,
            DisagreementError,
            lambda tensor=tensor: group.all_reduce(tensor),
            "ranks disagree",
        )
    tensor = contribution(group.rank, (7, 3), 1)
    raises_on_all(
        group, DisagreementError, lambda: group.all_reduce(tensor, "avg" if last else "sum"), "op: "
    )


@pytest.mark.mpi(min_size=2)
def test_debug_mode_compares_layouts_before_the_sum(group):
    checked = from_world("checked", 600, debug=True)
    last = checked.rank == checked.size - 1
    tensor = contribution(group.rank, (7, 3), 1)
    raises_on_all(
        group,
        DisagreementError,
        lambda: checked.all_reduce(tensor.to_dense() if last else tensor),
        "layout",
    )
    raises_on_all(
        group,
        DisagreementError,
        lambda: checked.all_reduce(tensor, "max" if last else "sum"),
        "sum or avg",
    )
    checked.all_reduce(tensor)
    agree(group, is_right(group, tensor, wanted(group, (7, 3), 1, torch.float64)))
    checked.close()


@pytest.mark.mpi
@pytest.mark.usefixtures("default_group")
@pytest.mark.parametrize("async_op", [False, True])
def test_torchs_all_reduce_takes_sparse_tensors(group, async_op):
    tensor = contribution(group.rank, (7, 3), 1)
    work = dist.all_reduce(tensor, async_op=async_op)
    if async_op:
        work.wait()
        agree(group, work.get_future().value()[0] is tensor)
    agree(group, is_right(group, tensor, wanted(group, (7, 3), 1, torch.float64)))
    with torch.no_grad():
        leaf = contribution(group.rank, (7, 3), 1).requires_grad_()
        dist.all_reduce(leaf)
    agree(group, is_right(group, leaf.detach(), wanted(group, (7, 3), 1, torch.float64)))


def test_duplicates_of_half_types_are_rounded_once():
    values = torch.tensor([2048.0, 1.0, 1.0], dtype=torch.float16)  # 2048 + 1 is 2048 in fp16
    tensor = torch.sparse_coo_tensor(torch.zeros(1, 3, dtype=torch.int64), values, (4,))
    keys, total = sparse.coalesce(tensor)
    assert keys.tolist() == [0] and total.tolist() == [2050.0]
