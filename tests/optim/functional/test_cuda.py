"""Functional optimizers on CUDA devices: bits of torch's fused, foreach and plain steps."""

from __future__ import annotations

import pytest
import torch

from mpidist.optim import functional
from tests.tools.support import busy

FUSED = ("Adagrad", "Adam", "AdamW", "SGD")
OTHERS = tuple(sorted({*functional.__all__} - {"FunctionalOptimizer", *FUSED}))
PLAIN, FOREACH, ONE_KERNEL = {"foreach": False}, {"foreach": True}, {"fused": True}
CASES = [(name, ONE_KERNEL) for name in FUSED]
CASES += [(name, ways) for name in (*FUSED, *OTHERS) for ways in (PLAIN, FOREACH)]


@pytest.mark.parametrize(("name", "way"), CASES, ids=str)
def test_bits_are_torchs(target, name, way):
    more = {"momentum": 0.9} if name == "SGD" else {}
    starts = [torch.linspace(-1, 1, numel) for numel in (1, 7, 2049, 70_000)]
    mine, theirs = (
        [torch.nn.Parameter(start.clone().to(target)) for start in starts] for _ in range(2)
    )
    ours = getattr(functional, name)(mine, lr=0.1, **way, **more)
    torchs = getattr(torch.optim, name)(theirs, lr=0.1, **way, **more)
    for _ in range(3):
        busy(target)
        for parameter in theirs:
            parameter.grad = parameter.detach().cos()
        ours.step([parameter.grad.clone() for parameter in theirs])
        torchs.step()
    assert all(map(torch.equal, mine, theirs))
