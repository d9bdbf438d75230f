"""torch's default group on mpidist, once a module; verdicts go over the native group, which a broken default cannot disturb."""

from __future__ import annotations

import pytest
import torch.distributed as dist


@pytest.fixture(scope="module")
def default_group(world):
    """torch's default group on our backend, for all tests of a module."""
    dist.init_process_group("mpidist")
    yield dist.group.WORLD
    world.barrier()
    dist.destroy_process_group()
