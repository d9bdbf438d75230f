"""Reduce operations of torch as mpidist's; pure."""

from types import SimpleNamespace

import pytest
from torch.distributed import ReduceOp, _make_nccl_premul_sum

from mpidist.c10d.reductions import operation_of, requested_operation
from mpidist.comm.algorithms import reduce_op

NAMES = ("SUM", "AVG", "MAX", "MIN", "PRODUCT", "BAND", "BOR", "BXOR")


@pytest.mark.parametrize("name", NAMES)
def test_each_operation_has_the_one_of_its_name(name):
    expected = getattr(reduce_op, name)
    assert operation_of(getattr(ReduceOp, name)) is expected
    opts = SimpleNamespace(reduceOp=ReduceOp(getattr(ReduceOp, name)))
    assert requested_operation(opts) is expected


def test_without_options_values_are_added():
    assert requested_operation(None) is reduce_op.SUM


def test_a_factor_goes_over():
    assert operation_of(_make_nccl_premul_sum(2.5)) == reduce_op.PremulSum(2.5)


def test_another_operation_is_refused():
    with pytest.raises(ValueError, match="no reduction"):
        operation_of("sum of squares")
