"""Fast path of the all-reduce: calls of MPI prepared for a tensor's memory."""

import pytest
import torch

from mpidist.comm.algorithms.reduce_op import (
    MAX,
    SUM,
)
from tests.tools.support import agree

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("numel", [3, 5_000, 200_000])
def test_the_fast_path_writes_below_autograd(group, dtype, numel):
    leaf = torch.ones(numel, dtype=dtype, requires_grad=True)
    group.all_reduce(leaf.detach())  # prepares the fast path
    outcome = group.all_reduce_at_once(leaf, SUM)
    value = float(group.size**2) if outcome else float(group.size)
    agree(
        group,
        leaf.is_leaf and leaf.grad_fn is None and bool((leaf == value).all()),
        f"{outcome} {leaf}",
    )


def test_the_fast_path_notices_reused_memory(group):
    whole = torch.ones(8)
    for view, op, expected in [
        (whole[:4], SUM, group.size),
        (whole[:2], SUM, group.size**2),
        (whole[:2].view(torch.int32), MAX, None),
        (whole[:4], MAX, None),
        (whole[:4].view(2, 2).t(), SUM, None),
    ]:
        before = view.clone()
        group.all_reduce(view, op)
        wanted = (
            torch.full_like(before, expected)
            if expected
            else before * group.size
            if op == SUM
            else before
        )
        agree(group, torch.equal(view, wanted), f"{view} {wanted}")
