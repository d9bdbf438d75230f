"""The sharded optimizer against the plain one, bit by bit; its API, and what it refuses."""

from __future__ import annotations

import pytest

from mpidist.zero.optimizer import OSS
from tests.support import agree
from tests.zero import nets

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("name", nets.OPTIMIZERS)
def test_bits_of_the_plain_optimizer(group, name):
    optim, settings = nets.OPTIMIZERS[name]
    parameters = nets.parameters_for(name)
    plain = optim(parameters, **settings)
    nets.train(plain, parameters)
    # Every way with every partition once over the optimizers, and all of them with one.
    cases = [(kind, nets.WAYS[(place + len(name)) % 3]) for place, kind in enumerate(nets.partitions_of(name))]
    if name == "AdamW-foreach":
        cases = [(kind, way) for kind in nets.partitions_of(name) for way in nets.WAYS]
    for kind, way in cases:
        with nets.memory(way) as chosen:
            parameters = nets.parameters_for(name)
            sharded = OSS(parameters, optim, group, partition=kind, **chosen, **settings)
            nets.train(sharded, parameters)
        wrong = nets.differences(sharded, plain)
        agree(group, not wrong, f"{kind}, {way}: {wrong}")
