"""Orthonormal columns of PowerSGD's thin matrices, by twin, CUDA source and kernel."""

import pytest
import torch

from mpidist.kernels import powersgd, powersgd_launches, powersgd_plan
from mpidist.kernels.powersgd import gram_schmidt, orthogonalize
from tests.kernels.test_powersgd import DTYPES, bucket_of

on_kernels = pytest.mark.parametrize(
    "device", ["text", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True
)


def thin_bucket(matrices, device):
    """Return a bucket with these matrices as its Ps."""
    rank = matrices[0].shape[1]
    bucket = bucket_of(
        [(len(v), rank) for v in matrices], rank, matrices[0].dtype, device, whole=()
    )
    for x, v in zip(bucket.matrices, matrices, strict=True):
        x.p.copy_(v)
    return bucket


def exact(matrix):
    """Return Q of the QR decomposition in fp64 whose R has a positive diagonal."""
    q, r = torch.linalg.qr(matrix.double())
    return q * r.diagonal().sign()


def test_gram_schmidt_has_the_kernels_numbers(device):
    bucket = bucket_of([(400, 90)], 6, torch.float32, device)
    p = bucket.matrices[0].p
    wanted = gram_schmidt(p.cpu().clone())
    powersgd.orthogonalize_p(bucket)
    signs = (wanted * p.cpu()).sum(0).sign()  # QR on the host may flip a column
    assert torch.allclose(p.cpu(), wanted * signs, atol=1e-5)


# The error is a few roundings, for matrices of moderate condition.
ROUNDING = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}


# Every rank that kernels are compiled for; every dtype at a small and a large rank.
THIN = [(rank, torch.float32) for rank in (1, 2, 3, 8, 11, 32)] + [
    (rank, dtype) for dtype in DTYPES[1:] for rank in (3, 11)
]


@on_kernels
@pytest.mark.parametrize(("rank", "dtype"), [*THIN, (32, torch.float64)], ids=str)
def test_rows_in_registers(device, rank, dtype):
    """Sizes near multiples of a warp, of a block's threads, and of the rows that a block holds."""
    torch.manual_seed(rank)
    held = powersgd_plan.held_rows(
        powersgd_plan.compiled_rank(rank), 8 if dtype is torch.float64 else 4
    )
    rows = {rank, 31, 33, 513, 2049, held} if rank < 32 else {100, held}
    matrices = [
        torch.randn(n, rank, dtype=torch.float64).to(dtype)
        for n in sorted(rows)
        if rank <= n <= held
    ]
    bucket = thin_bucket(matrices, device)
    assert not bucket.on_device._has_tall[0]
    powersgd.orthogonalize_p(bucket)
    for x, v in zip(bucket.matrices, matrices, strict=True):
        got, twin = x.p.cpu(), gram_schmidt(v.clone())
        if len(v) > 2 * rank:  # else their condition may be large
            assert float((got.double() - exact(v)).abs().max()) < ROUNDING[dtype] * (1 + rank), (
                v.shape
            )
            assert float((got.double() - twin.double()).abs().max()) < ROUNDING[dtype] * (
                1 + rank
            ), v.shape
        off = got.double().t() @ got.double() - torch.eye(rank, dtype=torch.float64)
        assert float(off.abs().max()) < ROUNDING[dtype] * 2 * (1 + rank), v.shape


@pytest.fixture
def tall(monkeypatch):
    """Make matrices of more than 40 rows tall, so that three blocks or more share them."""
    monkeypatch.setattr(powersgd_plan, "held_rows", lambda rank, compute_bytes: 40)
    monkeypatch.setattr(powersgd_plan, "_SEGMENT", 64)
    monkeypatch.setattr(powersgd_plan, "_MAX_SEGMENTS", 5)


@on_kernels
@pytest.mark.parametrize(("rank", "dtype"), THIN, ids=str)
def test_tall_matrices(device, tall, rank, dtype):
    """The result is exact up to rounding, for columns of any size and nearly dependent columns."""
    torch.manual_seed(rank)
    matrices = [torch.randn(n, rank, dtype=torch.float64) for n in (130, 193, 320, 40, 700)]
    matrices[1] *= 10.0 ** torch.linspace(-2, 2, rank)
    # The sine of the angle to earlier columns is near 3e-3, in fp64 3e-2.
    matrices[2] = matrices[2][:, :1] + (3e-2 if dtype is torch.float64 else 3e-3) * matrices[2]
    matrices = [v.to(dtype) for v in matrices]
    if dtype.itemsize == 2:
        del matrices[2]  # the angle is below the rounding
    bucket = thin_bucket(matrices, device)
    assert bucket.on_device._has_tall[0]
    powersgd.orthogonalize_p(bucket)
    for x, v in zip(bucket.matrices, matrices, strict=True):
        # The error grows with the square of the condition number.
        limit = ROUNDING[dtype] * (1 + rank) * (1000 if dtype is torch.float64 else 1)
        got = x.p.double().cpu()
        if len(v) > 2 * rank:
            assert float((got - exact(v)).abs().max()) < limit, v.shape
        assert (
            float((got.t() @ got - torch.eye(rank, dtype=torch.float64)).abs().max()) < 2 * limit
        ), v.shape
    first = [x.p.clone() for x in bucket.matrices]
    for _ in range(2):
        for x, v in zip(bucket.matrices, matrices, strict=True):
            x.p.copy_(v)
        powersgd.orthogonalize_p(bucket)
        assert all(torch.equal(x.p, p) for x, p in zip(bucket.matrices, first, strict=True)), (
            "not the same bits again"
        )


@on_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("rank", [3, 4, 8])
def test_tall_matrices_whose_small_angles_add_up(device, tall, rank, dtype):
    """Each column is near the previous one only, so a pivot's rounding grows with each column."""
    torch.manual_seed(rank)
    basis, _ = torch.linalg.qr(torch.randn(300, rank, dtype=torch.float64))
    matrices = []
    for sine in (2e-4, 1e-3, 3e-3, 6e-3, 3e-2, 9e-2):
        v = basis.clone()
        v[:, 1:] = basis[:, :-1] + sine * basis[:, 1:]
        matrices.append(v.to(dtype))
    bucket = thin_bucket(matrices, device)
    powersgd.orthogonalize_p(bucket)
    for place, x in enumerate(bucket.matrices):
        got, limit = (
            x.p.double().cpu(),
            ROUNDING[dtype] * 2 * (1 + rank) * (1000 if dtype is torch.float64 else 1),
        )
        assert float((got.t() @ got - torch.eye(rank, dtype=torch.float64)).abs().max()) < limit, (
            place
        )
        wide = matrices[place].double()
        assert float((wide - got @ (got.t() @ wide)).abs().max()) < limit, place


@on_kernels
@pytest.mark.parametrize("epsilon", [0, 1e-8, 1e-4, 1e-2])
def test_tall_matrices_that_cholesky_cannot_take(device, tall, epsilon):
    """Dependent columns, zeros, norms near epsilon: the result is that of Gram-Schmidt."""
    torch.manual_seed(3)
    sizes = (100, 200, 300, 130, 250, 140, 150)
    near, equal, zero, all_zero, small, tiny, slanting = matrices = [
        torch.randn(n, 5) for n in sizes
    ]
    slanting += 2 * slanting[:, :1].clone()  # a large epsilon leaves components in later columns
    near[:, 3] = near[:, 1] + 1e-6 * near[:, 3]
    equal[:, 4] = equal[:, 0]
    zero[:, [0, 2]] = 0
    all_zero[:] = 0
    small *= 1e-8
    tiny *= 1e-11
    bucket = thin_bucket(matrices, device)
    powersgd.orthogonalize_p(bucket, epsilon)
    got = [x.p.cpu() for x in bucket.matrices]
    for place, v in enumerate(matrices):
        twin = gram_schmidt(v.clone(), epsilon)
        if place > 1:  # the direction of a rounding residue is arbitrary
            assert torch.allclose(got[place], twin, atol=3e-6), place
        filled = got[place][:, v.any(dim=0)].double()
        if v is not all_zero and (epsilon == 0 or (epsilon == 1e-8 and v is not tiny)):
            assert float((filled.t() @ filled - torch.eye(filled.shape[1])).abs().max()) < 1e-4, (
                place
            )
    assert not got[2][:, [0, 2]].any() and not got[3].any()
    assert torch.allclose(got[0][:, :3], gram_schmidt(near.clone(), epsilon)[:, :3], atol=3e-6)


@on_kernels
def test_only_tall_matrices_take_a_second_launch(device, monkeypatch):
    launched = []
    call = powersgd_launches.launch
    monkeypatch.setattr(
        powersgd_launches,
        "launch",
        lambda file, name, *args: launched.append(name) or call(file, name, *args),
    )
    for rows, of_p in [
        (8192, ["orthogonalize_float"]),
        (8193, ["orthogonalize_float", "normalize_float"]),
    ]:
        launched.clear()
        bucket = bucket_of([(rows, 4), (20, 30)], 4, torch.float32, device)
        wanted = exact(bucket.matrices[0].p.cpu())
        powersgd.orthogonalize_p(bucket)
        powersgd.orthogonalize_q(bucket)
        assert launched == [*of_p, "orthogonalize_float"]
        assert float((bucket.matrices[0].p.double().cpu() - wanted).abs().max()) < 1e-6


@pytest.mark.parametrize("epsilon", [0, 1e-8])
@pytest.mark.parametrize("shape", [(7, 1), (7, 3), (5, 5), (40, 3)])
def test_orthogonalize_alone(shape, epsilon):
    matrix = torch.randn(shape)
    product = orthogonalize(matrix.clone(), epsilon)
    assert torch.allclose(product.t() @ product, torch.eye(shape[1]), atol=1e-4)
    assert torch.allclose(
        product @ (product.t() @ matrix), matrix, atol=1e-4
    )  # the same column space
