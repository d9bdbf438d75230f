"""Fixture of tests of the store: a prefix of the shared one."""

import time

import pytest
import torch.distributed as dist


@pytest.fixture
def store(group):
    from mpidist.comm.store.rendezvous import shared_store

    shared = shared_store()
    name = group.broadcast_object(f"test{time.time()}")
    # Through C++ and back, as torch uses the store.
    yield dist.PrefixStore(name, shared)
    group.barrier()
