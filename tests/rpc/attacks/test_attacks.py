"""Attacks of one worker on another with a list: each is refused with a reason and has no effect.

Rank 1 attacks; rank 0 has the list, and coordinates the shutdown; rank 2 is an accomplice. All
attacks share one ``init_rpc``.
"""

from __future__ import annotations

import importlib
import logging

import pytest

import mpidist.rpc as rpc
from mpidist.rpc import membership
from mpidist.rpc.threads import interceptor
from tests.rpc.attacks import victim
from tests.rpc.attacks.attacker import Attack, Attacker, outcome_of
from tests.tools.support import agree

MODULES = ("pickles", "names", "methods", "tensors", "data", "answers", "services", "wire")
ATTACKER, ATTACKED = 1, 0

ATTACKS: list[tuple[str, Attack]] = [
    (module, attack)
    for module in MODULES
    for attack in importlib.import_module(f"tests.rpc.attacks.{module}").attack
]


@pytest.fixture(scope="module")
def workers(world):
    """Workers for all attacks; the second alone has a list."""
    logger = logging.getLogger("mpidist")
    logger.addHandler(victim.log)
    is_attacked = world.rank == ATTACKED
    before = interceptor.engine
    interceptor.load()  # other tests of this job may have taken it away
    rpc.init_rpc(f"worker{world.rank}", group=world, allowed=victim.LISTED if is_attacked else None)
    yield world
    logger.removeHandler(victim.log)
    rpc.shutdown(timeout=10)
    interceptor.register(before)
    # Payloads of the attacker are received no more by this transport: later tests of this job need
    # another one.
    world.barrier()
    membership._transports.pop(world.world_ranks).close(1)


def test_names_are_unique():
    names = [f"{module}.{attack.name}" for module, attack in ATTACKS]
    assert len(set(names)) == len(names) and all(attack.idea for _, attack in ATTACKS)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    "attack", [pytest.param(attack, id=f"{module}.{attack.name}") for module, attack in ATTACKS]
)
def test_an_attack_is_refused(workers, attack):
    if attack.ranks > workers.size:
        pytest.skip(f"needs {attack.ranks} ranks")
    wrong = outcome_of(attack, Attacker(ATTACKED)) if workers.rank == ATTACKER else []
    agree(workers, not wrong, f"{attack.idea}: {wrong}")
