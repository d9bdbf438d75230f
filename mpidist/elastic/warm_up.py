"""Warm-up of a spare process, before it waits.

A spare has run the program up to ``run``, so its modules are imported. What torch imports only at
the first step of a training takes seconds, which the recovery would wait for.
"""

from __future__ import annotations

import importlib

import torch

from mpidist.c10d import generation

# What torch and mpidist import at their first use.
_MODULES = (
    "torch._dynamo",
    "torch.distributed.device_mesh",
    "torch.nn.parallel.distributed",
    f"{generation.FOLDER}.process_group",
    "mpidist.checkpoint.commits",
    "mpidist.checkpoint.loading",
    "mpidist.comm.world_group",
    "mpidist.ddp.module",
    "mpidist.zero.optimizer",
)


def import_late_modules() -> None:
    """Import what torch and mpidist import at their first use in a training."""
    for name in _MODULES:
        importlib.import_module(name)


def warm_up() -> None:
    """Import what the first step of a training would import, and take one on a small model."""
    import_late_modules()
    # With torch's own generator untouched: the program may have seeded it.
    with torch.random.fork_rng(devices=()):
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
