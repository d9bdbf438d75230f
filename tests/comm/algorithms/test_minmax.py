"""MIN and MAX of floating-point numbers: NaN wins, and zeros are ordered."""

import pytest
import torch

from mpidist.comm.algorithms.reduce_op import (
    MAX,
    MIN,
)
from tests.comm.algorithms.test_reductions import FLOATS, part
from tests.tools.support import agree, reduced

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("op", [MIN, MAX])
def test_nan_wins_and_zeros_are_ordered(group, dtype, op):
    """MPI leaves both undefined; here all ranks hold the same bits, and NaN wins."""
    W = group.size
    for numel in (1, 6, 70_001):
        parts = [part(r, (numel,), torch.float32) for r in range(W)]
        for r in range(W):
            parts[r][r % numel :: 7] = float("nan")
        parts = [p.to(dtype) for p in parts]
        expected = reduced([p.float() for p in parts], op)
        tensor = parts[group.rank].clone()
        group.all_reduce(tensor, op)
        agree(
            group,
            torch.equal(tensor.float().nan_to_num(99), expected.nan_to_num(99)),
            f"all_reduce {numel}",
        )
        kept = parts[group.rank].clone()
        group.reduce(kept, 0, op)
        wanted = expected if group.rank == 0 else parts[group.rank].float()
        agree(
            group,
            torch.equal(kept.float().nan_to_num(99), wanted.nan_to_num(99)),
            f"reduce {numel}",
        )
        target = torch.empty(numel, dtype=dtype)
        group.reduce_scatter_tensor(target, parts[group.rank].repeat(W), op)
        agree(
            group,
            torch.equal(target.float().nan_to_num(99), expected.nan_to_num(99)),
            f"reduce_scatter {numel}",
        )
    zero = torch.tensor([0.0 if group.rank == 0 else -0.0]).to(dtype)
    group.all_reduce(zero, op)
    negative = bool(torch.signbit(zero.float()))
    agree(group, negative == (op == MIN and group.size > 1), f"{zero}")
