"""A fragment's pseudo-gradient: global parameters minus the rank's own, and what is asked of it."""

import math

import pytest
import torch

from mpidist.ddp.outer_fragment import OuterFragment


def fragment_of(group, *tensors):
    made = OuterFragment([f"p{n}" for n in range(len(tensors))], tensors)
    made.allocate(group)
    return made


@pytest.mark.mpi
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64]
)
@pytest.mark.parametrize("value", [0.0, 1.0, math.inf, -math.inf, math.nan])
def test_one_element_that_is_not_finite_or_not_zero_is_found(group, dtype, value):
    own = [torch.ones(3, 5, dtype=dtype), torch.ones(7, dtype=dtype), torch.ones(0, dtype=dtype)]
    fragment = fragment_of(group, *own)
    own[1][-1] -= value
    fragment.subtract()
    assert fragment.is_finite() == math.isfinite(value)
    assert fragment.is_zero() == (value == 0)


@pytest.mark.mpi
def test_a_sum_that_overflows_is_finite(group):
    own = [torch.zeros(64)]
    fragment = fragment_of(group, *own)
    own[0].fill_(-torch.finfo(torch.float32).max)
    fragment.subtract()
    assert fragment.is_finite() and not fragment.is_zero()
