"""Settings that a narrow dtype does not hold get a warning."""

import warnings

import pytest
import torch

from mpidist.optim import functional
from mpidist.optim.grad_attribute import GradAttributeOptimizer


def test_an_eps_that_the_dtype_does_not_hold_gets_a_warning():
    narrow = [torch.nn.Parameter(torch.ones(3, dtype=torch.float16))]
    with pytest.warns(UserWarning, match="eps=1e-08 is 0 in float16.*Give eps of at least 6e-08"):
        functional.AdamW(narrow)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        functional.AdamW(narrow, eps=1e-4)
        functional.SGD(narrow, lr=0.1)
        for dtype in (torch.bfloat16, torch.float32):
            functional.AdamW([torch.nn.Parameter(torch.ones(3, dtype=dtype))])


def test_an_optimizer_without_a_functional_form_gets_it_too():
    narrow = [torch.nn.Parameter(torch.ones(3, dtype=torch.float16))]
    with pytest.warns(UserWarning, match="eps=1e-08 is 0 in float16"):
        GradAttributeOptimizer(torch.optim.NAdam, narrow)
