"""Checks of parameters, gradients and state for torch's fused kernels."""

from __future__ import annotations

import pytest
import torch

from mpidist.optim import fused
from mpidist.optim.grad_attribute import GradAttributeOptimizer
from tests.tools.support import python, started


def test_dense_tensors():
    matrix = torch.ones(3, 4)
    assert fused.is_dense(matrix) and fused.is_dense(matrix.t())
    assert not fused.is_dense(matrix[:, :2]) and not fused.is_dense(torch.ones(1).expand(3))
    fused.require_dense([matrix])
    with pytest.raises(ValueError, match="fill their memory"):
        fused.require_dense([matrix, matrix[:, :2]])


def test_values_are_laid_out_as_their_parameter():
    parameter, value = torch.empty(3, 4).t(), torch.arange(12.0).view(4, 3)
    found = fused.laid_out(value, parameter)
    assert found.stride() == (1, 4) and torch.equal(found, value)
    assert fused.laid_out(found, parameter) is found
    other = torch.ones(2)
    assert fused.laid_out(other, parameter) is other


def test_states_that_a_fused_kernel_takes():
    parameter = torch.ones(3)
    fused.require_state("exp_avg", torch.ones(3), parameter)
    fused.require_state("step", torch.ones(()), parameter)
    fused.require_state("norm", torch.ones(1), parameter, present=torch.ones(1))
    for name, value, present in [
        ("exp_avg", torch.ones(1), None),
        ("exp_avg", torch.ones(1), torch.ones(3)),
        ("exp_avg", torch.ones(1), 1.0),
        ("exp_avg", torch.ones(3).to_sparse(), None),
        ("step", torch.ones(0), None),
        ("step", torch.ones(3), None),
    ]:
        with pytest.raises(ValueError, match=f"the state has '{name}' of"):
            fused.require_state(name, value, parameter, present=present)


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_gradients_and_state_of_other_strides(name):
    """torch's kernels would pair wrong elements."""
    mine, theirs = [torch.linspace(-1, 1, 12).view(3, 4).t().requires_grad_() for _ in range(2)]
    options = {"lr": 0.1, **({"momentum": 0.9} if name == "SGD" else {})}
    ours = GradAttributeOptimizer(getattr(torch.optim, name), [mine], fused=True, **options)
    loop = getattr(torch.optim, name)([theirs], foreach=False, **options)
    for number in range(3):
        gradient = torch.arange(12.0).sub(4 + number).view(4, 3)
        if number:
            for own, value in ours._optimizer.state[mine].items():
                ours._optimizer.state[mine][own] = value.contiguous() if value.dim() else value
        ours.step([gradient])
        theirs.grad = gradient
        loop.step()
        torch.testing.assert_close(mine, theirs)


# In a separate process, which the kernel may crash.
SCRIPT = """
import torch
from mpidist.optim.grad_attribute import GradAttributeOptimizer
size = 1 << 20
whole = torch.nn.Parameter(torch.zeros(size))
optimizer = GradAttributeOptimizer(torch.optim.Adam, [whole], fused=True)
last = torch.ones(size).as_strided((size,), (0,), size - 1)
optimizer.step([last])
optimizer._optimizer.state[whole]["exp_avg"] = torch.zeros(size).as_strided((size,), (0,), size - 1)
optimizer.step([last])
assert len(set(whole.tolist())) == 1, "other memory was read"
narrow = torch.ones(1).expand(size).requires_grad_()
try:
    GradAttributeOptimizer(torch.optim.Adam, [narrow], fused=True).step([torch.ones(size)])
except ValueError as error:
    print(error)
"""


def test_nothing_behind_the_memory_is_used():
    done = started([*python(), "-c", SCRIPT], 100)
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert "fill their memory" in done.stdout
