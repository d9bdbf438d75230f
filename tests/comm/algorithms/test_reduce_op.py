"""The plan of a reduction, over every dtype and operation."""

import pytest
import torch

from mpidist.comm.algorithms import reduce_op
from mpidist.comm.algorithms.reduce_op import (
    AVG,
    BAND,
    BOR,
    BXOR,
    MAX,
    MIN,
    OPERATIONS,
    PRODUCT,
    SUM,
    PremulSum,
    reduction,
)

INTEGERS = [
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex32, torch.complex64, torch.complex128]


def test_every_number_adds_and_multiplies():
    for dtype in INTEGERS + FLOATS + COMPLEX:
        for op in (SUM, PRODUCT, AVG):
            plan = reduction(dtype, op)
            assert plan.combine == (SUM if op == AVG else op)
            assert plan.divides == (op == AVG)


def test_narrow_types_accumulate_wide_and_others_in_their_own():
    assert reduction(torch.float16, SUM).wide is torch.float32
    assert reduction(torch.bfloat16, MAX).wide is torch.float32
    assert reduction(torch.float8_e4m3fn, SUM).wide is torch.float32
    assert reduction(torch.complex32, SUM).wide is torch.complex64
    for dtype in [*INTEGERS, torch.float32, torch.float64, torch.bool]:
        assert reduction(dtype, SUM).wide is None


@pytest.mark.parametrize("op", [BAND, BOR, BXOR])
def test_bitwise_operations_refuse_fractions(op):
    for dtype in FLOATS + COMPLEX:
        with pytest.raises(TypeError, match=op):
            reduction(dtype, op)
    for dtype in [*INTEGERS, torch.bool]:
        assert reduction(dtype, op).combine == op


@pytest.mark.parametrize("op", [MIN, MAX])
def test_complex_numbers_have_no_order(op):
    for dtype in COMPLEX:
        with pytest.raises(TypeError, match="order"):
            reduction(dtype, op)


def test_a_mean_of_booleans_is_refused():
    with pytest.raises(TypeError, match="bool"):
        reduction(torch.bool, AVG)
    with pytest.raises(TypeError, match="bool"):
        reduction(torch.bool, PremulSum(2.0))


def test_premul_carries_its_factor():
    plan = reduction(torch.float32, PremulSum(0.5))
    assert (plan.combine, plan.factor, plan.divides) == (SUM, 0.5, False)


def test_an_unknown_operation_names_the_known_ones():
    with pytest.raises(ValueError, match="sum, avg"):
        reduction(torch.float32, "mean")


def test_types_without_arithmetic_say_so():
    with pytest.raises(TypeError, match="no arithmetic"):
        reduction(torch.qint8, SUM)


def test_operations_and_accumulation_types_are_those_listed():
    assert set(OPERATIONS) == {SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR}
    assert set(reduce_op.ACCUMULATES_IN.values()) == {torch.float32, torch.complex64}


def test_factors_are_checked_before_anything_is_sent():
    assert reduction(torch.int32, PremulSum(2.0)).factor == 2
    assert isinstance(reduction(torch.int32, PremulSum(torch.tensor(2.0))).factor, int)
    assert reduction(torch.float8_e4m3fn, PremulSum(0.5)).wide is torch.float32
    assert reduction(torch.complex64, PremulSum(1j)).factor == 1j
    for dtype, factor in (
        (torch.int64, 0.5), (torch.uint8, -1), (torch.uint8, 256), (torch.int16, float("inf")),
        (torch.int8, float("nan")),
        (torch.float32, 1j), (torch.bfloat16, 2j),
    ):  # fmt: skip
        with pytest.raises(TypeError, match="PREMUL_SUM needs"):
            reduction(dtype, PremulSum(factor))
    for wrong in ("2", None, torch.ones(2), [1]):
        with pytest.raises(TypeError, match="PremulSum needs a number"):
            PremulSum(wrong)


def test_unsigned_integers_are_scaled_modulo_their_range():
    for dtype, bits in (
        (torch.uint8, 8),
        (torch.uint16, 16),
        (torch.uint32, 32),
        (torch.uint64, 64),
    ):
        values = torch.tensor([0, 1, 200]).to(dtype)
        factor = 2 ** (bits - 1) + 3
        reduce_op.scale(values, reduction(dtype, PremulSum(factor)))
        assert [int(v) for v in values.numpy()] == [v * factor % 2**bits for v in (0, 1, 200)]


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int64])
@pytest.mark.parametrize("size", [3, 127, 128, 200, 300, 32768, 70000])
def test_a_mean_of_integers_is_rounded_towards_zero_at_any_number_of_ranks(dtype, size):
    info = torch.iinfo(dtype)
    sums = [info.min, max(info.min, -size), -1 if info.min else 1, 0, min(info.max, size), info.max]
    values = torch.tensor(sums, dtype=dtype)
    reduce_op.divide(values, reduce_op.reduction(dtype, AVG), size)
    expected = [abs(one) // size * (1 if one > 0 else -1) for one in sums]
    assert values.tolist() == expected
