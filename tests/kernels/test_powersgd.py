"""PowerSGD's stages on a bucket, by twin, CUDA source and kernel, against plain matrix products."""

import random

import pytest
import torch

from mpidist.kernels import powersgd, powersgd_launches, powersgd_plan
from mpidist.kernels.powersgd import Bucket, Matrix, gram_schmidt, orthogonalize

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
# Odd, tiny, wide and tall shapes; more rows than a tile of backproject, more columns than a strip.
SHAPES = [(5, 7), (33, 150), (300, 64), (1, 40), (2, 1), (17, 129), (131, 36)]
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


def bucket_of(
    shapes, rank, dtype, device, feedback=True, whole=(40, 1, 5001), offset=0, batched=False
):
    def thin(n, r):
        return torch.randn(n * r).to(dtype).to(device).view(r, n).t()

    matrices = []
    for n, m in shapes:
        r = min(n, m, rank)
        memory = torch.randn(offset + n * m).to(dtype).to(device)
        error = torch.randn(n, m).to(dtype).to(device) if feedback else None
        matrices.append(Matrix(memory[offset:].view(n, m), error, thin(n, r), thin(m, r)))
    tensors = [torch.randn(numel).to(dtype).to(device) for numel in whole]
    return Bucket(matrices, tensors, torch.empty(sum(whole), dtype=dtype, device=device), batched)


def is_close(got, wanted, dtype):
    scale = float(wanted.abs().max()) + 1e-30
    return float((got.double().cpu() - wanted.cpu()).abs().max()) <= TOLERANCE[dtype] * scale


def doubles(tensors):
    return [t.double().cpu().clone() for t in tensors]


CASES = [(rank, torch.float32) for rank in (1, 3, 4, 7, 16, 32)] + [
    (rank, dtype) for rank in (4, 32) for dtype in DTYPES[1:]
]


@pytest.mark.parametrize(("rank", "dtype"), CASES, ids=str)
def test_the_stages_are_the_products_they_stand_for(device, rank, dtype):
    # An offset of two elements allows loads of 8 bytes in fp32.
    for feedback, scale, offset in [
        (True, 0.5, 0),
        (False, 1.0, 1),
        (False, 2.0, 0),
        (True, 1.0, 2),
    ]:
        check_stages(bucket_of(SHAPES, rank, dtype, device, feedback, offset=offset), scale)


@pytest.mark.parametrize("is_busy", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_few_long_rows(device, dtype, is_busy, monkeypatch):
    """Rows are divided among the warps of a block, unless the bucket has enough blocks."""
    monkeypatch.setattr(powersgd_plan, "_ENOUGH_BLOCKS", 0 if is_busy else 1024)
    shapes = [(1, 1024), (6, 1023), (3, 1501), (9, 2050), (7, 4100), (40, 30)]
    for rank, feedback, offset in [(3, True, 0), (8, False, 2), (20, True, 0)]:
        check_stages(bucket_of(shapes, rank, dtype, device, feedback, offset=offset), 0.5)


@pytest.mark.parametrize("seed", range(4))
def test_any_shapes(device, seed):
    generator = random.Random(seed)
    for _ in range(3):
        shapes = [
            (
                generator.randint(1, 300),
                generator.choice([generator.randint(1, 1100), 4 * generator.randint(1, 80)]),
            )
        ]
        shapes += [
            (generator.randint(1, 20), 2 * generator.randint(1, 900))
            for _ in range(generator.randint(0, 3))
        ]
        dtype, rank, feedback = (
            generator.choice(DTYPES),
            generator.randint(1, 8),
            generator.random() < 0.6,
        )
        bucket = bucket_of(shapes, rank, dtype, device, feedback, offset=generator.randint(0, 4))
        check_stages(bucket, generator.choice([1.0, 0.25]))


def check_stages(bucket, scale):
    """Compare all stages with plain products in fp64, up to the rounding of the bucket's dtype."""
    feedback, dtype = bucket.matrices[0].e is not None, bucket.dtype
    xs = [
        x.m.double().cpu() * scale + (x.e.double().cpu() if feedback else 0)
        for x in bucket.matrices
    ]
    qs, whole = doubles(x.q for x in bucket.matrices), doubles(bucket.whole)
    errors = [x.e.clone() for x in bucket.matrices if x.e is not None]
    powersgd.project(bucket, scale)
    for x, wanted, q in zip(bucket.matrices, xs, qs, strict=True):
        assert x.e is None or is_close(x.m, wanted, dtype)
        assert is_close(x.p, wanted @ q, dtype), x.m.shape
    assert is_close(bucket.slots, torch.cat(whole) * scale, dtype)
    ps = doubles(x.p for x in bucket.matrices)
    powersgd.backproject(bucket, scale)
    powersgd.backproject(bucket, scale)  # a second call must not depend on state of the first
    for x, wanted, p in zip(bucket.matrices, xs, ps, strict=True):
        assert is_close(x.q, wanted.t() @ p, dtype), x.m.shape
    assert all(torch.equal(a, b.e) for a, b in zip(errors, bucket.matrices, strict=feedback)), (
        "E changes at the end alone"
    )
    for x in bucket.matrices:
        x.q.mul_(0.01)
    bucket.slots.mul_(3)
    qs = doubles(x.q for x in bucket.matrices)
    powersgd.reconstruct(bucket)
    for x, wanted, p, q in zip(bucket.matrices, xs, ps, qs, strict=True):
        assert is_close(x.m, p @ q.t(), dtype), x.m.shape
        if feedback:
            sizes = float(wanted.abs().max() + (p @ q.t()).abs().max())
            assert (
                float((x.m.double() + x.e.double()).cpu().sub(wanted).abs().max())
                <= TOLERANCE[dtype] * sizes
            )
    assert is_close(torch.cat(bucket.whole), torch.cat(whole) * scale * 3, dtype)


def test_many_rows_are_shared_among_blocks(device):
    bucket = bucket_of([(9000, 12), (700, 300)], 4, torch.float32, device)
    for _ in range(3):
        powersgd.backproject(bucket)
        for x in bucket.matrices:
            assert is_close(x.q, x.m.double().cpu().t() @ x.p.double().cpu(), torch.float32)
        first = [x.q.clone() for x in bucket.matrices]
        powersgd.backproject(bucket)
        assert all(torch.equal(x.q, q) for x, q in zip(bucket.matrices, first, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rank", [1, 2, 5, 32])
def test_columns_become_orthonormal_and_span_the_same(device, rank, dtype):
    bucket = bucket_of([(200, 40), (33, 1500), (64, 33)], rank, dtype, device)
    before = doubles(x.p for x in bucket.matrices), doubles(x.q for x in bucket.matrices)
    powersgd.orthogonalize_p(bucket)
    powersgd.orthogonalize_q(bucket)
    limit = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.1}[dtype]
    for olds, news in zip(
        before, ([x.p for x in bucket.matrices], [x.q for x in bucket.matrices]), strict=True
    ):
        for old, new in zip(olds, doubles(news), strict=True):
            identity = torch.eye(new.shape[1], dtype=torch.float64)
            assert float((new.t() @ new - identity).abs().max()) < limit
            outside = old - new @ (new.t() @ old)
            assert float(outside.abs().max()) < limit * float(old.abs().max())


def test_nearly_dependent_columns(device):
    bucket = bucket_of([(500, 60)], 4, torch.float32, device)
    p = bucket.matrices[0].p
    p[:, 1] = p[:, 0] + 1e-6 * p[:, 1]
    p[:, 3] = p[:, 2]
    powersgd.orthogonalize_p(bucket)
    wide = p.double().cpu()
    assert float((wide.t() @ wide - torch.eye(4)).abs().max()) < 1e-4


@pytest.mark.parametrize("epsilon", [0, 1e-8])
def test_zeros_stay_finite(device, epsilon):
    bucket = bucket_of([(50, 30)], 3, torch.float32, device)
    x = bucket.matrices[0]
    x.m.zero_()
    x.e.zero_()
    powersgd.orthogonalize_q(bucket, epsilon)
    powersgd.project(bucket)
    powersgd.orthogonalize_p(bucket, epsilon)
    powersgd.backproject(bucket)
    powersgd.reconstruct(bucket)
    assert not x.m.any() and not x.e.any() and bool(x.p.isfinite().all())


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


def test_batched_twins_multiply_the_same(device):
    one, other = (
        bucket_of([(20, 30), (20, 30), (8, 9)], 2, torch.float32, device, batched=b)
        for b in (False, True)
    )
    for mine, theirs in zip(one.matrices, other.matrices, strict=True):
        for name in ("m", "e", "p", "q"):
            getattr(theirs, name).copy_(getattr(mine, name))
    for stage in (powersgd.project, powersgd.backproject, powersgd.reconstruct):
        stage(one)
        stage(other)
    for mine, theirs in zip(one.matrices, other.matrices, strict=True):
        assert torch.allclose(mine.m, theirs.m, atol=1e-3) and torch.allclose(
            mine.e, theirs.e, atol=1e-3
        )


@pytest.mark.parametrize("epsilon", [0, 1e-8])
@pytest.mark.parametrize("shape", [(7, 1), (7, 3), (5, 5), (40, 3)])
def test_orthogonalize_alone(shape, epsilon):
    matrix = torch.randn(shape)
    product = orthogonalize(matrix.clone(), epsilon)
    assert torch.allclose(product.t() @ product, torch.eye(shape[1]), atol=1e-4)
    assert torch.allclose(
        product @ (product.t() @ matrix), matrix, atol=1e-4
    )  # the same column space


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_element_that_is_not_finite_is_found(device, dtype):
    for numel in (1, 7, 33, 5001):
        flat = torch.full((numel,), torch.finfo(dtype).max, dtype=dtype, device=device)
        assert powersgd.is_finite(flat), "the sum overflows, the elements do not"
        for bad in (float("nan"), float("inf"), float("-inf")):
            for place in {0, numel // 2, numel - 1}:
                other = torch.randn(numel).to(dtype).to(device)
                assert powersgd.is_finite(other)
                other[place] = bad
                assert not powersgd.is_finite(other)
    assert powersgd.is_finite(torch.empty(0, dtype=dtype, device=device))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("feedback", [True, False])
def test_a_step_that_is_given_up_leaves_the_errors(device, dtype, feedback):
    bucket = bucket_of(SHAPES, 4, dtype, device, feedback)
    errors, whole = [x.e.clone() for x in bucket.matrices if x.e is not None], doubles(bucket.whole)
    for x in bucket.matrices:
        x.m[x.m.shape[0] // 2, x.m.shape[1] - 1] = float("inf")
    powersgd.project(bucket)
    assert not any(powersgd.is_finite(x.p) for x in bucket.matrices)
    if feedback:
        bucket.matrices[1].e[3, 4] = float("nan")  # as after an overflow of X − M
        errors[1][3, 4] = 0
    for tensor in bucket.whole:
        tensor.zero_()
    powersgd.give_up(bucket)
    assert all(bool(x.m.isnan().all()) for x in bucket.matrices)
    assert all(torch.equal(a, x.e) for a, x in zip(errors, bucket.matrices, strict=feedback))
    assert all(is_close(a, b, dtype) for a, b in zip(bucket.whole, whole, strict=True))


def test_a_product_of_several_blocks_is_the_same(monkeypatch):
    one, other = (
        bucket_of([(33, 50), (7, 300)], 3, torch.float32, torch.device("cpu")) for _ in range(2)
    )
    for mine, theirs in zip(one.matrices, other.matrices, strict=True):
        for name in ("m", "e", "p", "q"):
            getattr(theirs, name).copy_(getattr(mine, name))
    powersgd.reconstruct(one)
    monkeypatch.setattr(powersgd, "_BLOCK_NUMEL", 200)
    powersgd.reconstruct(other)
    for mine, theirs in zip(one.matrices, other.matrices, strict=True):
        assert torch.allclose(mine.m, theirs.m, atol=1e-5) and torch.allclose(
            mine.e, theirs.e, atol=1e-5
        )
