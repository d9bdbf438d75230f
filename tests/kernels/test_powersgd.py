"""PowerSGD's stages on a bucket, by twin, CUDA source and kernel, against plain matrix products."""

import random

import pytest
import torch

from mpidist.kernels import powersgd, powersgd_plan
from mpidist.kernels.powersgd import Bucket, Matrix

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
def test_each_stage_is_its_matrix_product(device, rank, dtype):
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


@pytest.mark.parametrize("epsilon", [0, 1e-8])
def test_nearly_dependent_columns(device, epsilon):
    bucket = bucket_of([(500, 60)], 4, torch.float32, device)
    p = bucket.matrices[0].p
    p[:, 1] = p[:, 0] + 1e-6 * p[:, 1]
    p[:, 3] = p[:, 2]
    powersgd.orthogonalize_p(bucket, epsilon)
    wide = p.double().cpu()
    assert float((wide.t() @ wide - torch.eye(4)).abs().max()) < 1e-4


@pytest.mark.parametrize("epsilon", [0, 1e-8])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("own", [1, 3])
def test_a_rank_above_the_matrixs_own_leaves_no_error(device, own, dtype, epsilon):
    """The columns beyond its rank are rounding that the norm makes long: orthogonal, or wrong."""
    for rank in (own + 1, 8, 24):
        bucket = bucket_of([(70, 50), (30, 200), (9, 40)], rank, dtype, device, feedback=False)
        wanted = []
        for x in bucket.matrices:
            n, m = x.m.shape
            x.m.copy_(torch.randn(n, own).to(x.m) @ torch.randn(own, m).to(x.m))
            wanted.append(x.m.double().cpu())
        powersgd.orthogonalize_q(bucket, epsilon)
        powersgd.project(bucket)
        powersgd.orthogonalize_p(bucket, epsilon)
        powersgd.backproject(bucket)
        powersgd.reconstruct(bucket)
        for x, exact in zip(bucket.matrices, wanted, strict=True):
            assert is_close(x.m, exact, torch.float32), (rank, x.m.shape)


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
