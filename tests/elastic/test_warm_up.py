"""Warm-up of a spare."""

import sys

import torch

from mpidist.c10d import generation
from mpidist.elastic.warm_up import warm_up


def test_it_imports_what_torch_delays_and_leaves_the_generator():
    state = torch.get_rng_state()
    warm_up()
    assert torch.equal(torch.get_rng_state(), state)
    assert {"torch._dynamo", "mpidist.ddp.module", "mpidist.checkpoint.loading"} <= set(sys.modules)
    # A spare that imports what another version of torch needs takes as long, or dies.
    assert generation.group_class().__module__ in sys.modules
